# LSSAR Table 1, "Softmax": 3.1911 at 1K, 4.1662 at 2K, 5.4513 at 4K, 6.2823 at 8K
attention = "softmax"
