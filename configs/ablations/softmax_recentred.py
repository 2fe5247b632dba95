# LSSAR Table A4, "Re-centred": 3.2008 (Softmax 3.1911)
attention = "softmax_recentred"
