# Ours: LSSAR taken apart, exp instead of softplus: softmax of log d log n cos(q, k)
attention = "softmax_cosine"
