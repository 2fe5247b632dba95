# LSSAR Table 1, "Softmax", re-weighted (p = 3): 3.1879 at 1K, 4.0277 at 2K, 5.2842 at 4K, 6.2339 at 8K
attention = "softmax"
p = 3
