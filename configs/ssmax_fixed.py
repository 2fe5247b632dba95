# SSMax (c): softmax of log(n) z, no scaling parameter (curves: Figs. 4 to 8)
attention = "ssmax_fixed"
