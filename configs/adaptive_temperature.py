# softmax(beta z), beta a polynomial of degree 4 in the entropy of softmax(z), where it is above
# 0.5, and at least 1 (Velickovic et al. 2024, arXiv 2410.01104). The paper applies it only
# at evaluation, to a softmax model: --attention=adaptive_temperature there. The paper's entropy
# uses log(A + 1e-9), ours log A.
attention = "adaptive_temperature"
