# GPT-2-45M (LSSAR, Appendix B.4): 6 layers in Pythia-70M's shape, 9,000 steps, on FineWeb-Edu:
# python -m data.fineweb --dataset fineweb-edu. The learning rate is ours: the paper gives none.
n_layer = 6
n_head = 8
n_embd = 512
max_iters = 9000
learning_rate = 1e-3
data_dir = "data/fineweb_edu10B"
