# Ours: LSSAR taken apart, its threshold without the power: weights above their row's mean, then l1
attention = "lssa_threshold"
