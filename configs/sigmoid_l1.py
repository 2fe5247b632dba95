# LSSAR Table 1, "Sigmoid (Tab. A6)": 3.2000 at 1K, 4.3811 at 2K, 5.8465 at 4K, 6.5701 at 8K
attention = "sigmoid_l1"
