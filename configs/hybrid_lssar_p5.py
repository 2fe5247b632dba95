# As hybrid.py, which names the precedents, with LSSAR, p = 5, in the heads without positions.
attention = "lssar"
p = 5
nope_share = 0.5
local_window = 0.25  # of block_size
