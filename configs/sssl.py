# Three layers with a sliding window, then one that sees all keys; the last layer sees all keys too
# (nanochat, Karpathy 2025: window_pattern "SSSL", S a quarter of the training length).
attention = "softmax"
window = 0.25  # of block_size
window_pattern = "SSSL"
