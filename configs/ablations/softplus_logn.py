# Ours: LSSAR taken apart, SSMax's scale in place of its own: softplus(log n s / sqrt d), l1
attention = "softplus_logn"
