# As hybrid.py, which names the precedents, with SSMax in the heads without positions. Llama 4 has a
# logarithmic temperature there that cites SSMax, SWAN-GPT the scale log_a(a + n) at inference, and
# jgcb00's fork of nanoGPT (March 2025) SSMax in its layers without positions. The scale log n is
# older (Su 2021; Chiang and Cholak 2022, arXiv 2202.12172). Ours: heads of both kinds in each
# layer, with a learnable s for each head, initialised to 1 as in OLMo-core's PR 808.
# Trained with Muon on text and recall in turn at T = 128, with a window of 32 and a learning rate
# of 2e-3 (results/tiny_and_text_muon), it has on text a loss of 1.219 at T and 1.160 at 16T, and
# recall of 100% at 16T; softmax with Dynamic NTK has 1.280, 2.585 and 56%. With each at its best
# rate (text_and_recall/notes.md there) these are 1.206, 1.142 and 100%, and 1.252, 2.380 and 74%.
attention = "ssmax"
nope_share = 0.5
local_window = 256
