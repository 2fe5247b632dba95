# Nine million parameters in the blocks, and 60M tokens, twice as many as the novels have.
# results/small/notes.md makes the shards.
n_layer = 8
n_head = 4
head_size = 64
n_embd = 320
block_size = 512
data_dir = "data/books"
tokenizer = "results/small/tokenizer.json"  # a BPE of 8,192 tokens
total_batch_size = 32768  # 64 x 512
batch_size = 64
max_iters = 1840
optimizer = "muon"
learning_rate = 8e-3  # best for softmax of 2e-3, 4e-3 and 8e-3 after 400 steps
warmup_iters = 100
eval_interval = 460
val_tokens = 1048576
checkpoint_interval = 920
log_interval = 50
