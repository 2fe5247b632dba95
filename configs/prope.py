# p-RoPE with p = 1/2 (Barbero et al. 2024, arXiv 2410.06205): RoPE rotates the faster half of the
# pairs of a head. The slower half, most of whose pairs do not complete a turn within the training
# length, compares content alone at any distance.
attention = "softmax"
rope_share = 0.5
