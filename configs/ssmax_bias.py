# SSMax (d): softmax of (s log n + b) z, s and b learnable per layer and head (curves in Figs. 4 to 8, no table)
attention = "ssmax_bias"
