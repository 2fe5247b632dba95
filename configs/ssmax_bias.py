# SSMax (d): softmax of (s log n + b) z, s and b learnable per layer and head (curves: Figs. 4 to 8)
attention = "ssmax_bias"
