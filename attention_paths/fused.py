"""The arguments of the fused Triton kernels for a layer, and why they cannot compute it."""

from types import ModuleType

import torch
from torch import Tensor

from attention import EXPM1, Variant, of_queries, relu_power, shift_of
from attention_paths.reference import Context, ReferenceAttention

launch: ModuleType | None
try:
    from attention_paths import launch
except ImportError:  # Triton is for Linux and comes with torch's CUDA builds
    launch = None


def variant_obstacle(variant: Variant, head_size: int) -> str | None:
    """Why the kernels cannot compute a variant at this head size, on any machine."""
    if variant.row_weights is not None and variant.phi is not EXPM1:
        return "its weights are functions of whole rows"
    if variant.phi.kernel is None or (launch and variant.phi.kernel not in launch.PHIS):
        return "its phi names no entry of attention_paths.phi.PHIS"
    if variant.reweight is not relu_power:
        return "its re-weighting is not the paper's"
    if variant.keyed:
        return "its bias differs between keys"
    if head_size > 128:
        return f"head size {head_size} is above 128"
    return None


def obstacle(layer: ReferenceAttention, q: Tensor) -> str | None:
    """Why the kernels cannot take these queries; None if they can."""
    reason = variant_obstacle(layer.variant, layer.head_size)
    if reason is not None:
        return reason
    if launch is None:
        return "Triton is not installed"
    if not (q.is_cuda or launch.INTERPRETED):
        return f"it needs an NVIDIA GPU, and this is {q.device.type}"
    if q.dtype == torch.float64:
        return "it does not compute in float64"
    return None


def fused(layer: ReferenceAttention, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    """The output [B, H, Lq, d] of `ReferenceAttention.forward`, by the kernels."""
    assert launch is not None
    variant, cut = layer.variant, layer.window is not None and layer.window < k.shape[2]
    rows = layer.rows(q, k.shape[2], slice(None), context)

    shape = q.shape[:3]

    def per_row(x: Tensor | float) -> Tensor:  # [B, H, Lq]
        x = x.to(rows.n.dtype) if isinstance(x, Tensor) else rows.n.new_full((), x)
        return x.expand(*shape, 1)[..., 0]

    bias = None if variant.bias is None else per_row(variant.bias(rows))
    key_bias, decay = None, rows.decay
    if rows.slopes is not None:  # ALiBi is a constant forget gate, exact near the last key
        alibi = (rows.slopes * (rows.last[-1] - rows.keys))[:, 0].expand(*shape[:2], -1)
        decay = alibi if decay is None else decay + alibi
    if decay is not None:
        own, key_bias = of_queries(decay, rows), -decay
        # softmax is the same for all scores of a row shifted alike: no gradient to compute
        shifts = variant.is_softmax and layer.p is None and not layer.has_sink
        bias = (own.detach() if shifts else own) + (0 if bias is None else bias)
    choices = launch.Choices(
        p=float(layer.p or 0),
        unit=variant.l2_normalise,
        phi=variant.phi.kernel,
        # softpick, whose weights are of whole rows, is rectified, and always shifted
        shifted=variant.row_weights is not None or shift_of(variant, rows) is not None,
        signed=variant.phi.signed and variant.row_weights is None,
        window=layer.window if cut else None,
        softcap=layer.softcap,
    )
    numbers = launch.Numbers(
        scale=per_row(context.score_scale * variant.scale(rows)),
        bias=bias,
        norm=None if variant.norm is None else per_row(variant.norm(rows)),
        sink=None if rows.sink is None else rows.sink[:, 0, 0].contiguous(),
        key_bias=key_bias,
    )
    return launch.attend(q.to(v.dtype), k.to(v.dtype), v, choices, numbers)
