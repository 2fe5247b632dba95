# As hybrid.py, with SSMax in a quarter of the heads, those without positions. The others see T / 2.
# Results on text and recall in turn: docs/results.md, "Copies, and text with recall".
attention = "ssmax"
nope_share = 0.25
local_window = 0.5  # of block_size
