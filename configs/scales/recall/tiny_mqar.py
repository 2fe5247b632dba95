# For a laptop: scales/recall/tiny.py, with multi-query associative recall (tasks/recall.py), and
# with Muon: of six models none learned it with AdamW in 6,000 steps (docs/results.md).
task = "recall"
recall = "mqar"
n_layer = 2
n_head = 4
n_embd = 64
block_size = 64
tie_embeddings = False
total_batch_size = 2048  # 32 x 64
batch_size = 32
max_iters = 6000
optimizer = "muon"
learning_rate = 2e-3
min_lr = 2e-4
warmup_iters = 100
val_tokens = 16384  # 256 x 64
eval_interval = 1000
checkpoint_interval = 1000
log_interval = 500
