# small.py for one core of a CPU with bfloat16 units (AVX512-BF16 or AMX): a quarter of its tokens,
# in micro-batches that fit the caches. Two hours a run on a core of an AMD EPYC with AVX512-BF16.
from configs.scales.small import *

dtype = "bfloat16"
batch_size = 8
max_iters = 440
eval_interval = 440
val_tokens = 262144
checkpoint_interval = 110
log_interval = 10
