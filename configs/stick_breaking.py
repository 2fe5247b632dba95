# sigmoid(z_ij) times the product of 1 - sigmoid(z_ik) over j < k < i, without positions; a row does
# not see itself (Tan et al. 2024, arXiv 2410.17980): trained on 2^11 tokens, its loss keeps falling
# up to 2^14 tokens. Weight left over in a row is dropped; in the authors' language models it goes
# to a learned vector of each head, and each head's output is normalised.
attention = "stick_breaking"
positions = "none"
