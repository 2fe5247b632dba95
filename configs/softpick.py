# relu(e^z - 1) / sum |e^z - 1| (Zuhri et al. 2025, arXiv 2504.20966): known for no attention sinks
# and 47% of weights at 0, with softmax's results at 340M parameters. Without the 1e-8 that the
# authors' code adds to the sum, after dividing by e^max: a row of zeros has weights of 0.
attention = "softpick"
