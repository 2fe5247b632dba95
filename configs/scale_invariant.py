# softmax(a_t z + m_t), t the distance of a key in tokens, a_t^2 = 2 log(t / 10 + 1) + 1 and
# m_t = 1 - a_t^2 (Anson, Wang and Aitchison 2025, arXiv 2505.17083): on average all scales of
# distance, 10 to 100 and 100 to 1,000 tokens, get the same weight. With p-RoPE and QK norm, as
# here, the loss at 4K of models trained on 4K is 3.244, at 64K 3.247 (softmax with RoPE: 3.261 and
# 5.260). In our models the loss is flat only where the longest wavelength is below the training
# length T (docs/results.md, Scale-invariant attention). With rope_share = 0.5 the longest
# wavelength is 471 tokens in heads of 64, and 353 in heads of 32.
attention = "scale_invariant"
rope_share = 0.5
qk_norm = True
