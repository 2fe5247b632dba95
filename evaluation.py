"""Measurements of a model: its mean loss and its attention weights."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from attention_paths.blocked import BLOCK_QUERIES
from attention_paths.module import Attention
from attention_paths.reference import ALL
from config import Config
from model import GPT
from runtime.device import autocast


@torch.no_grad()
def mean_loss(
    model: GPT, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device, dtype: torch.dtype
) -> float:
    """Mean loss in nats over the batches (x, y) of all ranks; targets below 0 have no loss.

    Summed in float64 over tokens and ranks, so that batch size and number of ranks affect only
    rounding.
    """
    total, count = 0.0, 0
    for x, y in batches:
        with autocast(device, dtype):
            losses = model.token_losses(x, y)[y >= 0]
        total += losses.cpu().double().sum().item()
        count += losses.numel()
    if dist.is_initialized():
        sums = torch.tensor([total, count], dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        total, count = sums.tolist()
    return total / count


@torch.no_grad()
def attention_weights(
    model: GPT,
    idx: Tensor,
    rows: slice,
    reduce: Callable[[Tensor], Tensor] = lambda A: A,
    layers: slice = slice(None),
) -> list[Tensor]:
    """The attention weights of each layer, [B, H, rows, L], at least float32, for idx [B, L].

    `rows` selects queries: slice(-1, None) is the last one. `reduce` is applied to each layer's
    weights, a block of rows at a time so that memory is O(L); rows must stay the third dimension.
    """
    reduced: dict[Attention, Tensor] = {}

    def record(attention: Attention, inputs: tuple, output: Tensor) -> None:
        q, k, _, context = inputs
        L = k.shape[2]
        start, stop, _ = rows.indices(L)
        parts = []
        for begin in range(start, stop, BLOCK_QUERIES):
            end = min(stop, begin + BLOCK_QUERIES)
            # queries must be the last positions: later keys are cut off and get weight 0
            part = context.part(ALL, slice(begin, end), slice(end))
            A = attention.weights(q[:, :, begin:end], k[:, :, :end], part)
            parts.append(reduce(F.pad(A, (0, L - end))))
        reduced[attention] = torch.cat(parts, dim=2)

    by_layer = [[part for part, _ in layer.parts()] for layer in model.attention_layers()][layers]
    hooks = [part.register_forward_hook(record) for part in sum(by_layer, [])]
    try:
        model.trunk(model.wte(idx))
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat([reduced[part] for part in attentions], dim=1) for attentions in by_layer]


def head_windows(config: Config) -> list[list[int | None]]:
    """By layer, how many keys a row of each head sees at most; None: all up to its own."""
    others = config.window if config.local_window is None else config.local_window
    global_heads = map(config.nope_heads, range(config.n_layer))
    return [[config.window] * n + [others] * (config.n_head - n) for n in global_heads]
