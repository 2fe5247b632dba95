# LSSAR Table 1, ReLU (Shen et al.): 1K 3.2155, 2K 6.5573, 4K 8.9072, 8K 10.7266
attention = "relu_shen"
