# LSSAR Table A5, scenario I, neither e^x nor l1-norm: 3.4138 (IV, Softmax: 3.1911)
attention = "linear"
