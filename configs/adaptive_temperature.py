# softmax(beta z). Where the entropy of softmax(z) is above 0.5, beta is a polynomial of degree 4 in
# it, but at least 1; elsewhere beta is 1 (Velickovic et al. 2024, arXiv 2410.01104). The paper
# applies it only at evaluation, to a softmax model: so does --attention=adaptive_temperature in our
# evaluations. The paper's entropy uses log(A + 1e-9), ours log A.
attention = "adaptive_temperature"
