"""The keys and values of earlier positions, for generation."""

from dataclasses import replace

import torch
from torch import Tensor

from attention_paths.module import Attention
from attention_paths.reference import Context


class KVCache:
    """Keys (after RoPE) and values, or their factors, of up to `size` positions of every layer.

    A layer with a window keeps a ring of them: position i is at i modulo the window.
    """

    def __init__(self, size: int):
        self.size, self.length = size, 0
        # by layer and part of its heads: keys, values and forget gates, or factors and gates
        self.layers: dict[tuple[int, int], list[Tensor]] = {}

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for layer in self.layers.values() for stored in layer)

    def append(
        self, key: tuple[int, int], new: list[Tensor], context: Context, attention: Attention
    ) -> tuple[list[Tensor], Context]:
        """Append keys and values [B, .., new, ..], and the context's forget gates.

        Returns what the new positions see, [B, .., length + new, ..] or, with a window, at most
        window - 1 + new positions, and the context with the gates of these. `key` is the layer and
        the part of its heads that `attention` computes. Keys are in order; only where a single
        position attends to a full window whose order does not matter is it the ring's order.
        """
        gates = [] if context.log_forget is None else [context.log_forget]
        new, window = new + gates, attention.window
        if key not in self.layers:
            room = self.size if window is None else min(self.size, window)
            self.layers[key] = [x.new_zeros(*x.shape[:2], room, *x.shape[3:]) for x in new]
        ordered = attention.ordered or bool(gates)
        pairs = zip(self.layers[key], new, strict=True)
        seen = [self._extend(stored, x, window, ordered) for stored, x in pairs]
        return seen, replace(context, log_forget=seen.pop()) if gates else context

    def _extend(self, stored: Tensor, x: Tensor, window: int | None, ordered: bool) -> Tensor:
        new, start = x.shape[2], self.length
        end = start + new
        if window is None or end <= window:
            stored[:, :, start:end] = x
            return stored[:, :, :end]
        if new == 1 and not ordered:
            stored[:, :, start % window] = x[:, :, 0]
            return stored
        past = torch.arange(max(0, start - window + 1), start, device=x.device) % window
        x = torch.cat((stored[:, :, past], x), dim=2)
        stored[:, :, torch.arange(end - window, end, device=x.device) % window] = x[:, :, -window:]
        return x
