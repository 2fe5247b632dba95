"""The keys and values of earlier positions, for generation."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_paths.module import Attention


class KVCache:
    """Keys (after RoPE) and values, or their factors, of up to `size` positions of every layer.

    Attention with a window needs the last positions only: the cache holds these, the newest last.
    """

    def __init__(self, size: int):
        self.size = size
        self.length = 0
        # [1 or B, 1]: tokens of the last document, with document_mask
        self.document_length = torch.zeros(1, 1, dtype=torch.int32)
        # keys, values and forget gates, or factors and gates
        self.layers: dict[Attention, list[Tensor]] = {}

    def append(self, attention: Attention, new: Sequence[Tensor | None]) -> list:
        """Append tensors [B, .., new, ..] of new positions to what is stored for this attention.

        Returns the tensors of all positions that the new ones see, [B, .., length + new, ..] or,
        with a window, at most window + new positions. None stays None.
        """
        window = attention.window
        if attention not in self.layers:
            room = self.size if window is None else min(self.size, window)
            self.layers[attention] = [
                x.new_zeros(*x.shape[:2], room, *x.shape[3:]) for x in new if x is not None
            ]
        stored = iter(self.layers[attention])
        visible: list[Tensor | None] = []
        for x in new:
            if x is None:
                visible.append(None)
            elif window is None:
                visible.append(self._append(next(stored), x))
            else:
                visible.append(self._shift(next(stored), x))
        return visible

    def _append(self, stored: Tensor, x: Tensor) -> Tensor:
        end = self.length + x.shape[2]
        stored[:, :, self.length : end] = x
        return stored[:, :, :end]

    def _shift(self, stored: Tensor, x: Tensor) -> Tensor:
        room = stored.shape[2]
        x = torch.cat((stored, x), dim=2)
        stored.copy_(x[:, :, -room:])
        return x[:, :, max(0, room - self.length) :]


@dataclass
class RaggedCache:
    """A cache for each sequence of a batch, whose lengths may differ."""

    rows: list[KVCache]

    @property
    def document_length(self) -> Tensor:
        """The tokens of the last document of each sequence, [B, 1]."""
        return torch.cat([row.document_length for row in self.rows])

    @document_length.setter
    def document_length(self, lengths: Tensor) -> None:
        for row, length in zip(self.rows, lengths.split(1), strict=True):
            row.document_length = length
