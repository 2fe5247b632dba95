"""Stage 2 of LSSAR on a CPU: relu(x)^p, then l1, in fewer passes over the matrix."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import DEAD, normalised_power


def fast_normalised_power(x: Tensor, top: Tensor, p: float) -> Tensor:
    """Compute attention.normalised_power; NormalisedPower does it in eager mode on a CPU."""
    if x.is_cpu and not torch.compiler.is_compiling():
        return NormalisedPower.apply(x, top.masked_fill(top == 0, math.inf), p)
    return normalised_power(x, top, p)


class NormalisedPower(torch.autograd.Function):
    """relu(x / top)^p, divided by its sum over a row, and the gradient with respect to x.

    A row with a single x above 0 has the weight 1 and the gradient 0, both exactly.
    """

    @staticmethod
    def forward(x: Tensor, top: Tensor, p: float) -> Tensor:
        x_p = power((x / top).relu_(), p)
        norm = x_p.sum(-1, keepdim=True)
        return x_p.div_(norm.masked_fill(norm <= DEAD, math.inf))

    @staticmethod
    def setup_context(
        ctx: Any,
        inputs: tuple[Tensor, Tensor, float],
        output: Tensor,
    ) -> None:
        x, _, ctx.p = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, A = ctx.saved_tensors
        coupling = gradient - torch.einsum("...k,...k->...", A, gradient)[..., None]
        slope = A / F.threshold(x, 0, math.inf)  # 0 where x is not above 0
        return coupling.mul_(slope).mul_(ctx.p), None, None


def power(x: Tensor, p: float) -> Tensor:
    """Compute x^p for x >= 0; for an integer p by products, which on a CPU are faster than pow.

    Up to 3, pow uses products itself. Products add up p rounding errors, 3e-5 at p = 1,000: from
    there on pow is used again.
    """
    if not 3 < p < 1000 or p != round(p):
        return x.pow(p)
    y = x
    for digit in f"{round(p):b}"[1:]:  # square, and multiply over p's binary digits
        y = x.square() if y is x else y.square_()  # x itself must not change
        if digit == "1":
            y.mul_(x)
    return y
