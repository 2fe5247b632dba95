"""The end of a run whose loss, gradients or weights are not finite."""

import sys
from collections.abc import Callable

import torch.nn as nn

from config import Config
from optim import learning_rate
from runtime.distributed import EXIT_FAILED


def check_weights(
    model: nn.Module, config: Config, step: int, batch_location: Callable[[int], str]
) -> None:
    """End the run if the update of a step, counted from 1, has left weights that are not finite."""
    if step and not all(p.isfinite().all() for p in model.parameters()):
        stop_diverged(config, step, "its update left non-finite weights", batch_location(step))


def stop_diverged(config: Config, step: int, error: str, location: str) -> None:
    """End the run without saving, so that the newest checkpoint is a good one."""
    print(
        f"error: step {step}: {error}; the batch begins {location}. The run's last checkpoint in "
        f"{config.out_dir} is good. Try a lower learning_rate (now "
        f"{learning_rate(step - 1, config):.2e}), a longer warmup_iters, a lower grad_clip, "
        "dtype = float32 or on_nonfinite = skip.",
        file=sys.stderr,
        flush=True,
    )
    sys.exit(EXIT_FAILED)
