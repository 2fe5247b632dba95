# The model of tiny.py with 8 times as many bytes and twice the context: half an hour or more a run.
# The shards, from 14 MB of text or more:
# python -m data.text FILES --tokenizer bytes --out_dir data/long_bytes
n_layer = 4
n_head = 4
n_embd = 128
block_size = 256
tokenizer = "bytes"
data_dir = "data/long_bytes"
total_batch_size = 8192  # 32 x 256
batch_size = 32
max_iters = 1600
learning_rate = 2e-3
warmup_iters = 100
eval_interval = 200
val_tokens = 262144
checkpoint_interval = 200
log_interval = 20
