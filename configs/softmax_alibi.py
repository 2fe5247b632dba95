# Softmax with ALiBi in place of RoPE: scores get -2^(-8 h / H) (i - j) (Press et al. 2021). Its
# paper: trained on 1,024 tokens it has at 2,048 the perplexity of sinusoids trained on 2,048.
attention = "softmax"
positions = "alibi"
