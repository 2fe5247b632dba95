# ASEntmax (Vasylenko et al. 2025, arXiv 2506.16640): 1.5-entmax of (1 + beta log(n + 1)^gamma) z
# with beta = softplus(u) and gamma = 2 tanh(w), u and w of each row and head linear in the layer's
# input; half of the heads have ALiBi and the others no positions (its NAPE). Here the second half
# has ALiBi, with the slopes of Press et al., and all heads are scaled; in the authors' code the
# first half has ALiBi, with slopes 1 / h (h from 1), and only the other half is scaled. The paper
# claims that accuracy on synthetic tasks holds up to 1,000 times the training length.
attention = "asentmax"
positions = "alibi"
nope_share = 0.5
