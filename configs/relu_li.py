# LSSAR Table 1, "ReLU (Li et al.)": 3.2006 at 1K, 4.5192 at 2K, 5.6924 at 4K, 6.4561 at 8K
attention = "relu_li"
