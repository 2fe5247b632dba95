# GPT-2-355M, GPT-2 medium (LSSAR, Appendix B.4): 60,000 steps of llm.c's recipe run_gpt2_350M.sh.
# That is 31.5B tokens, three epochs of a 10B sample, so take the larger one:
# python -m data.fineweb --dataset fineweb-edu --name sample-100BT
n_layer = 24
n_head = 16
n_embd = 1024
max_iters = 60000
learning_rate = 3e-4
data_dir = "data/fineweb_edu100B"
