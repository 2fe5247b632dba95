# LSSAR Table A5, scenario III, l1-norm without e^x: 3.3297 (IV, Softmax: 3.1911)
attention = "linear_l1"
