"""Embedding and head where a position holds a pair of tokens, the coordinates of a point."""

import torch
import torch.nn as nn
from torch import Tensor


class PairEmbedding(nn.Embedding):
    """Pairs of tokens [.., 2] to [.., n_embd]: a table for each coordinate, and a linear layer."""

    def __init__(self, size: int, n_embd: int) -> None:
        super().__init__(2 * size, n_embd)  # the two tables, one below the other
        self.size = size
        self.linear = nn.Linear(2 * n_embd, n_embd)

    def forward(self, pairs: Tensor) -> Tensor:
        x, y = pairs.unbind(-1)
        return self.linear(super().forward(torch.stack((x, y + self.size), -1)).flatten(-2))


class PairHead(nn.Linear):
    """Hidden states [.., n_embd] to the logits of both coordinates, [.., 2, size]."""

    def __init__(self, n_embd: int, size: int) -> None:
        super().__init__(n_embd, 2 * size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(-1, (2, -1))
