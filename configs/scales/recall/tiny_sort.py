# For a laptop: sorting (data/recall.py).
from configs.scales.recall.tiny import *

recall = "sort"
