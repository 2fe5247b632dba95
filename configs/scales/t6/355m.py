# T6 medium (Zhang et al. 2025): after configs/t6.py and configs/scales/355m.py.
n_head = 47
head_size = 64
mlp_hidden = 2730
