# For a laptop: two-body systems in coarse bins, 0.7M parameters, 2.5M positions, two or three
# minutes a run on one core
task = "orbits"
systems = 20000
planets = 1
bins = 500
n_layer = 2
n_head = 4
n_embd = 128
block_size = 127
positions = "learned"
tie_embeddings = False
total_batch_size = 2032  # 16 x 127
batch_size = 16
max_iters = 1250
learning_rate = 2e-3
warmup_iters = 100
eval_interval = 250
val_tokens = 38100  # 300 x 127
checkpoint_interval = 250
log_interval = 25
