# Ours: LSSAR taken apart, with SSMax's scale: softplus(log n s / sqrt d), l1, s = q . k
attention = "softplus_logn"
