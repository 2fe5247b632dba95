"""The end of a run whose loss, gradients or weights are not finite."""

import math
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

from config import Config
from optim import learning_rate
from runtime.distributed import EXIT_FAILED

# With float16 a step whose gradients overflow lowers the loss scale, from 2^16 by half. Gradients
# that still overflow at this one are not finite at any (min_loss_scale of fairseq).
SMALLEST_SCALE = 1e-4


def finite_step(loss: float, grad_norm: float, scaler: torch.amp.GradScaler) -> bool:
    """Whether a step's loss and gradients are finite, or overflow only by the scale of the loss."""
    if math.isfinite(loss) and not math.isfinite(grad_norm):
        return scaler.is_enabled() and scaler.get_scale() > SMALLEST_SCALE
    return math.isfinite(loss)


def finite_weights(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


def stop_diverged(config: Config, step: int, error: str, location: str) -> None:
    """End the run without saving, so that the newest checkpoint is a good one."""
    if not dist.is_initialized() or dist.get_rank() == 0:  # the ranks end alike
        print(
            f"error: step {step}: {error}; the batch begins {location}. The run's last checkpoint "
            f"in {config.out_dir} is good. Try a lower learning_rate (now "
            f"{learning_rate(step - 1, config):.2e}), a longer warmup_iters, a lower grad_clip, "
            "or dtype = float32.",
            file=sys.stderr,
            flush=True,
        )
    sys.exit(EXIT_FAILED)
