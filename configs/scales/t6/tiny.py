# T6 of as many parameters as GPT-2's: after configs/t6.py and configs/scales/tiny.py.
n_head = 5
head_size = 32
mlp_hidden = 341
