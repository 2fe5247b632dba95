"""What a run prints before its first step: its model, its data, and what they cost."""

from typing import Any

from config import Config, accumulation_steps
from data.loader import Loader
from errors import UserError
from model import GPT
from optim import build_optimizers, learning_rate
from runtime.device import pick_dtype


def check_schedule(config: Config, step: int, before: dict[str, Any], quiet: bool) -> None:
    """Print how the settings change the learning rate of a run that is resumed at `step`.

    `before` has the settings it was trained with. Raises UserError where the rate would more than
    double: the schedule has lowered it for good.
    """
    old = config.replace(**{key: before.get(key, 0) for key in ("max_iters", "cooldown_iters")})
    was, now = learning_rate(step - 1, old), learning_rate(step - 1, config)
    if not step or was == now:
        return
    change = (
        f"max_iters = {config.max_iters} instead of {old.max_iters} makes the learning rate at "
        f"step {step} {now:.1e} instead of {was:.1e}"
    )
    if now > 2 * was:
        raise UserError(
            f"{config.out_dir}: {change}, after its schedule has lowered it. For a warm restart, "
            f"start a new run from its weights: --init_from={config.out_dir} --out_dir=NEW. A run "
            "that is to be continued is trained with --schedule=trapezoidal, and takes its "
            "cooldown_iters with the last --resume"
        )
    if not quiet:
        print(f"note: {change}", flush=True)


def describe(config: Config, model: GPT, loader: Loader, world_size: int, step: int) -> str:
    """Lines on a run that is about to do the updates after `step`."""
    device = next(model.parameters()).device
    dtype = str(pick_dtype(config.dtype, device)).removeprefix("torch.")
    tokens = (config.max_iters - step) * config.total_batch_size
    lines = [
        f"{config.variant_name}: {model.count_parameters():,} parameters, {loader.tokens:,} "
        f"training tokens in {loader.source}, {loader.n_windows:,} windows; "
        f"{config.total_batch_size:,} tokens a step (processes x micro-batches x batch_size x "
        f"block_size = {world_size} x {accumulation_steps(config, world_size)} x "
        f"{config.batch_size} x {config.block_size}) on {device.type} in {dtype}; run folder "
        f"{config.out_dir}" + (f", from step {step} of {config.max_iters}" if step else "")
    ]
    ramps = config.warmup_iters + config.cooldown_iters
    if step < config.max_iters < ramps:
        lines.append(
            f"note: warm-up and cooldown take {ramps} steps, but max_iters = {config.max_iters}: "
            f"the learning rate does not reach {config.learning_rate:g}"
        )
    val_tokens = loader.validation_windows(config.val_tokens) * config.block_size
    if val_tokens < config.val_tokens // config.block_size * config.block_size:
        lines.append(
            f"note: val_tokens = {config.val_tokens:,}, but {loader.source} has only "
            f"{val_tokens:,} in whole windows of {config.block_size}"
        )
    if tokens:
        lines.append(
            f"{tokens:,} tokens to train on, {tokens * model.flops_per_token():.1e} FLOP; "
            f"{state_bytes(config, model) / 1e6:,.0f} MB for weights, gradients and optimizer"
        )
    if config.dry_run:
        lines.append("dry run: all checks passed; nothing was written")
    return "\n".join(lines)


def state_bytes(config: Config, model: GPT) -> int:
    """Bytes of all parameters, their gradients and their moments: AdamW has two, Muon one."""
    optimizers = build_optimizers(model, config)
    return sum(
        p.numel() * p.element_size() * (4 if "betas" in group else 3)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    )
