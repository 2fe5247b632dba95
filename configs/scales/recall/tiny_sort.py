# For a laptop: sorting (tasks/recall.py).
from configs.scales.recall.tiny import *

recall = "sort"
