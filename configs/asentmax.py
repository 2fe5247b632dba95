# ASEntmax (Vasylenko et al. 2025, arXiv 2506.16640): 1.5-entmax of (1 + beta log(n + 1)^gamma) z
# with beta = softplus(w x) and gamma = 2 tanh(v x) of each row and head; half of the heads have
# ALiBi and the others no positions (its NAPE; in the authors' code only the latter are scaled, here
# all are). It claims to hold at up to 1,000 times the training length on synthetic tasks.
attention = "asentmax"
positions = "alibi"
nope_share = 0.5
