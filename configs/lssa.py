# LSSAR Table 1, "LSSA": 3.1905 at 1K, 4.1301 at 2K, 5.2960 at 4K, 5.9403 at 8K
attention = "lssa"
