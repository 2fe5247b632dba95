# LSSAR Table 1, Sigmoid (Ramapuram et al.): 1K 3.1935, 2K 7.4554, 4K 11.8355, 8K 14.4995
attention = "sigmoid"
