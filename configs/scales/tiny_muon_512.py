# For a laptop: tiny_muon.py with four times the training length and four times the tokens.
from configs.scales.tiny_muon import *

block_size = 512
batch_size = 4  # 4 x 512 tokens: total_batch_size stays 2048
max_iters = 3200
eval_interval = 800
checkpoint_interval = 800
