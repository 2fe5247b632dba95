# LSSAR Table A6, "GeLU": 3.2051 (e^x: 3.1911)
attention = "phi_gelu"
