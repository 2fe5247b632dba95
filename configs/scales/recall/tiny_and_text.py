# For a laptop: bytes of text and recall in turn, 1,600 steps of each; 0.9M parameters.
# The shards: python -m data.text --tokenizer bytes
task = "language+recall"
n_layer = 4
n_head = 4
n_embd = 128
block_size = 128
tokenizer = "bytes"
data_dir = "data/text_bytes"
tie_embeddings = False
total_batch_size = 2048  # 16 x 128
batch_size = 16
max_iters = 3200
learning_rate = 2e-3
warmup_iters = 100
eval_interval = 800
val_tokens = 65536  # of text
checkpoint_interval = 800
log_interval = 200
