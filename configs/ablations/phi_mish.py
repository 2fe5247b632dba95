# LSSAR Table A6, "Mish": 3.2001 (e^x: 3.1911)
attention = "phi_mish"
