# Softmax with the scale log_T n / sqrt d, T the training length (Su 2021, "Entropy invariance of
# attention": kexue.fm/archives/8823). Qwen's first models and Su's code for RoPE multiply by
# max(1, log_T n), at evaluation, after training without it.
attention = "softmax_logn"
