# SSMax (Nakanishi 2025) with QK norm: q and k pass RMSNorm before RoPE, as in Qwen3 (2025).
# results/tiny_muon/norm_and_pairs has SSMax with it and without.
attention = "ssmax"
qk_norm = True
