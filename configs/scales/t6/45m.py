# T6 of as many parameters as GPT-2's 45M: after configs/t6.py and configs/scales/45m.py.
n_head = 19
head_size = 64
mlp_hidden = 1365
