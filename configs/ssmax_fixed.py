# SSMax (c): softmax of log(n) z, no scaling parameter (curves in Figs. 4 to 8, no table)
attention = "ssmax_fixed"
