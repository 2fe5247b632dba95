"""What a run prints before its first step: its model, its data, and what they cost."""

from config import Config, accumulation_steps
from data.loader import Loader
from runtime.checkpoint import Training

# Repeated tokens are worth less after about four epochs (Muennighoff et al. 2023, "Scaling
# Data-Constrained Language Models").
MANY_EPOCHS = 4


def describe(config: Config, training: Training, loader: Loader | None, world_size: int) -> str:
    """Lines on a run that is about to start or continue; without data there is no loader."""
    model, step, total = training.model, training.step, config.total_batch_size
    tokens = config.max_iters * total
    flops = (tokens - step * total) * model.flops_per_token()
    data = f"{config.data_dir}: not there yet; data.text and data.fineweb make it (docs/data.md)"
    if loader is not None:
        val_tokens = loader.validation_windows(config.val_tokens) * config.block_size
        data = f"{loader.source}: {loader.tokens:,} tokens, {val_tokens:,} for validation"
        epochs = tokens / (loader.n_windows * config.block_size)
        data += f"; the run goes through them {epochs:,.0f} times" * (epochs > MANY_EPOCHS)
    lines = [
        f"{config.variant_name}: {model.count_parameters():,} parameters on {training.device.type} "
        f"in {str(training.dtype).removeprefix('torch.')}; run folder {config.out_dir}",
        data,
        f"{tokens:,} tokens in steps of {total:,} (processes x micro-batches x batch_size x "
        f"block_size = {world_size} x {accumulation_steps(config, world_size)} x "
        f"{config.batch_size} x {config.block_size}), {flops:.1e} FLOP to do, step {step} of "
        f"{config.max_iters}",
    ]
    for key in ("window", "local_window"):
        if (keys := getattr(config, key)) and keys >= config.block_size:
            lines.append(f"{key} = {keys} hides nothing at block_size = {config.block_size}")
    passed = "all checks passed" if loader else "all checks passed but those of the data"
    lines += [f"dry run: {passed}; nothing was written"] * config.dry_run
    return "\n".join(lines)
