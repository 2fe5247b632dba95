# As hybrid.py, with SSMax in the heads without positions, here a quarter of the heads, and a window
# of T / 2 in the local heads.
# Results on text and recall in turn: docs/results.md, "Copies, and text with recall".
attention = "ssmax"
nope_share = 0.25
local_window = 0.5  # of block_size
