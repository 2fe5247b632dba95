# GPT-2-109M on simulated orbits (LSSAR, Sect. 3.4, which takes all but the attention from Vafa et
# al. 2025): 600,000 steps of 512 sequences of 1,000 entries, 307B positions of 10M systems
task = "orbits"
block_size = 999
positions = "learned"
tie_embeddings = False
total_batch_size = 511488  # 512 x 999
batch_size = 64
max_iters = 600000
schedule = "constant"
warmup_iters = 0
dtype = "float32"
val_tokens = 299700  # 300 x 999
eval_interval = 2000
checkpoint_interval = 2000
