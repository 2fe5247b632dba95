# LSSAR Table 1, ReLU (Wortsman et al.): 1K 3.2143, 2K 6.2662, 4K 8.4982, 8K 10.3460
attention = "relu_wortsman"
