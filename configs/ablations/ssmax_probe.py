# SSMax Eq. 3: softmax of (s_h p_n + b_h) s / sqrt d, s = q . k, p_n learned and shared by all
# layers and heads (Fig. 2)
attention = "ssmax_probe"
