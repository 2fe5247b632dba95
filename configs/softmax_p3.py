# LSSAR Table 1, Softmax, p = 3: 1K 3.1879, 2K 4.0277, 4K 5.2842, 8K 6.2339
attention = "softmax"
p = 3
