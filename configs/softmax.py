# LSSAR Table 1, Softmax: 1K 3.1911, 2K 4.1662, 4K 5.4513, 8K 6.2823
attention = "softmax"
