"""The keys and values of earlier positions, for generation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attention_paths.module import Attention
from errors import UserError


class KVCache:
    """Keys (after RoPE) and values, or their factors, of up to `size` positions of every layer.

    For attention with a window, the cache keeps only the last `window` positions, the newest last.
    """

    def __init__(self, size: int):
        self.size = size
        self.length = 0
        # [B, 1]: cached tokens of each sequence's last document; None: a sequence is one document
        self.document_length: Tensor | None = None
        # keys, values and log forget gates, or factors and log forget gates
        self.stored: dict[Attention, list[Tensor]] = {}

    def check_capacity(self, length: int) -> None:
        """Raise UserError if this many positions exceed the cache."""
        if length > self.size:
            raise UserError(f"a cache of {self.size} positions is too small for {length}")

    def append(self, attention: Attention, new: Sequence[Tensor | None]) -> list:
        """Append tensors [B, H, L, ..] of L new positions to what is stored for this attention.

        Returns the tensors of all positions that the new ones see, [B, H, length + L, ..] or, with
        a window, at most window + L positions. None stays None.
        """
        window = attention.window
        if attention not in self.stored:
            room = self.size if window is None else min(self.size, window)
            self.stored[attention] = []
            for x in new:
                if x is not None:
                    B, H, _, *rest = x.shape
                    self.stored[attention].append(x.new_zeros(B, H, room, *rest))
        store = self._fill if window is None else self._shift
        tensors = iter(self.stored[attention])
        visible = []
        for x in new:
            if x is not None:
                x = store(next(tensors), x)
            visible.append(x)
        return visible

    def _fill(self, stored: Tensor, x: Tensor) -> Tensor:
        end = self.length + x.shape[2]
        stored[:, :, self.length : end] = x
        return stored[:, :, :end]

    def _shift(self, stored: Tensor, x: Tensor) -> Tensor:
        room = stored.shape[2]
        x = torch.cat((stored, x), dim=2)
        stored.copy_(x[:, :, -room:])
        # positions are at the end of `stored`, whose first places are empty until it is full
        return x[:, :, max(0, room - self.length) :]
