# LSSAR Table 1, "Sigmoid (b = -log N, l1-norm)": 3.1849 at 1K, 4.3470 at 2K, 5.5544 at 4K, 6.1846 at 8K
attention = "sigmoid_logn_l1"
