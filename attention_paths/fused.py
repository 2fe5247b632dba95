"""The arguments of the fused Triton kernels for a layer, and why they cannot compute it."""

from types import ModuleType

import torch
from torch import Tensor

from attention import EXPM1, Variant, at_queries, l2_normalise, relu_power, shift_of
from attention_paths.reference import Context, ReferenceAttention

launch: ModuleType | None
try:
    from attention_paths.kernels import launch
except ImportError:  # Triton is for Linux and comes with torch's CUDA builds
    launch = None


def variant_obstacle(variant: Variant, head_size: int) -> str | None:
    """Why the kernels cannot compute a variant at this head size, on any machine."""
    if variant.row_weights is not None and variant.phi is not EXPM1:
        return "its weights are functions of whole rows"
    if variant.phi.kernel is None:
        return "its phi has no kernel in attention_paths.kernels.phi.PHIS"
    if variant.reweight is not relu_power:
        return "its re-weighting is not the paper's"
    if variant.keyed:
        return "its bias differs between keys"
    if head_size > 128:
        return f"head size {head_size} is above 128"
    return None


def obstacle(layer: ReferenceAttention, q: Tensor) -> str | None:
    """Why the kernels cannot take these queries; None if they can."""
    if reason := variant_obstacle(layer.variant, layer.head_size):
        return reason
    if launch is None:
        return "Triton is not installed"
    if not (q.is_cuda or launch.INTERPRETED):
        return f"it needs an NVIDIA GPU, and this is {q.device.type}"
    if torch.version.hip is not None:  # AMD's GPUs are cuda devices too
        return "it needs an NVIDIA GPU, and this is an AMD GPU"
    if q.is_cuda:
        gpu = torch.cuda.get_device_properties(q.device)  # torch.compile takes it as a constant
        if gpu.major < 8:
            return f"it needs compute capability 8.0 or newer, and this is {gpu.major}.{gpu.minor}"
    if q.dtype in (torch.float16, torch.float64):
        return f"it computes in bfloat16 and float32, not in {q.dtype}"
    return None


def fused(layer: ReferenceAttention, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    """The output [B, H, Lq, d] of `ReferenceAttention.forward`, by the kernels."""
    assert launch is not None
    variant, window = layer.variant, layer.window
    rows, entry = layer.rows(q, k.shape[2], context), launch.PHIS[variant.phi.kernel]
    gradients = torch.is_grad_enabled()
    decodes = q.shape[2] == 1 and not gradients

    def per_row(x: Tensor | float) -> Tensor:  # [B, H, Lq]
        x = x.to(rows.n.dtype) if isinstance(x, Tensor) else rows.n.new_full((), x)
        return x.expand(*q.shape[:3], 1)[..., 0]

    scale = entry.argument * context.score_scale * variant.scale(rows)
    if variant.l2_normalise:
        q, k = l2_normalise(q), k if decodes else l2_normalise(k)
    if isinstance(scale, Tensor) or entry.smooth:
        q, scale = q * scale, 1.0
    bias = None if variant.bias is None else entry.argument * per_row(variant.bias(rows))
    key_bias, decay = None, rows.decay
    if rows.slopes is not None:  # ALiBi is a constant forget gate, exact near the last key
        alibi = (rows.slopes * (rows.last[-1] - rows.keys))[:, 0].expand(*q.shape[:2], -1)
        decay = alibi if decay is None else decay + alibi
    if decay is not None:
        decay = entry.argument * decay
        own, key_bias = at_queries(decay, rows), -decay
        # softmax is the same for all scores of a row shifted alike: no gradient to compute
        shifts = variant.is_softmax and layer.p is None and not layer.has_sink
        bias = (own.detach() if shifts else own) + (0 if bias is None else bias)
    settings = dict(
        phi=variant.phi.kernel,
        p=float(layer.p or 0),
        scale=scale,
        # softpick, whose weights are of whole rows, is rectified, and always shifted
        shifted=variant.row_weights is not None or shift_of(variant, rows) is not None,
        signed=variant.phi.signed and variant.row_weights is None,
        window=window if window is not None and window < k.shape[2] else None,
        softcap=layer.softcap,
        unit=variant.l2_normalise and decodes,
        bias=bias,
        gain=None if variant.norm is None else per_row(1 / (entry.value * variant.norm(rows))),
        sink=None if rows.sink is None else entry.argument * rows.sink[:, 0, 0],
        key_bias=key_bias,
    )
    return launch.forward(q.to(v.dtype), k.to(v.dtype), v, save=gradients, **settings)[0]
