"""The reference a block of queries at a time: memory for one block's weights, on any device."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention_paths.reference import Context, Keys, ReferenceAttention

# At most BLOCK_QUERIES queries at a time, and as many heads and sequences as keep their scores
# within BLOCK_SCORES or, on a CPU, BLOCK_SCORES_CPU, which was the fastest there.
BLOCK_QUERIES = 128
BLOCK_SCORES = 2**25
BLOCK_SCORES_CPU = 2**21
# With more scores than this in a layer, the backward pass recomputes them instead of keeping them.
KEEP_SCORES = 2**22


class Tile(NamedTuple):
    """The size of a block."""

    queries: int
    heads: int
    sequences: int
    keys: int  # that a block may read


def choose_tile(layer: ReferenceAttention, q: Tensor, k: Tensor) -> Tile:
    """Return the largest block of queries like q [B, H, Lq, d] on keys like k [B, Hk, Lk, d]."""
    H = q.shape[1]
    queries = min(q.shape[2], BLOCK_QUERIES)
    keys = k.shape[2]
    if layer.window is not None:
        keys = min(keys, layer.window + queries - 1)
    scores = BLOCK_SCORES_CPU if q.is_cpu else BLOCK_SCORES
    matrices = max(1, scores // (queries * keys))
    heads = min(H, matrices)
    group = H // k.shape[1]
    if heads >= group:
        heads = heads // group * group  # whole groups
    else:
        while group % heads:  # equal shares of one group
            heads -= 1
    return Tile(queries, heads, sequences=max(1, matrices // H), keys=keys)


def blocked(
    layer: ReferenceAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Context,
) -> Tensor:
    """Return the output [B, H, Lq, d] of `ReferenceAttention.forward`.

    A block is a few queries of a few heads of a few sequences. It reads no keys beyond its last
    query, and none before the window of its first.
    """
    B, H, Lq, _ = q.shape
    tile = choose_tile(layer, q, k)
    compute = layer.output
    if torch.is_grad_enabled() and B * H * Lq * tile.keys > KEEP_SCORES:
        compute = partial(checkpoint, layer.output, use_reentrant=False)
    q, keys = layer.normalise_q_and_k(q, k)
    group = H // k.shape[1]
    by_sequence = []
    for b in range(0, B, tile.sequences):
        sequences = slice(b, b + tile.sequences)
        by_head = []
        for h in range(0, H, tile.heads):
            heads = slice(h, h + tile.heads)
            kv_heads = slice(h // group, -(-heads.stop // group))
            inverse_norm = keys.inverse_norm
            if inverse_norm is not None:
                inverse_norm = inverse_norm[sequences, heads]
            inputs = (
                q[sequences, heads],
                Keys(keys.k[sequences, kv_heads], inverse_norm),
                v[sequences, kv_heads],
                context.select(sequences, heads),
                heads,
            )
            by_head.append(by_query(compute, layer.window, *inputs))
        by_sequence.append(torch.cat(by_head, dim=1))
    return torch.cat(by_sequence)


def by_query(
    compute: Callable[..., Tensor],
    window: int | None,
    q: Tensor,
    keys: Keys,
    v: Tensor,
    context: Context,
    heads: slice,
) -> Tensor:
    """Return the output [b, h, Lq, d] of these heads, BLOCK_QUERIES queries at a time.

    Blocks are computed from the last to the first. The last block needs the most memory, which the
    others reuse. The keys of each block are a slice of the next block's keys, so that autograd pads
    their gradients only to that length.
    """
    past = keys.k.shape[2] - q.shape[2]
    k = keys.k
    end = q.shape[2]
    outputs = []
    for block in reversed(q.split(BLOCK_QUERIES, dim=2)):
        start = end - block.shape[2]
        first = first_key(past + start, window)
        last = past + end
        k = k[:, :, :last]
        v = v[:, :, :last]
        block_keys = Keys(k[:, :, first:], keys.inverse_norm)
        block_context = context.select(queries=slice(start, end), keys=slice(first, last))
        outputs.append(compute(block, block_keys, v[:, :, first:], block_context, heads))
        end = start
    return torch.cat(outputs[::-1], dim=2)


def first_key(position: int, window: int | None) -> int:
    """Return the first key that the query at a position sees."""
    if window is None:
        return 0
    return max(0, position + 1 - window)
