# For a laptop: bytes of text and recall in turn, 1,600 steps of each; 0.9M parameters.
# The shards: python -m data.text --tokenizer bytes
from configs.scales.tiny import *

task = "language+recall"
tie_embeddings = False
max_iters = 3200
eval_interval = 800
checkpoint_interval = 800
log_interval = 200
