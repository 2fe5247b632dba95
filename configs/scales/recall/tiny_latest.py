# For a laptop: recall of the latest of three values of a key (data/recall.py).
from configs.scales.recall.tiny import *

recall = "latest"
