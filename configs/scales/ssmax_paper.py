# The SSMax paper's own architecture and recipe (its Appendices A and B): 162M parameters,
# 2048 x 1024 tokens a step, 200,000 steps at a constant rate after 1,000 of warm-up: 419B tokens,
# of SlimPajama there, of FineWeb here: python -m data.fineweb --name sample-350BT
norm = "rmsnorm"
mlp = "swiglu"
mlp_hidden = 2048
bias = False
tie_embeddings = False
data_dir = "data/fineweb350B"
total_batch_size = 2097152
max_iters = 200000
schedule = "constant"
warmup_iters = 1000
