"""What a run prints before its first step: its model, its data, and what they cost."""

from config import Config, accumulation_steps
from data.loader import Loader
from model import GPT
from runtime.device import pick_dtype


def describe(config: Config, model: GPT, loader: Loader, world_size: int, step: int) -> str:
    """Lines on a run that is about to do the updates after `step`."""
    device = next(model.parameters()).device
    dtype = str(pick_dtype(config.dtype, device)).removeprefix("torch.")
    tokens = (config.max_iters - step) * config.total_batch_size
    val_tokens = loader.validation_windows(config.val_tokens) * config.block_size
    lines = [
        f"{config.variant_name}: {model.count_parameters():,} parameters on {device.type} in "
        f"{dtype}, {tokens * model.flops_per_token():.1e} FLOP; run folder {config.out_dir}",
        f"{loader.source}: {loader.tokens:,} training tokens in {loader.n_windows:,} windows, "
        f"{val_tokens:,} validation tokens",
        f"{config.total_batch_size:,} tokens a step (processes x micro-batches x batch_size x "
        f"block_size = {world_size} x {accumulation_steps(config, world_size)} x "
        f"{config.batch_size} x {config.block_size}), step {step} of {config.max_iters}",
    ]
    if config.dry_run:
        lines.append("dry run: all checks passed; nothing was written")
    return "\n".join(lines)
