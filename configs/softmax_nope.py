# Softmax without positions: the causal mask alone (Haviv et al. 2022; Kazemnejad et al. 2023 find
# that on small tasks it generalises to longer inputs better than RoPE and ALiBi).
attention = "softmax"
positions = "none"
