# Ours: LSSAR taken apart, SSMax's scale instead of its own: softplus(log n s / sqrt d), l1
attention = "softplus_logn"
