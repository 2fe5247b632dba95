# For a laptop: multi-query associative recall (data/recall.py), with Muon: of six models none
# learned it with AdamW in 6,000 steps (docs/results.md).
from configs.scales.recall.tiny import *

recall = "mqar"
optimizer = "muon"
