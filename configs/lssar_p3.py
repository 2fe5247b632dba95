# LSSAR Table 1, "LSSAR", p = 3: 3.1782 at 1K, 4.2383 at 2K, 5.4056 at 4K, 6.3007 at 8K
attention = "lssar"
p = 3
