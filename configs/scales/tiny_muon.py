# For a laptop: tiny.py, trained with Muon: whether a result depends on the optimizer.
from configs.scales.tiny import *

optimizer = "muon"
