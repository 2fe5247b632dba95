# SSMax Eq. 3: softmax of (s p_n + b) (q . k) / sqrt d, s and b learned per layer and head, p_n
# learned and shared by all layers and heads (Fig. 2)
attention = "ssmax_probe"
