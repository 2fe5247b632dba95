# As hybrid.py, with SSMax in the heads without positions.
attention = "ssmax"
nope_share = 0.5
local_window = 256
