# LSSAR Table 1, Softmax, p = 15: 1K 5.3878, 2K 5.9491, 4K 6.5276, 8K 7.0183
attention = "softmax"
p = 15
