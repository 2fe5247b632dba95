# relu(e^z - 1) / sum |e^z - 1| (Zuhri et al. 2025, arXiv 2504.20966): known for no attention sinks
# and 47% of weights at 0, with softmax's results at 340M parameters.
attention = "softpick"
