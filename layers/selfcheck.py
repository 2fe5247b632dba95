"""A check of the fused kernels on this machine, before a run or an evaluation uses them."""

import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_paths.module import Attention
from attention_paths.reference import Context
from config import Config
from errors import UserError, first_line
from layers.heads import build_parts

# The largest relative error, (8 + p) roundings of bfloat16, to which float32 inputs come close in
# TF32: four times that of sound kernels. A wrong sign, scale, index or mask makes it 0.2 to 2.
ROUNDING = 2.0**-7
QUERIES = 77  # no multiple of a tile


def check_kernels(
    config: Config,
    device: torch.device,
    dtype: torch.dtype,
    any_rank: Callable[[bool], bool] = bool,
    quiet: bool = False,
) -> tuple[Config, dict[str, Any]]:
    """The config with a path of attention that works here, and what environment.json records of it.

    If the config's attention takes the kernels, they compute it forward, backward and for a single
    query, and so does the reference in float32. If they differ, or the kernels raise, on any rank
    (`any_rank` tells whether its argument is true on one), the path becomes 'blocked'. Raises
    UserError instead if attention_impl = 'triton'.
    """
    q = torch.empty(1, 1, 1, 1, device=device, dtype=dtype)
    parts = [part.to(device) for part in build_parts(config) if part is not None]
    parts = [part for part in parts if part.path(q, sys.maxsize) == "triton"]
    if not parts:
        return config, {}
    largest, problem = 0.0, ""
    try:
        for part in parts:
            for name, error in errors(part, config, q).items():
                largest = max(largest, error)
                if not error <= (8 + (config.p or 0)) * ROUNDING:
                    problem = f"{name} differs from the reference by {error:.2g} of its size"
    except Exception as error:  # whatever Triton and CUDA raise
        problem = f"{kernel_of(error)}: {type(error).__name__}: {first_line(error)}"
    if not any_rank(bool(problem)):
        if not quiet:
            print(f"attention by the fused kernels, within {largest:.1e} of the reference")
        return config, {"attention_path": "triton", "largest_error": largest}
    problem = f"the fused kernels fail: {problem or 'on another rank'}"
    if config.attention_impl == "triton":
        raise UserError(f"attention_impl = 'triton': {problem}; 'auto' takes another path")
    print(f"{problem}; attention_impl = 'blocked' takes their place", file=sys.stderr)
    facts = {"attention_path": "blocked", "problem": problem}
    return config.replace(attention_impl="blocked"), facts


def errors(part: Attention, config: Config, q: Tensor) -> dict[str, float]:
    """Relative errors of the kernels, on the device and in the dtype of q, for two lengths.

    With a window, the last QUERIES queries follow so many keys that it hides some.
    """
    found, impl, g = {}, part.impl, torch.Generator().manual_seed(0)
    heads, groups = part.n_head, part.n_head if config.kv_heads == config.n_head else 1
    for keys in {QUERIES, QUERIES + (part.window or 0)}:
        tensors = [
            torch.randn(1, *shape, part.head_size, generator=g).to(q)
            for shape in ((heads, QUERIES), (groups, keys), (groups, keys), (heads, QUERIES))
        ]
        gates = F.logsigmoid(2 + torch.randn(1, heads, keys, generator=g)).to(q.device)
        log_forget = gates if config.forget else None
        ours = evaluate(part, tensors, log_forget)
        part.impl = "reference"
        exact = evaluate(part, [x.float() for x in tensors], log_forget)
        part.impl = impl
        for name, x in ours.items():
            # of gradients that are nearly 0, as of sharp weights, relative to the output's gradient
            size = max(exact[name].norm(), 1e-3 * tensors[3].float().norm())
            found[f"{name} with {keys} keys"] = float((x.float() - exact[name]).norm() / size)
    return found


def evaluate(
    part: Attention, tensors: list[Tensor], log_forget: Tensor | None
) -> dict[str, Tensor]:
    """The output for q, k, v, its gradients by all that is learnt, and the last query's output.

    The output's gradient follows q, k and v.
    """
    q, k, v, gradient = tensors
    learnt = {"q": q, "k": k, "v": v, **dict(part.named_parameters())}
    if log_forget is not None:
        learnt["gates"] = log_forget
    for x in learnt.values():
        x.requires_grad_()
    context = Context(log_forget=log_forget)
    out = part(q, k, v, context)
    gradients = torch.autograd.grad(out, list(learnt.values()), gradient)
    with torch.no_grad():
        last = part(q[:, :, -1:], k, v, context)
    names = ("output", "last output", *(f"gradient of {name}" for name in learnt))
    return dict(zip(names, (out.detach(), last, *gradients), strict=True))


def kernel_of(error: Exception) -> str:
    """The name of the kernel whose launch raised an error."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        caller: Any = frame.f_locals.get("self")
        if type(caller).__module__.startswith("triton.runtime") and hasattr(caller, "fn"):
            return caller.fn.__name__
    return "a kernel"
