# LSSAR Table 1, "ReLU (Wortsman et al.)": 3.2143 at 1K, 6.2662 at 2K, 8.4982 at 4K, 10.3460 at 8K
attention = "relu_wortsman"
