"""Softmax at any scale by torch's scaled_dot_product_attention: FlashAttention on CUDA."""

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import l2_normalise
from attention_paths.blocked import BLOCK_QUERIES, first_key
from attention_paths.reference import Context, ReferenceAttention


def sdpa(
    attention: ReferenceAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Context,
) -> Tensor:
    """The output [B, H, Lq, d] of `ReferenceAttention.forward`, for a variant that is softmax."""
    Lq, Lk = q.shape[2], k.shape[2]
    q, k, scale = scale_q_and_k(attention, q, k, v.dtype, context)
    has_window = attention.window is not None and attention.window < Lk
    # is_causal aligns the first query with the first key, but queries after a cache are the last
    follows_cache = 1 < Lq < Lk
    is_masked = has_window or follows_cache or context.document_positions is not None
    if q.shape[1] != k.shape[1] and not takes_groups(q, is_masked):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    if is_masked:
        return sdpa_masked(attention, q, k, v, scale, context)
    is_causal = True if Lq > 1 else False  # never torch.compile's symbolic bool
    is_grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=is_grouped,
    )


def scale_q_and_k(
    attention: ReferenceAttention,
    q: Tensor,
    k: Tensor,
    dtype: torch.dtype,
    context: Context,
) -> tuple[Tensor, Tensor, float]:
    """Return q and k in this dtype, and the scale: scores are scale * q k^T."""
    if attention.variant.l2_normalise:
        q, k = l2_normalise(q), l2_normalise(k)
    rows = attention.rows(q, k.shape[2], context)
    scale = rows.score_scale * attention.variant.scale(rows)
    # torch takes a single number, which must be positive
    if isinstance(scale, Tensor) or scale <= 0:
        q, scale = q * scale, 1.0
    return q.to(dtype), k.to(dtype), scale


def takes_groups(q: Tensor, is_masked: bool) -> bool:
    """Tell whether SDPA takes grouped keys for queries like q without holding all scores.

    On CUDA only FlashAttention does; it needs sm_80 (newer than a T4) and a 16-bit dtype, and takes
    no mask.
    """
    if not q.is_cuda:
        return True
    if is_masked:
        return False
    return q.dtype.itemsize == 2 and torch.cuda.get_device_capability(q.device) >= (8, 0)


def sdpa_masked(
    attention: ReferenceAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    context: Context,
) -> Tensor:
    """Compute softmax a block of queries at a time, with a mask over the keys of each block."""
    past = k.shape[2] - q.shape[2]
    is_grouped = q.shape[1] != k.shape[1]
    outputs = []
    for start in range(0, q.shape[2], BLOCK_QUERIES):
        block = q[:, :, start : start + BLOCK_QUERIES]
        first = first_key(past + start, attention.window)
        end = past + start + block.shape[2]
        block_k = k[:, :, first:end]
        block_v = v[:, :, first:end]
        block_context = context.select(queries=slice(start, start + BLOCK_QUERIES))
        mask = attention.rows(block, end - first, block_context).visible_mask()
        outputs.append(
            F.scaled_dot_product_attention(
                block, block_k, block_v, mask, scale=scale, enable_gqa=is_grouped
            )
        )
    return torch.cat(outputs, dim=2)
