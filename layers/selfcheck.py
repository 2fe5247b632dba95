"""A check of attention's kernels on this machine, before a run or an evaluation uses them."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention_paths.fused import launch, unsupported_reason
from attention_paths.module import Attention
from attention_paths.reference import Context
from attention_paths.varlen import varlen_unsupported_reason
from config import Config
from errors import UserError
from layers.documents import positions_in_documents
from runtime.distributed import all_reduce_max

# Tolerance of relative errors: (8 + p) roundings of bfloat16, four times what correct kernels show,
# also for float32 inputs in TF32. A wrong sign, scale, index or mask gives 0.2 to 2.
ROUNDING = 2.0**-7
LARGEST_TOLERANCE = 0.18
# Numbers of queries. ODD is not a multiple of a tile: on a GPU it is three tiles of 128 keys and a
# partial tile. EVEN is a multiple of 16, as most training lengths are: Triton specialises for it.
ODD, EVEN = (37, 32) if launch is None or launch.INTERPRETED else (3 * 128 + 77, 512)
# The largest window that is checked, in place of a larger one.
WIDEST_WINDOW = 4096
# Keys that exceed any window.
MANY_KEYS = 2**30


def check_kernels(
    model: nn.Module,
    config: Config,
    dtype: torch.dtype,
    say: Callable[[str], None] | None = None,
    within_documents: bool = False,
) -> dict[str, Any]:
    """Check the kernels of a model's attention; return what environment.json records about them.

    If the path is 'triton' or 'varlen', the kernels are compared with the float32 reference in one
    module of each kind: forward, backward and for a single query. If they differ or fail on any
    rank, the model falls back to 'blocked' or, with attention_impl = 'triton', UserError is raised.
    An out-of-memory or CUDA error is not caught.

    `say` reports the path. `within_documents`: attention stays within documents, as it always does
    with document_mask.
    """
    within_documents = within_documents or config.document_mask
    # the path depends on the presence, dtype and shape of these tensors, not on their values
    q = torch.empty(1, 1, 1, 1, device=next(model.parameters()).device, dtype=dtype)
    context = Context(
        log_forget=q[..., 0] if config.forget else None,
        document_positions=q[0, 0] if within_documents else None,
    )
    queries = q.expand(1, 1, MANY_KEYS, 1)  # takes no memory
    by_path = attentions_by_path(model, queries, context)
    checked = by_path.get("triton", []) + by_path.get("varlen", [])
    error, problem = check_paths(by_path, config, q, within_documents)
    facts: dict[str, Any] = {}
    accuracy = ""
    # called on every rank: the ranks' GPUs, and so their paths, may differ
    if all_reduce_max(problem != ""):
        problem = f"the kernels fail: {problem or 'on another rank'}"
        if config.attention_impl == "triton":
            raise UserError(f"attention_impl = 'triton': {problem}; 'auto' takes another path")
        print(f"warning: {problem}; attention_impl = 'blocked' takes their place", file=sys.stderr)
        for attention in checked:
            attention.impl = "blocked"
        by_path = attentions_by_path(model, queries, context)
        facts["problem"] = problem
    elif checked:
        facts["largest_error"] = error
        accuracy = f", its kernels within {error:.1e} of the reference"
    facts["attention_path"] = " and ".join(sorted(by_path))
    if say is not None:
        why_slower = why_not_faster(by_path, queries, context)
        say(f"attention path: {facts['attention_path']}{why_slower}{accuracy}")
    return facts


def attentions_by_path(
    model: nn.Module, queries: Tensor, context: Context
) -> dict[str, list[Attention]]:
    """Return the attention modules that take each path."""
    by_path: dict[str, list[Attention]] = {}
    for module in model.modules():
        if isinstance(module, Attention):
            path = module.path(queries, MANY_KEYS, context)
            by_path.setdefault(path, []).append(module)
    return by_path


def check_paths(
    by_path: dict[str, list[Attention]],
    config: Config,
    q: Tensor,
    within_documents: bool,
) -> tuple[float, str]:
    """Check a module of each kind; return the largest error, and the first problem, "" if none."""
    kinds = {}
    for path in ("triton", "varlen"):
        for attention in by_path.get(path, []):
            kind = (attention.variant, attention.p, attention.window, attention.alibi_heads)
            kinds[path, *kind] = attention
    errors = [0.0]
    problems = [""]
    for (path, *_), attention in kinds.items():
        error, problem = check_module(attention, config, q, within_documents, path == "varlen")
        errors.append(error)
        problems.append(problem)
    return max(errors), next(filter(None, problems), "")


def why_not_faster(by_path: dict[str, list[Attention]], queries: Tensor, context: Context) -> str:
    """Say why modules do not take a faster path: " (not triton: this is cpu)"; "" if all do."""
    texts = []
    why_not: str | None
    for path, attentions in by_path.items():
        for attention in attentions:
            if path == "blocked" and attention.impl == "auto":
                why_not = unsupported_reason(attention, queries) or "this is cpu"
                texts.append(f" (not triton: {why_not})")
            elif path != "varlen" and attention.prefers_varlen(queries, MANY_KEYS, context):
                why_not = varlen_unsupported_reason(attention, queries, MANY_KEYS)
                texts.append(f" (not varlen: {why_not})")
    return "".join(dict.fromkeys(texts))


def check_module(
    attention: Attention,
    config: Config,
    q: Tensor,
    within_documents: bool,
    by_varlen: bool,
) -> tuple[float, str]:
    """Compare a module's kernels in q's dtype; return the largest error, and the problem or ""."""
    window = attention.window
    try:
        if window is not None:  # the reference holds all scores of the keys in a window
            attention.window = min(window, WIDEST_WINDOW)
        errors = relative_errors(attention, config, q, within_documents)
        if by_varlen and window is not None and window > EVEN // 2:
            # varlen_attn needs as many queries as keys: a smaller window hides some of EVEN keys
            attention.window = EVEN // 2
            errors |= relative_errors(attention, config, q, within_documents)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # another path would take more memory; a CUDA error leaves no usable context
    except Exception as raised:  # whatever Triton raises
        # Triton reports CUDA's errors as RuntimeErrors, also those of an earlier kernel
        if "out of memory" in str(raised):
            raise
        if q.is_cuda:
            torch.cuda.synchronize(q.device)  # raises AcceleratorError if CUDA is unusable
        return math.inf, f"{type(raised).__name__}: {' '.join(str(raised).split())}"
    finally:
        attention.window = window
    for name, error in errors.items():
        if not error <= min((8 + (attention.p or 0)) * ROUNDING, LARGEST_TOLERANCE):  # nan, too
            return error, f"{name} differs from the reference by {error:.2g} of its size"
    return max(errors.values()), ""


def relative_errors(
    attention: Attention,
    config: Config,
    q: Tensor,
    within_documents: bool,
) -> dict[str, float]:
    """Return the relative errors of the kernels for two lengths, ODD and EVEN.

    With a window, also for ODD queries after `window` more keys, some of which it hides. Of four
    documents, one is a single token.
    """
    errors = {}
    impl = attention.impl
    heads = attention.n_head
    groups = heads // (config.n_head // config.kv_heads)
    g = torch.Generator().manual_seed(0)
    for queries, keys in sorted({(EVEN, EVEN), (ODD, ODD), (ODD, ODD + (attention.window or 0))}):
        shapes = [(heads, queries), (groups, keys), (groups, keys), (heads, queries)]
        tensors = [
            torch.randn(1, *shape, attention.head_size, generator=g).to(q) for shape in shapes
        ]
        gates = F.logsigmoid(2 + torch.randn(1, heads, keys, generator=g)).to(q.device)
        context = Context(log_forget=gates if config.forget else None)
        if within_documents:
            is_start = torch.zeros(1, keys, dtype=torch.bool, device=q.device)
            is_start[0, [keys // 7, keys // 7 + 1, keys // 2]] = True
            positions = positions_in_documents(is_start)[:, keys - queries :]
            context = replace(context, document_positions=positions)
        described = f"{keys} keys"
        if attention.window is not None:
            described += f" and a window of {attention.window}"
        computed = evaluate(attention, tensors, context)
        attention.impl = "reference"
        exact = evaluate(attention, [x.float() for x in tensors], context)
        attention.impl = impl
        for name, value in computed.items():
            # sharp weights make gradients nearly 0: their errors are relative to the output's
            size = max(exact[name].norm(), 1e-3 * tensors[3].float().norm())
            error = (value.float() - exact[name]).norm() / size
            errors[f"{name} with {described}"] = float(error)
    return errors


def evaluate(
    attention: Attention,
    tensors: list[Tensor],
    context: Context,
) -> dict[str, Tensor]:
    """Return the output, the last query's output, and the gradients of inputs and parameters.

    `tensors` are q, k, v and the gradient of the output.
    """
    q, k, v, gradient = tensors
    learned = {"q": q, "k": k, "v": v, **dict(attention.named_parameters())}
    if context.log_forget is not None:
        learned["gates"] = context.log_forget
    for x in learned.values():
        x.requires_grad_()
    out = attention(q, k, v, context)
    gradients = torch.autograd.grad(out, list(learned.values()), gradient)
    with torch.no_grad():
        last = attention(q[:, :, -1:], k, v, context.select(queries=slice(-1, None)))
    names = ("output", "last output", *(f"gradient of {name}" for name in learned))
    return dict(zip(names, (out.detach(), last, *gradients), strict=True))
