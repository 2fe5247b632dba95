# RMSNorm, with gains that the heads of a layer share, of q and k before RoPE: Qwen3 (2025), whose
# eps is 1e-6 where ours is 1e-5. Such norms are known for stable training at high learning rates
# (Dehghani et al. 2023).
attention = "softmax"
qk_norm = True
