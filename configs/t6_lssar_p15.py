# Ours: T6 small with LSSAR, p = 15, as the earlier version of the LSSAR paper recommends (without
# numbers). At another scale the file in scales/t6/ goes behind its own.
attention = "lssar"
p = 15
n_head = 34
head_size = 64
projections = "tpa"
norm = "rmsnorm"
mlp = "swiglu"
mlp_hidden = 2048  # floor(8/3 n_embd)
bias = False
