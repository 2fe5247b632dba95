# Sliding-window attention: each row sees its last keys (Mistral 7B 2023, Sect. 2: 4,096 of 8,192).
attention = "softmax"
window = 0.25  # of block_size
