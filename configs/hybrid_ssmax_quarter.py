# As hybrid.py, with SSMax in a quarter of the heads, those without positions. The others see T / 2.
# Trained on text and recall in turn at T = 128, with a window of 64 (results/tiny_and_text), it has
# on text a loss of 1.449 at T and 1.431 at 16T, and recall of 99% at 16T; softmax with Dynamic NTK
# has 1.429, 2.823 and 33%, which is chance. With Muon, at the same learning rate of 2e-3
# (results/tiny_and_text_muon), it has 1.258, 1.221 and 100%, and softmax 1.280, 2.585 and 56%.
attention = "ssmax"
nope_share = 0.25
local_window = 512
