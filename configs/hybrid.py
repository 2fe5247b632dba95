# Half of the heads of each layer see all keys, without positions; the other half see the last T / 4
# keys, under RoPE. Precedents mix the two kinds by layers: RNoPE-SWA (Cohere, Yang et al. 2025,
# arXiv 2501.18795), Llama 4 (2025, every fourth layer without positions), SWAN-GPT (Puvvada et al.
# 2025, arXiv 2504.08719). NAPE has heads without positions and heads with ALiBi in each layer
# (Vasylenko et al. 2025, arXiv 2506.16640). Gemma 3 has windowed and full layers too, but RoPE in
# both. Ours: both kinds in each layer, with RoPE and a window in the local heads.
attention = "softmax"
nope_share = 0.5
local_window = 0.25  # of block_size
