# For a laptop: text with repeats, trained with Muon.
from configs.scales.tiny_copies import *

optimizer = "muon"
learning_rate = 8e-3  # the best of 2e-3 to 1.6e-2 for softmax and hybrid (docs/results.md)
