# relu(z / 2 - tau)^2, with the tau for which a row sums to 1 (Peters et al. 2019; Correia et al.
# 2019 in Transformers).
attention = "entmax15"
