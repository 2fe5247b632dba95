# small_cpu.py with the blocks of tiny.py, 0.8M parameters, to test whether size matters.
from configs.scales.small_cpu import *

n_layer = 4
head_size = 32
n_embd = 128
