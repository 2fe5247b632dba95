# The model of tiny.py with 8 times as many bytes and twice the context: half an hour or more a run.
# The shards, from 14 MB of text or more:
# python -m data.text FILES --tokenizer bytes --out_dir data/long_bytes
from configs.scales.tiny import *

block_size = 256
data_dir = "data/long_bytes"
total_batch_size = 8192  # 32 x 256
batch_size = 32
max_iters = 1600
val_tokens = 262144
