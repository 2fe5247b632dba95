"""Softmax at any scale within windows and documents, by torch's varlen_attn: FlashAttention.

varlen_attn attends within sequences of different lengths, concatenated in a single tensor: here the
documents of a batch.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from attention_paths.fused import gpu_unsupported_reason
from attention_paths.reference import Context, ReferenceAttention
from attention_paths.sdpa import scale_q_and_k

# FlashAttention's largest head.
LARGEST_HEAD = 256
# The shortest mean length, in tokens, of a batch's documents; FineWeb's mean is 690. It determines
# the number of sequences. That number is fixed, because torch.compile would recompile the model for
# another, and small, because FlashAttention launches thread blocks even for empty sequences.
SHORTEST_MEAN = 32
# A batch may have this many documents of any length: so few empty sequences cost little.
ALWAYS_ROOM = 1024


def varlen_unsupported_reason(attention: ReferenceAttention, q: Tensor, Lk: int) -> str | None:
    """Say why varlen_attn cannot take queries like q [B, H, Lq, d] of Lk keys; None if it can."""
    if reason := gpu_unsupported_reason(q):
        return reason
    if q.dtype.itemsize != 2:
        return f"it computes in 16 bits, not in {q.dtype}"
    if q.shape[2] != Lk:
        return "some keys are in a cache"
    if attention.head_size % 8 or attention.head_size > LARGEST_HEAD:
        return f"head size {attention.head_size} is not a multiple of 8 up to {LARGEST_HEAD}"
    if "window_size" not in varlen_parameters():
        return f"torch {torch.__version__} has no varlen_attn with windows"
    return None


def varlen_parameters() -> frozenset[str]:
    """The names of the parameters of torch's varlen_attn; none where torch has no varlen_attn."""
    try:
        # imported here because it loads _dynamo, which takes a second
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def varlen(
    attention: ReferenceAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Context,
) -> Tensor:
    """The output [B, H, L, d] of `ReferenceAttention.forward`, for a variant that is softmax."""
    from torch.nn.attention.varlen import varlen_attn

    B, H, L, d = q.shape
    q, k, scale = scale_q_and_k(attention, q, k, v.dtype, context)
    boundaries = sequence_boundaries(B, L, context.document_positions, q.device)
    reach = -1 if attention.window is None else attention.window - 1  # keys before a query's own
    grouped: dict[str, Any] = {}
    if k.shape[1] != H and "enable_gqa" in varlen_parameters():  # torch 2.11 needs no flag
        grouped["enable_gqa"] = True
    out = varlen_attn(
        packed(q),
        packed(k),
        packed(v),
        boundaries,
        boundaries,
        L,
        L,
        scale=scale,
        window_size=(reach, 0),
        **grouped,
    )
    assert isinstance(out, Tensor)  # a tuple where more is asked for
    return out.view(B, L, H, d).transpose(1, 2)


def packed(x: Tensor) -> Tensor:
    """Return [B, H, L, d] as [B L, H, d]."""
    return x.transpose(1, 2).flatten(0, 1)


def documents_at_most(B: int, L: int) -> int:
    """Return the number of documents that varlen_attn takes in B sequences of L tokens."""
    return min(B * L, max(B * L // SHORTEST_MEAN, ALWAYS_ROOM))


def sequence_boundaries(
    B: int,
    L: int,
    document_positions: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Return FlashAttention's cu_seqlens of B * L tokens: the sequences' starts, and the end.

    With `document_positions` [B, L], each document is a sequence, and empty sequences follow, so
    that the shape depends only on B and L. If there are more than ALWAYS_ROOM documents, of fewer
    than SHORTEST_MEAN tokens on average, an assertion fails on the device.
    """
    if document_positions is None:
        return torch.arange(0, B * L + 1, L, dtype=torch.int32, device=device)
    is_start = document_positions == 0
    is_start[:, 0] = True  # also where a document began earlier, among keys that a window hides
    is_start = is_start.flatten()
    most = documents_at_most(B, L)
    # a message or an index with a size would make torch.compile recompile for every length
    torch._assert_async(
        is_start.sum() <= most,
        f"a batch has more documents than varlen_attn has room for, which is {ALWAYS_ROOM} or, if "
        f"this is more, one for {SHORTEST_MEAN} tokens: attention_impl = 'triton' takes any number",
    )
    # start i goes to place i; tokens within a document to the last place, which is cut off
    place = torch.where(is_start, is_start.cumsum(0) - 1, most + 1).clamp_max(most + 1)
    boundaries = torch.full((most + 2,), B * L, dtype=torch.int32, device=device)
    token = torch.arange(B * L, dtype=torch.int32, device=device)
    return boundaries.scatter(0, place, token)[:-1]
