# For a laptop: multi-query associative recall (data/recall.py), with Muon: none of six models
# learned it with AdamW in 6,000 steps (results/tiny_mqar/recall/notes.md).
from configs.scales.recall.tiny import *

recall = "mqar"
optimizer = "muon"
