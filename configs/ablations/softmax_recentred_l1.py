# LSSAR Table A4, "Re-centred & l1-norm": 3.1954 (Softmax 3.1911)
attention = "softmax_recentred_l1"
