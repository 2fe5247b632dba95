# Ours: LSSAR taken apart, with SSMax's scale without s: softplus(log n (q . k) / sqrt d), l1
attention = "softplus_logn"
