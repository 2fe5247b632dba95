# LSSAR Table 1, "Softmax", re-weighted (p = 15): 5.3878 at 1K, 5.9491 at 2K, 6.5276 at 4K, 7.0183 at 8K
attention = "softmax"
p = 15
