# LSSAR Table 1, ReLU (Li et al.): 1K 3.2006, 2K 4.5192, 4K 5.6924, 8K 6.4561
attention = "relu_li"
