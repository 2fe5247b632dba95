"""The device and dtype a model runs in, its mean loss and its attention: for train and scripts."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from attention import BLOCK_QUERIES
from errors import UserError
from model import GPT


def pick_device(name: str = "auto") -> torch.device:
    """The device of a setting; 'auto' is cuda, else mps, else cpu. UserError if it is not there."""
    if name == "auto":
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device("cuda:0" if torch.cuda.is_available() else mps)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "mps", "cpu"):
        raise UserError(f"device = {name!r}; it is 'auto', 'cuda', 'cuda:1', 'mps' or 'cpu'")
    there = {
        "cuda": (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if not there[device.type]:
        raise UserError(f"device = {name!r} is not on this machine; device = 'auto' takes what is")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products: 'auto' is bfloat16 (or else float16) on CUDA, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def autocast(device: torch.device, dtype: torch.dtype):
    """Matrix products in dtype; nothing to do for float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


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
