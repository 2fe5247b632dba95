"""The windows of a built model: of every module that has a `window`, whoever set it."""

from typing import Any

import torch.nn as nn

from model import GPT


def with_window(model: nn.Module) -> list[Any]:
    """Return the modules that have a `window`, as Attention has."""
    return [module for module in model.modules() if hasattr(module, "window")]


def largest_window(model: nn.Module) -> int | None:
    """Return the most keys that a query sees in any layer; None: all."""
    windows = [attention.window for attention in with_window(model)]
    if None in windows:
        return None
    return max(windows, default=None)


def rope_sees_beyond(model: GPT, length: int) -> bool:
    """Tell whether a head with RoPE sees more than its last `length` keys in any layer."""
    for layer in model.attention_layers():
        if layer.nope_heads == layer.n_head:
            continue
        *_, with_rope = layer.attentions()  # the last heads are those with RoPE
        window = largest_window(with_rope)
        if window is None or window > length:
            return True
    return False


def limit_windows(model: nn.Module, window: int) -> None:
    """Let a query of any layer see its last `window` keys at most."""
    for attention in with_window(model):
        attention.window = min(attention.window or window, window)
