# SSMax Eq. 3: softmax of (s p_n + b) z, p_n learnable and shared by all layers and heads (Fig. 2)
attention = "ssmax_probe"
