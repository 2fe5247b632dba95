# LSSAR Table A5, scenario II, e^x without l1-norm: 3.247 (IV, Softmax: 3.1911)
attention = "exp"
