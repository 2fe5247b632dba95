# LSSAR Table 1, Sigmoid (Tab. A6): 1K 3.2000, 2K 4.3811, 4K 5.8465, 8K 6.5701
attention = "sigmoid_l1"
