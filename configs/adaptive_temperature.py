# softmax(beta z), beta a polynomial of degree 4 in the entropy of softmax(z), where it is above
# 0.5, and at least 1 (Velickovic et al. 2024, arXiv 2410.01104). The paper has it at evaluation,
# for the weights of a softmax model: --attention=adaptive_temperature there. Its entropy has
# log(A + 1e-9), ours log A.
attention = "adaptive_temperature"
