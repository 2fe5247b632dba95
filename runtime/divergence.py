"""The end of a run whose loss, gradients or weights are not finite."""

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist

# With float16 a step whose gradients overflow lowers the loss scale, from 2^16 by half. Gradients
# that still overflow at this one are not finite at any (min_loss_scale of fairseq).
SMALLEST_SCALE = 1e-4


def finite_step(loss: float, grad_norm: float, scaler: torch.amp.GradScaler) -> bool:
    """Whether a step's loss and gradients are finite, or overflow only by the scale of the loss."""
    overflows = scaler.is_enabled() and scaler.get_scale() > SMALLEST_SCALE
    return math.isfinite(loss) and (math.isfinite(grad_norm) or overflows)


def stop_diverged(run: Path, step: int, error: str) -> None:
    """End the run without saving, so that the newest checkpoint is a good one."""
    if not dist.is_initialized() or dist.get_rank() == 0:  # the ranks end alike
        print(
            f"error: step {step}: {error}. The last checkpoint in {run} is good. Try a lower "
            "learning_rate, a longer warmup_iters or dtype = float32.",
            file=sys.stderr,
        )
    sys.exit(1)
