"""A model whose positions hold a pair of tokens, the coordinates of a point."""

import torch
import torch.nn as nn
from torch import Tensor

from model import GPT


class PairEmbedding(nn.Embedding):
    """Embed pairs of tokens [.., 2] in [.., n_embd]: a table per coordinate, and a linear layer."""

    def __init__(self, size: int, n_embd: int) -> None:
        super().__init__(2 * size, n_embd)  # both tables, the second below the first
        self.size = size
        self.linear = nn.Linear(2 * n_embd, n_embd)

    def forward(self, pairs: Tensor) -> Tensor:
        x, y = pairs.unbind(-1)
        vectors = super().forward(torch.stack((x, y + self.size), -1))  # [.., 2, n_embd]
        return self.linear(vectors.flatten(-2))


class PairHead(nn.Linear):
    """Return the logits of both coordinates, [.., 2, size], of hidden states [.., n_embd]."""

    def __init__(self, n_embd: int, size: int) -> None:
        super().__init__(n_embd, 2 * size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(-1, (2, -1))


class PairGPT(GPT):
    """GPT whose positions hold a pair of tokens: idx and targets are [B, L, 2], each with a loss.

    Logits are [B, L, 2, n_vocab].
    """

    def build_embedding(self, size: int) -> PairEmbedding:
        return PairEmbedding(size, self.config.n_embd)

    def build_head(self, size: int) -> PairHead:
        return PairHead(self.config.n_embd, size)

    def padding_rows(self, weight: Tensor) -> Tensor:
        return weight.unflatten(0, (2, -1))[:, self.n_vocab :]
