# A sigmoid gate, linear in the layer's input, on each element of attention's output (Qiu et al.
# 2025, arXiv 2505.06708): known for a lower loss, no attention sinks and a longer context.
attention = "softmax"
gate = "element"
