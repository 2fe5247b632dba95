# LSSAR Table A6, "ReLU6": 3.2039 (e^x: 3.1911)
attention = "phi_relu6"
