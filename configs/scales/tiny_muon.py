# For a laptop: tiny.py, trained with Muon, to test whether results depend on the optimizer.
from configs.scales.tiny import *

optimizer = "muon"
learning_rate = 8e-3  # best for softmax of 2e-3 to 1.6e-2: results/tiny_muon/league/notes.md
