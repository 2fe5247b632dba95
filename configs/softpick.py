# relu(e^z - 1) / sum |e^z - 1| (Zuhri et al. 2025, arXiv 2504.20966): known for no attention sinks
# and 47% of weights at 0, with softmax's results at 340M parameters. The authors' code divides by
# e^max and adds 1e-8 to the sum; here nothing is added, and a sum of 0 gives weights of 0.
attention = "softpick"
