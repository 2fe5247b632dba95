# Softmax with the scale log_L n / sqrt d, L the training length (Su 2021, "Entropy invariance of
# attention": kexue.fm/archives/8823). Qwen's first models had it from n = L on, in evaluation.
attention = "softmax_logn"
