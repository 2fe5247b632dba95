# For a laptop: lookup, trained with Muon: whether a result depends on the optimizer.
from configs.scales.recall.tiny import *

optimizer = "muon"
