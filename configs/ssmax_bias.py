# SSMax (d): softmax of (s_h log n + b_h) s / sqrt d, s = q . k, s_h and b_h learned per layer
# and head (curves: Figs. 4 to 8)
attention = "ssmax_bias"
