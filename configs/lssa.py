# LSSAR Table 1, LSSA: 1K 3.1905, 2K 4.1301, 4K 5.2960, 8K 5.9403
attention = "lssa"
