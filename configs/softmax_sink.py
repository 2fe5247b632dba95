# e^z_ij / (e^s + sum_k e^z_ik) with a learned s of each head: the sinks of gpt-oss (OpenAI 2025).
# s is 0 at first; transformers draws gpt-oss's from normal(0, 0.02), OpenAI's code only loads it.
attention = "softmax"
sink = "learned"
