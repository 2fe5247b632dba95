# p-RoPE with p = 1/2 (Barbero et al. 2024, arXiv 2410.06205): RoPE turns the faster half of the
# pairs of a head. The slower half, which turns too little within the training length to tell
# positions, compares content alone at any distance.
attention = "softmax"
rope_share = 0.5
