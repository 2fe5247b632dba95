# LSSAR Table 1, Sigmoid (b = -log N, l1-norm): 1K 3.1849, 2K 4.3470, 4K 5.5544, 8K 6.1846
attention = "sigmoid_logn_l1"
