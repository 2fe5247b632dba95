# As hybrid.py, which names the precedents, with SSMax in the heads without positions. Three
# precedents scale the scores of their layers without positions: Llama 4 by a logarithmic
# temperature, for which Meta cites SSMax, SWAN-GPT by log_a(a + n), at inference, and jgcb00's fork
# of nanoGPT (March 2025) by SSMax. The scale log n is older (Su 2021; Chiang and Cholak 2022, arXiv
# 2202.12172). Ours: heads of both kinds in each layer, with a learnable s for each head without
# positions, initialised to 1 as in OLMo-core's PR 808.
# Results on text and recall in turn: docs/results.md, "Copies, and text with recall".
attention = "ssmax"
nope_share = 0.5
local_window = 0.25  # of block_size
