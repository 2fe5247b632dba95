"""What is measured of a model: its mean loss and its attention weights."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from attention import BLOCK_QUERIES
from model import GPT
from runtime.device import autocast


@torch.no_grad()
def mean_loss(model: GPT, batches, device: torch.device, dtype: torch.dtype) -> float:
    """Mean loss in nats over batches (x, y) of this and all other processes.

    Summed in float64 over tokens and processes, so that neither the batches' shape nor the number
    of processes shows beyond rounding.
    """
    total, count = 0.0, 0
    for x, y in batches:
        with autocast(device, dtype):
            losses = model.token_losses(x, y)
        total += losses.cpu().double().sum().item()
        count += losses.numel()
    if dist.is_initialized():
        sums = torch.tensor([total, count], dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        total, count = sums.tolist()
    return total / count


@torch.no_grad()
def attention_weights(
    model: GPT, idx: Tensor, rows: slice, reduce=lambda A: A, layers: slice = slice(None)
) -> list[Tensor]:
    """The attention weights of each layer, [B, H, rows, L], float32 at least, for idx [B, L].

    `rows` are the queries: slice(-1, None) is the last one. What `reduce` makes of a layer's
    weights is kept in their place; it is given a block of rows at a time, so that memory is
    O(L), and must leave rows the third dimension.
    """
    kept = []

    def keep(attention, inputs, output):
        q, k, _, score_scale, _ = inputs
        L = k.shape[2]
        start, stop, _ = rows.indices(L)
        parts = []
        for first in range(start, stop, BLOCK_QUERIES):
            end = min(stop, first + BLOCK_QUERIES)
            # Attention takes the queries for the last positions: later keys are cut off, then 0
            A = attention.weights(q[:, :, first:end], k[:, :, :end], score_scale, L)
            parts.append(reduce(F.pad(A, (0, L - end))))
        kept.append(torch.cat(parts, dim=2))

    blocks = model.trunk.blocks[layers]
    hooks = [block.attn.attention.register_forward_hook(keep) for block in blocks]
    try:
        model.trunk(model.wte(idx))
    finally:
        for hook in hooks:
            hook.remove()
    return kept
