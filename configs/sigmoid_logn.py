# LSSAR Table 1, "Sigmoid (b = -log N)": 3.1930 at 1K, 6.5830 at 2K, 8.4679 at 4K, 9.5939 at 8K
attention = "sigmoid_logn"
