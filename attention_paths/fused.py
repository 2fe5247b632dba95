"""Calls the fused Triton kernels for a layer, or says why they cannot be used."""

from types import ModuleType

import torch
from torch import Tensor

from attention import Variant, l2_normalise, relu_power, shift_of, softpick
from attention_paths.reference import Context, ReferenceAttention

launch: ModuleType | None
try:
    from attention_paths.kernels import launch
except ImportError:  # Triton is for Linux and comes with torch's CUDA builds
    launch = None


def variant_unsupported_reason(variant: Variant, head_size: int) -> str | None:
    """Say why no machine's kernels can compute a variant at this head size; None if they can."""
    if variant.row_weights not in (None, softpick):
        return "its weights are functions of whole rows"
    if variant.norm is not None and (variant.learnable or variant.from_input):
        return "its norm may be learned"
    is_softpick = variant.row_weights is softpick
    if variant.phi.kernel is None or is_softpick != (variant.phi.kernel == "softpick"):
        return "its phi has no kernel in attention_paths.kernels.phi.PHIS"
    if variant.reweight is not relu_power:
        return "its re-weighting is not LSSAR's"
    if variant.bias_per_key:
        return "its bias differs between keys"
    if head_size > 128:
        return f"head size {head_size} is above 128"
    return None


def gpu_unsupported_reason(q: Tensor) -> str | None:
    """Say why q is not on an NVIDIA GPU of compute capability 8.0 or newer; None if it is."""
    if not q.is_cuda:
        return f"it needs an NVIDIA GPU, and this is {q.device.type}"
    if torch.version.hip is not None:  # AMD's GPUs are cuda devices too
        return "it needs an NVIDIA GPU, and this is an AMD GPU"
    gpu = torch.cuda.get_device_properties(q.device)  # torch.compile takes it as a constant
    if gpu.major < 8:
        return f"it needs compute capability 8.0 or newer, and this is {gpu.major}.{gpu.minor}"
    return None


def unsupported_reason(attention: ReferenceAttention, q: Tensor) -> str | None:
    """Say why the kernels cannot take queries like q; None if they can."""
    if reason := variant_unsupported_reason(attention.variant, attention.head_size):
        return reason
    if launch is None:
        return "Triton is not installed"
    if q.is_cuda or not launch.INTERPRETED:
        if reason := gpu_unsupported_reason(q):
            return reason
    if q.dtype in (torch.float16, torch.float64):
        return f"it computes in bfloat16 and float32, not in {q.dtype}"
    if q.shape[1] * q.shape[2] * q.shape[3] >= 2**31:  # offsets within a sequence have 32 bits
        return "a sequence of its output has 2^31 numbers or more"
    return None


def fused(
    attention: ReferenceAttention, q: Tensor, k: Tensor, v: Tensor, context: Context
) -> Tensor:
    """The output [B, H, Lq, d] of `ReferenceAttention.forward`, by the kernels."""
    assert launch is not None
    variant = attention.variant
    # the kernels work on y = entry.argument z and return entry.value phi(z): see launch.py
    entry = launch.PHIS[variant.phi.kernel]
    rows = attention.rows(q, k.shape[2], context)
    save = torch.is_grad_enabled()
    decodes = q.shape[2] == 1 and not save

    def per_row(x: Tensor | float) -> Tensor:  # [B, H, Lq]
        if not isinstance(x, Tensor):
            x = rows.n.new_full((), x)
        return x.to(rows.n.dtype).expand(*q.shape[:3], 1)[..., 0]

    scale = entry.argument * rows.score_scale * variant.scale(rows)
    if variant.l2_normalise:
        q = l2_normalise(q)
        if not decodes:
            k = l2_normalise(k)
    # one multiplication a row, not one a score; but where phi has a kink, the rounding of q * scale
    # could move a score over it
    if isinstance(scale, Tensor) or entry.smooth:
        q = q * scale
        scale = 1.0
    bias = None
    if variant.bias is not None:
        bias = entry.argument * per_row(variant.bias(rows))
    decay = rows.cumulative_log_forget
    if rows.slopes is not None:
        # ALiBi is a forget gate with log f = -slope at every key. The sums of log f are counted
        # back from the last key, so that their rounding is smallest near it.
        distance = rows.q_idx[-1] - rows.kv_idx  # [Lk]
        alibi = (rows.slopes * distance)[:, 0]  # [H, Lk]
        alibi = alibi.expand(*q.shape[:2], -1)  # [B, H, Lk]
        decay = alibi if decay is None else decay + alibi
    key_bias = None
    if decay is not None:
        decay = entry.argument * decay
        key_bias = -decay
        query_decay = decay[:, :, -q.shape[2] :]
        if variant.is_softmax and attention.p is None and not attention.has_sink:
            # a constant added to all scores of a row does not change softmax: its gradient is 0
            query_decay = query_decay.detach()
        bias = query_decay if bias is None else query_decay + bias
    gain = None
    if variant.norm is not None:
        gain = per_row(1 / (entry.value * variant.norm(rows)))
    sink = None
    if rows.sink is not None:
        sink = entry.argument * rows.sink[:, 0, 0]
    first_key = None
    if rows.document_positions is not None:
        first_key = (rows.q_idx - rows.document_positions).clamp_min(0).int()  # [B, 1, Lq, 1]
        first_key = first_key.expand(*q.shape[:3], 1)[..., 0]
    window = attention.window
    if window is not None and window >= k.shape[2]:
        window = None
    out, _, _ = launch.forward(
        q=q.to(v.dtype),
        k=k.to(v.dtype),
        v=v,
        bias=bias,
        gain=gain,
        sink=sink,
        key_bias=key_bias,
        first_key=first_key,
        save=save,
        phi=variant.phi.kernel,
        p=float(attention.p or 0),
        scale=scale,
        shifted=entry.rectified or shift_of(variant, rows) is not None,
        signed=variant.phi.signed,
        window=window,
        softcap=attention.softcap,
        unit=variant.l2_normalise and decodes,
    )
    return out
