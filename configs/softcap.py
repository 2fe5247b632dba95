# Scores 50 tanh(z / 50): the soft-capping of Gemma 2 (2024, Sect. 2).
attention = "softmax"
softcap = 50
