# LSSAR Table 1, "Sigmoid (b = -log N, l1-norm)", re-weighted (p = 3): 3.1841 at 1K, 3.7387 at 2K, 4.9286 at 4K, 5.7450 at 8K
attention = "sigmoid_logn_l1"
p = 3
