"""Checks of an entry of the table of variants, once, where a layer first uses it."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from attention import VARIANTS, Phi, Rows, Variant, l1_normalise, row_max
from attention_paths.fused import launch
from attention_paths.reference import ALL, Context, ReferenceAttention
from errors import UserError, check_choice

# The size of the example that formulas are checked with, besides the layer's number of heads.
LENGTH, HEAD_SIZE = 6, 8
# What a variant may name in these fields.
NAMES = {"learnable": ("s", "b", "p_n"), "from_input": ("u", "w")}
# The fields that hold a function, or None.
FUNCTIONS = ("scale", "bias", "norm", "reweight", "row_weights")


def check_variant(variant: Variant, n_head: int) -> None:
    """Raise UserError if a variant sees the future, or its phi or formulas are not as declared.

    Without this, a phi that is not 0 at `zero` would train with weights on masked keys.
    """
    check_declaration(name_of(variant), variant)
    check_computation(variant, n_head)


@functools.cache
def check_computation(variant: Variant, n_head: int) -> None:
    name = name_of(variant)
    # transformers builds models on the meta device, and evaluations without gradients
    with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
        check_phi(name, variant.phi)
        check_formulas(name, variant, n_head)


def name_of(variant: Variant) -> str:
    return next((name for name, entry in VARIANTS.items() if entry is variant), "the variant")


def check_declaration(name: str, variant: Variant) -> None:
    """Raise UserError for an entry that is not a Variant of a Phi, or that names unknown inputs."""
    if not isinstance(variant, Variant):
        raise UserError(
            f"{name} is a {type(variant).__name__}, but must be a Variant: Variant(phi)"
        )
    if not isinstance(variant.phi, Phi):
        kind = type(variant.phi).__name__
        raise UserError(f"{name}: its phi is a {kind}, but must be a Phi: Phi(function)")
    for field in FUNCTIONS:
        value = getattr(variant, field)
        if not (value is None or callable(value)):
            raise UserError(
                f"{name}: its {field} is a {type(value).__name__}, but must be a function: "
                "lambda rows: ..."
            )
    for field, choices in NAMES.items():
        names = getattr(variant, field)
        if not isinstance(names, tuple):
            raise UserError(f'{name}: {field} = {names!r} must be a tuple, such as ("s",)')
        for input_name in names:
            check_choice(f"{name}: {field}", input_name, choices)


def check_phi(name: str, phi: Phi) -> None:
    """Raise UserError if phi is not as declared, or where masked keys could get weight."""
    if phi.kernel is not None and launch is not None:
        check_choice(f"{name}: kernel", phi.kernel, launch.PHIS)
    weight = weights_of(name, phi, torch.tensor([phi.zero], dtype=torch.float64))
    if weight != 0:
        raise UserError(
            f"{name}: phi({phi.zero:g}) = {weight.item():.3g}, but masked keys get this score and "
            "must get no weight: set Phi(zero=...) to a z with phi(z) = 0"
        )
    grid = torch.linspace(-30, 30, 601, dtype=torch.float64)
    values = weights_of(name, phi, grid)
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
    if phi.shift is not None:
        check_shift(name, phi)


def check_shift(name: str, phi: Phi) -> None:
    """Raise UserError if the shift of a row's scores changes its l1-normalised weights."""
    assert phi.shift is not None
    for middle in (-60, 0, 60):
        z = torch.linspace(middle - 3, middle + 3, 7, dtype=torch.float64)
        shifted = z + phi.shift(row_max(z))
        weights = l1_normalise(phi.function(z), phi.signed)
        if not torch.allclose(l1_normalise(phi.function(shifted), phi.signed), weights):
            raise UserError(
                f"{name}: phi.shift changes the weights of a row whose scores are about "
                f"{middle}: l1 must cancel it, as it cancels torch.neg for torch.exp"
            )


def weights_of(name: str, phi: Phi, scores: Tensor) -> Tensor:
    """Return phi of scores. Raises UserError if it fails or does not give a weight for each."""
    advice = (
        "it must return a tensor, with a weight for each score, its only argument: torch.exp(z), "
        "not math.exp(z)"
    )
    try:
        weights = phi.function(scores)
    except Exception as error:
        raise UserError(
            f"{name}: its phi fails: {type(error).__name__}: {error}; {advice}"
        ) from error
    if not isinstance(weights, Tensor):
        raise UserError(f"{name}: its phi returns a {type(weights).__name__}; {advice}")
    if weights.shape != scores.shape:
        raise UserError(
            f"{name}: its phi returns the shape {list(weights.shape)} for scores of the shape "
            f"{list(scores.shape)}; {advice}"
        )
    return weights


def check_formulas(name: str, variant: Variant, n_head: int) -> None:
    """Raise UserError if a formula fails, or depends on what it must not depend on.

    No weight and no gradient may reach a key that its row does not see.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (1, n_head, LENGTH, HEAD_SIZE)
    q, k = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
    row_inputs = {key: torch.zeros(shape[:3], dtype=q.dtype) for key in variant.from_input}
    context = Context(row_inputs=row_inputs)
    p = 2.0 if variant.needs_p else None
    attention = ReferenceAttention(variant, n_head, HEAD_SIZE, LENGTH, p=p).double()
    leaves = dict(attention.named_parameters()) | row_inputs | {"q": q, "k": k}
    for x in leaves.values():
        x.requires_grad_()
    check_shapes(name, variant, attention.rows(q, LENGTH, context))
    weights_of_call = call(name, attention.weights, q, k, context)
    check_weights(name, weights_of_call, (1, n_head, LENGTH, LENGTH))
    # weights may depend on no key, as uniform ones: 0 * k gives them a gradient
    all_weights = weights_of_call[0] + 0 * k.sum()  # [H, LENGTH, LENGTH]
    check_parameters(name, all_weights, leaves.values())
    check_gradients(name, variant, all_weights, leaves)
    for row, weights in enumerate(all_weights.unbind(1), start=1):
        (gradient,) = torch.autograd.grad(weights.square().sum(), k, retain_graph=True)
        if weights[:, row:].any() or gradient[0, :, row:].any():
            raise UserError(
                f"{name}: row {row} depends on keys after it; check that its formulas use the rows "
                "alone, and that `reweight` leaves masked keys, whose weight is 0, at 0"
            )
    check_blocks(name, attention, q, k, context)


def check_weights(name: str, weights: Any, shape: tuple[int, ...]) -> None:
    """Raise UserError if `weights` is not a tensor of this shape."""
    result = list(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
    if result != list(shape):
        raise UserError(
            f"{name}: in a call of {shape[1]} heads, {shape[2]} rows and {shape[3]} keys its "
            f"weights, as `row_weights` or `reweight` return them, are {result}, not {list(shape)}"
        )


def call(name: str, formula: Callable[..., Any], *arguments: Any, what: str = "a formula") -> Any:
    """Return what a formula of a variant returns. Raises UserError for any exception."""
    try:
        return formula(*arguments)
    except Exception as error:
        raise UserError(
            f"{name}: {what} fails: {type(error).__name__}: {error}. n, s, b and p_n of "
            "`rows`, the Rows of attention.py, are tensors: rows.n.log(), not math.log(rows.n); s, "
            "b and p_n exist where `learnable` names them"
        ) from error


def check_shapes(name: str, variant: Variant, rows: Rows) -> None:
    """Raise UserError if scale, bias or norm does not broadcast against the rows."""
    heads = len(rows.head)
    by_row = torch.Size((1, heads, LENGTH, 1))
    by_key = torch.Size((1, heads, LENGTH, LENGTH))
    for field in ("scale", "bias", "norm"):
        term = getattr(variant, field)
        if term is None:
            continue
        value = call(name, lambda term=term: torch.as_tensor(term(rows)), what=f"its {field}")
        shape = value.shape
        target = by_key if field == "bias" and variant.bias_per_key else by_row
        if broadcasts(shape, target):
            continue
        if field == "bias" and broadcasts(shape, by_key):
            raise UserError(f"{name}: its bias differs between keys, so it needs bias_per_key=True")
        raise UserError(
            f"{name}: in a call of {heads} heads, {LENGTH} rows and {LENGTH} keys its {field} has "
            f"the shape {list(shape)}, which does not broadcast against {list(target)}, as rows.n "
            "and rows.head do"
        )


def broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    """Tell whether a tensor of this shape can be expanded to the target's."""
    try:
        torch.empty(shape).expand(target)  # torch.broadcast_shapes imports sympy: a second
    except RuntimeError:
        return False
    return True


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
    for window, first in ((None, 0), (3, 3)):  # `first`: the first key that the last row sees
        attention.window = window
        whole = attention.weights(q, k, context)
        if not torch.equal(whole, attention.weights(q, k, context)):
            return  # it draws random numbers
        for keys, queries in (
            (slice(4), slice(4)),  # without the last rows and keys
            (ALL, slice(3, None)),  # without the first rows
            (slice(first, None), slice(LENGTH - 1, None)),  # the last row with its keys alone
        ):
            block_context = context.select(queries=queries, keys=keys)
            block = call(name, attention.weights, q[:, :, queries], k[:, :, keys], block_context)
            check_weights(name, block, whole[:, :, queries, keys].shape)
            if not torch.allclose(block, whole[:, :, queries, keys], atol=1e-6):
                raise UserError(
                    f"{name}: a row's weights depend on the number of rows or keys in the call, as "
                    "of A.mean(-1) or A.shape[-1]; rows.n is the number of keys that a row sees"
                )


def check_parameters(name: str, weights: Tensor, leaves: Collection[Tensor]) -> None:
    """Raise UserError if the weights depend on a parameter that is not the module's.

    No optimizer would train it.
    """
    known = {id(x) for x in leaves}
    visited = set()
    nodes = [weights.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)  # of a node that accumulates a gradient
        if leaf is not None and id(leaf) not in known:
            raise UserError(
                f"{name}: its formulas use a parameter of the shape {list(leaf.shape)}, which no "
                "optimizer trains: name s or b (one per head) in `learnable`, or make a subclass "
                "of Attention (docs/variants.md)"
            )
        nodes += [child for child, _ in node.next_functions]


def check_gradients(
    name: str,
    variant: Variant,
    weights: Tensor,
    leaves: dict[str, Tensor],
) -> None:
    """Raise UserError if a tensor's gradient is nan or infinite, or a learned scalar has none.

    A run would stop at its first step, and blame the learning rate.
    """
    cause = "in the first row n is 1 and log n is 0"
    if variant.bias_per_key:
        cause = (
            "rows.q_idx - rows.kv_idx is negative for later keys and 0 for a row's own key; "
            "rows.distance() is 0 for both: take its log1p, not its log"
        )
    for key, x in leaves.items():
        (gradient,) = torch.autograd.grad(
            weights.square().sum(), x, retain_graph=True, allow_unused=True
        )
        for field in NAMES:
            if gradient is None and key in getattr(variant, field):
                raise UserError(f"{name}: no formula uses {key}, which `{field}` names")
        if gradient is not None and not gradient.isfinite().all():
            raise UserError(
                f"{name}: the gradient of its weights with respect to {key} is not finite; {cause}"
            )
