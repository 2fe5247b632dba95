# LSSAR Table A4, "Inverse": 3.1915 (Softmax 3.1911)
attention = "softmax_inverse"
