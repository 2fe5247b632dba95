"""Measurements of a model: its mean loss, its attention weights and its heads' windows."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from attention_paths.blocked import BLOCK_QUERIES
from attention_paths.module import Attention
from model import GPT
from runtime.device import autocast


@torch.no_grad()
def mean_loss(
    model: GPT,
    batches: Iterable[tuple[Tensor, Tensor]],
    dtype: torch.dtype,
) -> float:
    """Return the mean loss in nats over the batches (x, y) of all ranks.

    Negative targets are ignored. The sum is in float64, over tokens and ranks, so that batch size
    and number of ranks affect only rounding.
    """
    total = 0.0
    count = 0
    for x, y in batches:
        with autocast(x.device, dtype):
            losses = model.token_losses(x, y)[y >= 0]
        total += losses.cpu().double().sum().item()
        count += losses.numel()
    if dist.is_initialized():
        sums = torch.tensor([total, count], dtype=torch.float64)
        dist.all_reduce(sums)
        total, count = sums.tolist()
    return total / count


@torch.no_grad()
def layer_attention_weights(
    model: GPT,
    idx: Tensor,
    rows: slice,
    reduce: Callable[[Tensor], Tensor] = lambda A: A,
    layers: slice = slice(None),
) -> list[Tensor]:
    """Return the attention weights of each layer, [B, H, rows, L], for idx [B, L].

    `rows` selects queries: slice(-1, None) is the last one. `reduce` is applied to each layer's
    weights (float32 at least), a block of rows at a time so that memory is O(L); rows must stay the
    third dimension.
    """
    reduced: dict[Attention, Tensor] = {}

    def record(attention: Attention, inputs: tuple, output: Tensor) -> None:
        q, k, _, context = inputs
        L = k.shape[2]
        start, stop, _ = rows.indices(L)
        chunks = []
        for begin in range(start, stop, BLOCK_QUERIES):
            end = min(stop, begin + BLOCK_QUERIES)
            # queries must be the last positions: later keys are cut off and get weight 0
            block_context = context.select(queries=slice(begin, end), keys=slice(end))
            A = attention.weights(q[:, :, begin:end], k[:, :, :end], block_context)
            chunks.append(reduce(F.pad(A, (0, L - end))))
        reduced[attention] = torch.cat(chunks, dim=2)

    selected = [layer.attentions() for layer in model.attention_layers()[layers]]
    with ExitStack() as hooks:
        for attentions in selected:
            for attention in attentions:
                hooks.enter_context(attention.register_forward_hook(record))
        model.hidden(idx)
    by_layer = []
    for attentions in selected:
        heads = [reduced[attention] for attention in attentions]
        by_layer.append(torch.cat(heads, dim=1))
    return by_layer


def head_windows(model: GPT) -> list[list[int | None]]:
    """Return by layer how many keys a query of each head sees at most; None: no window."""
    by_layer = []
    for layer in model.attention_layers():
        windows = []
        for attention in layer.attentions():
            windows += [attention.window] * attention.n_head
        by_layer.append(windows)
    return by_layer
