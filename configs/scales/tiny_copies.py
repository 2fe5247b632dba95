# For a laptop: text with repeats, from which a model learns to copy; 4.9M tokens, six to ten
# minutes a run on one core. The shards: python -m data.text --repeat 1 --within 128
from configs.scales.tiny import *

data_dir = "data/text_bytes_repeat"
tie_embeddings = False
max_iters = 2400
eval_interval = 400
checkpoint_interval = 400
log_interval = 200
