# For a laptop: text with repeats, trained with Muon.
from configs.scales.tiny_copies import *

optimizer = "muon"
# The best of 2e-3 to 1.6e-2 for softmax and hybrid: results/tiny_copies_muon/copying/notes.md
learning_rate = 8e-3
