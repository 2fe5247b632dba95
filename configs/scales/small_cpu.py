# small.py for one core of a CPU with bfloat16 units (AVX512-BF16 or AMX): a quarter of its tokens,
# in micro-batches that fit the caches (2,400 tokens a second, with 64 windows 1,700).
from configs.scales.small import *

dtype = "bfloat16"
batch_size = 8
max_iters = 440
eval_interval = 440
val_tokens = 262144
checkpoint_interval = 110
log_interval = 10
