# LSSAR Table 1, "Sigmoid (Ramapuram et al.)", b = -log L: 3.1935 at 1K, 7.4554 at 2K, 11.8355 at 4K, 14.4995 at 8K
attention = "sigmoid"
