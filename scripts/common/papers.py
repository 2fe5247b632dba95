"""The papers' numbers: papers.json, read once.

LSSAR is "Softplus Attention with Re-weighting Boosts Length Extrapolation in Large Language Models"
(Gao et al. 2026), SSMAX is "Scalable-Softmax Is Superior for Attention" (Nakanishi 2025).
"""

import json
from pathlib import Path

PAPERS = json.loads((Path(__file__).parent / "papers.json").read_text())
LSSAR, SSMAX = PAPERS["lssar"], PAPERS["ssmax"]
TRAINED_LENGTH = LSSAR["training"]["trained_length"]  # tokens, in both papers
TOKENIZER = "gpt2"  # of both papers
