# For a laptop: scales/tiny.py on text with repeats, from which a model learns to copy; 4.9M tokens,
# six to ten minutes a run on one core. The shards: python -m data.text --repeat 1 --within 128
n_layer = 4
n_head = 4
n_embd = 128
block_size = 128
tokenizer = "bytes"
data_dir = "data/text_bytes_repeat"
tie_embeddings = False
total_batch_size = 2048  # 16 x 128
batch_size = 16
max_iters = 2400
learning_rate = 2e-3
warmup_iters = 100
eval_interval = 400
val_tokens = 65536
checkpoint_interval = 400
log_interval = 200
