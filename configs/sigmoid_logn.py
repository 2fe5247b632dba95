# LSSAR Table 1, Sigmoid (b = -log N): 1K 3.1930, 2K 6.5830, 4K 8.4679, 8K 9.5939
attention = "sigmoid_logn"
