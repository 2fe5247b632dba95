# Half of the heads of each layer see all keys, without positions, the other half the last 256 under
# RoPE. Current models mix them by layers (Gemma 3 and Llama 4, 2025).
attention = "softmax"
nope_share = 0.5
local_window = 256
