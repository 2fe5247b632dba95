# LSSAR Table 1, "Sigmoid (b = -log N, l1-norm)", re-weighted (p = 15): 3.2171 at 1K, 3.3499 at 2K, 3.6108 at 4K, 3.8587 at 8K
attention = "sigmoid_logn_l1"
p = 15
