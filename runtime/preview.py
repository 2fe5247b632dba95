"""What a run prints before its first step: its model, its data, and what they cost."""

import torch

from config import Config, accumulation_steps
from data.loader import Loader
from runtime.checkpoint import Training


def describe(config: Config, training: Training, loader: Loader, world_size: int) -> str:
    """Lines on a run that is about to start or continue."""
    model, step, total = training.model, training.step, config.total_batch_size
    tokens = config.max_iters * total
    flops = (tokens - step * total) * model.flops_per_token()
    val_tokens = loader.validation_windows(config.val_tokens) * config.block_size
    lines = [
        f"{config.variant_name}: {model.count_parameters():,} parameters on "
        f"{training.device.type} in {str(training.dtype).removeprefix('torch.')}; weights, "
        f"gradients and optimizer take {state_bytes(training) / 1e6:,.0f} MB; run folder "
        f"{config.out_dir}",
        f"{loader.source}: {loader.tokens:,} tokens in {loader.n_windows:,} windows, "
        f"{val_tokens:,} tokens for validation",
        f"{tokens:,} tokens in steps of {total:,} (processes x micro-batches x batch_size x "
        f"block_size = {world_size} x {accumulation_steps(config, world_size)} x "
        f"{config.batch_size} x {config.block_size}), {flops:.1e} FLOP to do, step {step} of "
        f"{config.max_iters}",
    ]
    if config.dry_run:
        lines.append("dry run: all checks passed; nothing was written")
    return "\n".join(lines)


def state_bytes(training: Training) -> int:
    """The memory that does not depend on the batch: a gradient and the moments of each weight."""
    return sum(
        p.nbytes * (3 if isinstance(optimizer, torch.optim.Muon) else 4)
        for optimizer in training.optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    )
