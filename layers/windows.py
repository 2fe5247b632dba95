"""The windows of a built model: of every module that has a `window`, whoever set it."""

from typing import Any

import torch.nn as nn


def with_window(model: nn.Module) -> list[Any]:
    """Return the modules that have a `window`, as Attention has."""
    return [module for module in model.modules() if hasattr(module, "window")]


def largest_window(model: nn.Module) -> int | None:
    """Return the most keys that a query sees in any layer; None: all."""
    windows = [attention.window for attention in with_window(model)]
    if None in windows:
        return None
    return max(windows, default=None)


def limit_windows(model: nn.Module, window: int) -> None:
    """Let a query of any layer see its last `window` keys at most."""
    for attention in with_window(model):
        attention.window = min(attention.window or window, window)
