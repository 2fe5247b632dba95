# LSSAR Table A6, "Softplus": 3.1901 (e^x: 3.1911)
attention = "phi_softplus"
