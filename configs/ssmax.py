# SSMax (b), Eq. 2: softmax of s log(n) z, s learnable per layer and head (curves: Figs. 4 to 8)
attention = "ssmax"
