# As hybrid.py, with SSMax in the heads without positions.
# Trained with Muon on text and recall in turn at T = 128, with a window of 32 and a learning rate
# of 4e-3 (docs/results.md), it has on text a loss of 1.206 at T and 1.142 at 16T, and recall of
# 100% at 16T; softmax with Dynamic NTK, at 8e-3, has 1.252, 2.380 and 74%.
attention = "ssmax"
nope_share = 0.5
local_window = 256
