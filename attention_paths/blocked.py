"""The reference a block of queries at a time: memory for one block's weights, on any device."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention_paths.reference import ALL, Context, Keys, ReferenceAttention

# A block has all heads of one or more sequences, and at most BLOCK_QUERIES queries. Its scores are
# within BLOCK_SCORES or, on a CPU, BLOCK_SCORES_CPU, which was the fastest there. Only a block of
# FEWEST_QUERIES may have more: with very many keys it is not made smaller.
BLOCK_QUERIES = 128
FEWEST_QUERIES = 32
BLOCK_SCORES = 2**25
BLOCK_SCORES_CPU = 2**21
# With more scores than this in a layer, the backward pass recomputes them instead of keeping them.
KEEP_SCORES = 2**22


class Block(NamedTuple):
    """The size of a block."""

    queries: int
    sequences: int
    keys: int  # that it may read


def choose_block(attention: ReferenceAttention, q: Tensor, k: Tensor) -> Block:
    """Return the largest block of queries like q [B, H, Lq, d] on keys like k [B, Hk, Lk, d]."""
    _, H, Lq, _ = q.shape
    keys = k.shape[2]
    if attention.window is not None:
        keys = min(keys, attention.window + min(Lq, BLOCK_QUERIES) - 1)
    scores = BLOCK_SCORES_CPU if q.is_cpu else BLOCK_SCORES
    fitting = max(FEWEST_QUERIES, scores // (H * keys))
    queries = min(Lq, BLOCK_QUERIES, fitting)
    sequences = max(1, scores // (H * queries * keys))
    return Block(queries, sequences, keys)


def blocked(
    attention: ReferenceAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Context,
) -> Tensor:
    """Return the output [B, H, Lq, d] of `ReferenceAttention.forward`.

    A block is a few queries of a few sequences. It reads no keys after its last query's position,
    and none before its first query's window.
    """
    B, H, Lq, _ = q.shape
    block = choose_block(attention, q, k)
    compute = attention.output
    if torch.is_grad_enabled() and B * H * Lq * block.keys > KEEP_SCORES:
        compute = partial(checkpoint, attention.output, use_reentrant=False)
    q, keys = attention.normalise_q_and_k(q, k)
    outputs = []
    for b in range(0, B, block.sequences):
        sequences = slice(b, b + block.sequences)
        outputs.append(
            by_query(
                compute,
                attention.window,
                block.queries,
                q[sequences],
                keys.select(sequences, ALL),
                v[sequences],
                context.select(sequences),
            )
        )
    return torch.cat(outputs)


def by_query(
    compute: Callable[..., Tensor],
    window: int | None,
    queries: int,
    q: Tensor,
    keys: Keys,
    v: Tensor,
    context: Context,
) -> Tensor:
    """Return the output [b, H, Lq, d], `queries` queries at a time.

    Blocks are computed from the last to the first. The last block needs the most memory, which the
    others reuse. The keys of each block are a slice of the next block's keys, so that autograd pads
    their gradients only to that length.
    """
    past = keys.k.shape[2] - q.shape[2]
    end = q.shape[2]
    outputs = []
    for block in reversed(q.split(queries, dim=2)):
        start = end - block.shape[2]
        first = first_key(past + start, window)
        last = past + end
        keys = keys.select(ALL, slice(last))
        v = v[:, :, :last]
        block_keys = keys.select(ALL, slice(first, None))
        block_context = context.select(queries=slice(start, end), keys=slice(first, last))
        outputs.append(compute(block, block_keys, v[:, :, first:], block_context))
        end = start
    return torch.cat(outputs[::-1], dim=2)


def first_key(position: int, window: int | None) -> int:
    """Return the first key that the query at a position sees."""
    if window is None:
        return 0
    return max(0, position + 1 - window)
