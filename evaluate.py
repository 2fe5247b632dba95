"""The device and dtype that a model runs in, and its mean loss: for train.py and the scripts."""

import contextlib

import torch
import torch.distributed as dist

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
def mean_loss(model: GPT, batches, device: torch.device, dtype: torch.dtype) -> tuple[float, int]:
    """Mean loss in nats and number of tokens over batches (x, y) of this and all other processes.

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
    return total / count, int(count)
