# The Forgetting Transformer (Lin et al. 2025, arXiv 2503.02130): softmax, without positions, of
# scores that get log f_(j+1) + .. + log f_i, with f = sigmoid(w x + b) of each head; known for a
# loss that does not rise beyond the training length. Here in the same blocks as the other
# configs, not in the paper's "Pro" block.
attention = "softmax"
positions = "none"
forget = True
