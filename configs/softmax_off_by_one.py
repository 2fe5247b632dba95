# e^z_ij / (1 + sum_k e^z_ik): a head may attend to nothing (Miller 2023, "Attention is off by
# one").
attention = "softmax"
sink = "one"
