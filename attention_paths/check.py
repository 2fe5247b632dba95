"""Checks of an entry of the table of variants, once, where a layer first uses it."""

import functools
import math

import torch
from torch import Tensor

from attention import VARIANTS, Phi, Variant
from attention_paths.fused import launch
from attention_paths.reference import NO_CONTEXT, Context, ReferenceAttention
from errors import UserError, check_choice


@functools.cache
def check_variant(variant: Variant) -> None:
    """Raise UserError if a variant sees the future, or its phi is not as declared.

    Without this, a phi that is not 0 at `zero` would train with weights on masked keys.
    """
    name = name_of(variant)
    # transformers builds models on the meta device, and evaluations without gradients
    with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
        check_phi(name, variant.phi)
        check_causality(name, variant)


def name_of(variant: Variant) -> str:
    return next((name for name, entry in VARIANTS.items() if entry == variant), "the variant")


def check_phi(name: str, phi: Phi) -> None:
    """Raise UserError if phi is not as declared, or where masked keys could get weight."""
    if phi.kernel is not None and launch is not None:
        check_choice(f"{name}: kernel", phi.kernel, launch.PHIS)
    masked = torch.tensor(phi.zero, dtype=torch.float64, requires_grad=True)
    weight = phi.function(masked.clone())
    slope = torch.zeros(())
    if phi.zero == -math.inf and weight.requires_grad:
        (slope,) = torch.autograd.grad(weight, masked)
    if weight != 0 or slope != 0:
        raise UserError(
            f"{name}: phi({phi.zero:g}) = {weight.item():.3g}, its gradient there {slope:.3g}, but "
            "masked keys get this score and must get no weight: set Phi(zero=...) to a z with "
            "phi(z) = 0; for an f without such a z, as with a heavy tail, let phi(z) be "
            "torch.where(z == -math.inf, 0, f(z.clamp_min(-1e4)))"
        )
    grid = torch.linspace(-30, 30, 601, dtype=torch.float64)
    values = phi.function(grid)
    infinite = ~values.isfinite()
    if infinite.any():
        z = grid[infinite][0].item()
        raise UserError(f"{name}: phi({z:g}) is not finite; scores may have any value")
    negative = values < 0
    if negative.any() and not phi.signed:
        z = grid[negative][0].item()
        value = values[negative][0].item()
        raise UserError(
            f"{name}: phi({z:g}) = {value:.3g} is negative: declare Phi(..., signed=True), with "
            "which l1 sums absolute values and p is refused"
        )


def check_causality(name: str, variant: Variant) -> None:
    """Raise UserError if a weight or a gradient reaches a key that its row does not see."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, 6, 8, dtype=torch.float64, generator=generator)
    row_inputs = {key: torch.zeros(1, 2, 6, dtype=q.dtype) for key in variant.from_input}
    context = Context(row_inputs=row_inputs)
    attention = ReferenceAttention(variant, 2, 8, 6, p=2.0 if variant.needs_p else None).double()
    for scalar in variant.learnable:
        check_choice(f"{name}: learnable", scalar, ("s", "b", "p_n"))
    learned = dict(attention.named_parameters()) | row_inputs | {"q": q, "k": k}
    for x in learned.values():
        x.requires_grad_()
    try:
        all_weights = attention.weights(q, k, context)[0]  # [H, 6, 6]
    except Exception as error:  # whatever a formula raises
        raise UserError(
            f"{name}: its formulas fail: {type(error).__name__}: {error}. n, s, b and p_n of "
            "`rows`, the Rows of attention.py, are tensors: rows.n.log(), not math.log(rows.n); s, "
            "b and p_n exist where `learnable` names them"
        ) from error
    if variant.bias is not None and not variant.bias_per_key:
        rows = attention.rows(q, 6, NO_CONTEXT)
        if (torch.as_tensor(variant.bias(rows)) + rows.n.new_zeros(1)).shape[-1] > 1:
            raise UserError(f"{name}: its bias differs between keys, so it needs bias_per_key=True")
    check_gradients(name, variant, all_weights, learned)
    for row, weights in enumerate(all_weights.unbind(1), start=1):
        (gradient,) = torch.autograd.grad(weights.square().sum(), k, retain_graph=True)
        if weights[:, row:].any() or gradient[0, :, row:].any():
            raise UserError(
                f"{name}: row {row} depends on keys after it; check that its formulas use the rows "
                "alone, and that `reweight` leaves masked keys, whose weight is 0, at 0"
            )
    check_blocks(name, attention, q, k, context)


@torch.no_grad()
def check_blocks(
    name: str,
    attention: ReferenceAttention,
    q: Tensor,
    k: Tensor,
    context: Context,
) -> None:
    """Raise UserError if a row's weights depend on the other rows and keys of the call.

    The blocked path and decoding compute a few rows at a time, without masked keys.
    """
    for window, first in ((None, 0), (3, 3)):
        attention.window = window
        whole = attention.weights(q, k, context)
        if not torch.equal(whole, attention.weights(q, k, context)):
            return  # it draws random numbers
        for keys, queries in (
            (slice(4), slice(4)),
            (slice(6), slice(3, 6)),
            (slice(first, 6), slice(5, 6)),
        ):
            block_context = context.select(queries=queries, keys=keys)
            block = attention.weights(q[:, :, queries], k[:, :, keys], block_context)
            if not torch.allclose(block, whole[:, :, queries, keys], atol=1e-6):
                raise UserError(
                    f"{name}: a row's weights depend on the number of keys or rows in the call, as "
                    "of A.mean(-1) or A.shape[-1]; rows.n is the number of keys that a row sees"
                )


def check_gradients(
    name: str,
    variant: Variant,
    weights: Tensor,
    learned: dict[str, Tensor],
) -> None:
    """Raise UserError if the gradient by a tensor is nan or infinite, or a scalar has none.

    A run would stop at its first step, and blame the learning rate.
    """
    cause = "in the first row n is 1 and log n is 0"
    if variant.bias_per_key:
        cause = "for masked keys rows.q_idx - rows.kv_idx is negative: take its clamp_min(0)"
    for key, x in learned.items():
        (gradient,) = torch.autograd.grad(
            weights.square().sum(), x, retain_graph=True, allow_unused=True
        )
        if gradient is None and key in variant.learnable:
            raise UserError(f"{name}: no formula uses {key}, which `learnable` names")
        if gradient is not None and not gradient.isfinite().all():
            raise UserError(f"{name}: the gradient of its weights by {key} is not finite; {cause}")
