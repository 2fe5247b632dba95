# For a laptop: short documents and recall in turn, 1,600 steps of each, with Muon; 0.9M parameters.
# results/tiny_documents/documents/notes.md makes the shards.
from configs.scales.tiny_documents import *

task = "language+recall"
tie_embeddings = False
learning_rate = 2e-3  # at 8e-3 softmax has not learned recall after as many steps
max_iters = 3200
eval_interval = 800
checkpoint_interval = 800
log_interval = 200
