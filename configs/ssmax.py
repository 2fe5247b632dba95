# SSMax (b), Eq. 2: softmax of s_h log n s / sqrt d, s = q . k, s_h learned per layer and head
# (curves: Figs. 4 to 8)
attention = "ssmax"
