# Softmax with ALiBi instead of RoPE: scores get -2^(-8 h / H) (i - j) (Press et al. 2021). The
# paper: trained on 1,024 tokens and evaluated on 2,048, it reaches the perplexity of sinusoidal
# embeddings trained on 2,048. Where H is not a power of two, such as 12, the authors' code takes
# other slopes than the paper; here the slopes are the paper's.
attention = "softmax"
positions = "alibi"
