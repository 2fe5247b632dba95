# For a laptop: bytes of text and recall in turn, trained with Muon.
from configs.scales.recall.tiny_and_text import *

optimizer = "muon"
