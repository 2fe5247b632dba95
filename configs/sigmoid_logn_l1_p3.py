# LSSAR Table 1, Sigmoid (b = -log N, l1-norm), p = 3: 1K 3.1841, 2K 3.7387, 4K 4.9286, 8K 5.7450
attention = "sigmoid_logn_l1"
p = 3
