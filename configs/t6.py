# Ours: T6 small (Zhang et al. 2025), softmax in Tensor Product Attention, which the earlier version
# of the LSSAR paper recommends. At another scale, add the scale's file of scales/t6/ after this
# file: docs/t6.md.
n_head = 34
head_size = 64
projections = "tpa"
norm = "rmsnorm"
mlp = "swiglu"
mlp_hidden = 2048  # floor(8/3 n_embd)
bias = False
