# LSSAR Table 1, "LSSAR", p = 15: 3.1905 at 1K, 3.1930 at 2K, 3.2291 at 4K, 3.3171 at 8K
attention = "lssar"
p = 15
