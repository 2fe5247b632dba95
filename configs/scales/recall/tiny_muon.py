# For a laptop: lookup, trained with Muon, to test whether results depend on the optimizer.
from configs.scales.recall.tiny import *

optimizer = "muon"
