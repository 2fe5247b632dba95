# LSSAR Table 1, LSSAR, p = 3: 1K 3.1782, 2K 4.2383, 4K 5.4056, 8K 6.3007
attention = "lssar"
p = 3
