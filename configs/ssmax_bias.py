# SSMax (d): softmax of (s log n + b) (q . k) / sqrt d, s and b learned per layer and head
# (curves: Figs. 4 to 8)
attention = "ssmax_bias"
