# small_cpu.py with the blocks of tiny.py, to test whether size matters: 1.8M parameters, of which
# the blocks have 0.8M.
from configs.scales.small_cpu import *

n_layer = 4
head_size = 32
n_embd = 128
