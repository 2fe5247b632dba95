"""The micro-batch size that fits the device, from an estimate of the memory that training needs."""

import os

import torch
import torch.nn as nn

from config import LARGEST_BATCH, Config, micro_batch_size
from layers.build import build_model
from layers.losses import CHUNK_GPU
from model import GPT
from runtime.device import pick_compile, pick_dtype

# A float32 weight with its gradient and AdamW's two moments.
WEIGHT_BYTES = 16
BUCKET_BYTES = 4  # per weight: DDP's buckets, into which it copies the gradients to average
# Fitted to the peaks of torch's allocator in two training steps of compiled models in 16 bits.
BLOCK_BYTES = 2.7  # per token, for each input and output feature of the blocks' linear layers
LOGIT_BYTES = 6.0  # per logit of a chunk
EAGER = 1.6  # times as much without torch.compile
# The rest is for CUDA, NCCL, cuDNN, gaps between blocks, and errors of the estimate.
USABLE = 0.88


def fitting_batch_size(config: Config, world_size: int, device: torch.device) -> int:
    """Return the sequences per micro-batch: a divisor of a process's share of a step.

    It is the largest within batch_size or, if batch_size is 0, within LARGEST_BATCH and what fits
    the device. Raises UserError as micro_batch_size does.
    """
    if config.batch_size:
        return micro_batch_size(config, world_size)
    with torch.device("meta"):
        model = build_model(config)
    scale = pick_dtype(config.dtype, device).itemsize / 2
    if not pick_compile(config.compile, device, many_graphs=config.varied_lengths):
        scale *= EAGER
    usable = USABLE * memory_of(device, world_size)
    weight_bytes, loss_bytes, token_bytes = estimate(model)
    if world_size > 1:
        weight_bytes *= (WEIGHT_BYTES + BUCKET_BYTES) / WEIGHT_BYTES
    free = usable - weight_bytes - scale * loss_bytes
    fitting = int(free / (scale * token_bytes * config.block_size))
    at_most = max(1, min(LARGEST_BATCH, fitting))
    return micro_batch_size(config.replace(batch_size=at_most), world_size)


def memory_of(device: torch.device, world_size: int) -> float:
    """Return the bytes of memory of a GPU or, elsewhere, a process's share of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / world_size


def estimate(model: GPT) -> tuple[float, float, float]:
    """Return the bytes that training holds for weights, for the loss, and in blocks per token.

    The last two are of a compiled model in 16 bits.
    """
    values = 0
    for module in model.trunk.modules():
        if isinstance(module, nn.Linear):
            values += module.in_features + module.out_features
    config = model.config
    if config.projections == "tpa":  # q, k and v beside their factors
        values += config.n_layer * 3 * config.n_head * config.d_head
    weights = sum(p.numel() for p in model.parameters())
    logits = CHUNK_GPU * model.lm_head.out_features
    return WEIGHT_BYTES * weights, LOGIT_BYTES * logits, BLOCK_BYTES * values
