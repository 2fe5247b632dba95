# SSMax (b), Eq. 2: softmax of s log n (q . k) / sqrt d, s learned per layer and head
# (curves: Figs. 4 to 8)
attention = "ssmax"
