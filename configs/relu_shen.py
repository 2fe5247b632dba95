# LSSAR Table 1, "ReLU (Shen et al.)": 3.2155 at 1K, 6.5573 at 2K, 8.9072 at 4K, 10.7266 at 8K
attention = "relu_shen"
