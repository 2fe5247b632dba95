# e^z_ij / (e^s + sum_k e^z_ik) with a learned s of each head, 0 at first: the sinks of gpt-oss
# (OpenAI 2025), which draws its first s from normal(0, 0.02).
attention = "softmax"
sink = "learned"
