# For a laptop: text with repeats, trained with Muon.
from configs.scales.tiny_copies import *

optimizer = "muon"
