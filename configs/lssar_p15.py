# LSSAR Table 1, LSSAR, p = 15: 1K 3.1905, 2K 3.1930, 4K 3.2291, 8K 3.3171
attention = "lssar"
p = 15
