# LSSAR Table A6, "ReLU^2": 3.2494 (e^x: 3.1911)
attention = "phi_relu2"
