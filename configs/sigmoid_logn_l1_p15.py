# LSSAR Table 1, Sigmoid (b = -log N, l1-norm), p = 15: 1K 3.2171, 2K 3.3499, 4K 3.6108, 8K 3.8587
attention = "sigmoid_logn_l1"
p = 15
