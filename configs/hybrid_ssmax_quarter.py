# As hybrid.py, with SSMax in a quarter of the heads, without positions. The others see 512 keys.
attention = "ssmax"
nope_share = 0.25
local_window = 512
