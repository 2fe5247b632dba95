"""The keys and values of earlier positions, for generation."""

from dataclasses import replace

import torch
from torch import Tensor

from attention_paths.module import Attention
from attention_paths.reference import Context


class KVCache:
    """Keys (after RoPE) and values, or their factors, of up to `size` positions of every layer.

    A layer with a window keeps the last ones only, the newest at the end.
    """

    def __init__(self, size: int):
        self.size, self.length = size, 0
        # by layer and part of its heads: keys, values and forget gates, or factors and gates
        self.layers: dict[tuple[int, int], list[Tensor]] = {}

    def append(
        self, key: tuple[int, int], new: list[Tensor], context: Context, attention: Attention
    ) -> tuple[list[Tensor], Context]:
        """Append keys and values [B, .., new, ..], and the context's forget gates.

        Returns what the new positions see, [B, .., length + new, ..] or, with a window, at most
        window + new positions, and the context with the gates of these. `key` is the layer and
        the part of its heads that `attention` computes.
        """
        gates = [] if context.log_forget is None else [context.log_forget]
        new, window = new + gates, attention.window
        if key not in self.layers:
            room = self.size if window is None else min(self.size, window)
            self.layers[key] = [x.new_zeros(*x.shape[:2], room, *x.shape[3:]) for x in new]
        extend = self._append if window is None else self._shift
        seen = [extend(stored, x) for stored, x in zip(self.layers[key], new, strict=True)]
        return seen, replace(context, log_forget=seen.pop()) if gates else context

    def _append(self, stored: Tensor, x: Tensor) -> Tensor:
        end = self.length + x.shape[2]
        stored[:, :, self.length : end] = x
        return stored[:, :, :end]

    def _shift(self, stored: Tensor, x: Tensor) -> Tensor:
        room = stored.shape[2]
        x = torch.cat((stored, x), dim=2)
        stored.copy_(x[:, :, -room:])
        return x[:, :, max(0, room - self.length) :]
