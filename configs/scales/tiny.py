# For a laptop: bytes, 0.8M parameters, 1.6M tokens, two or three minutes a run on two cores.
# The shards: python -m data.text --tokenizer bytes
n_layer = 4
n_head = 4
n_embd = 128
block_size = 128
tokenizer = "bytes"
data_dir = "data/text_bytes"
total_batch_size = 2048  # 16 x 128
batch_size = 16
max_iters = 800
learning_rate = 2e-3
warmup_iters = 100
eval_interval = 200
val_tokens = 65536
checkpoint_interval = 200
log_interval = 20
