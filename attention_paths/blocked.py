"""The reference a block of queries at a time: memory for one block's weights, on any device."""

from functools import partial
from typing import Any

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


def blocked(layer: ReferenceAttention, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    """The output [B, H, Lq, d] of `ReferenceAttention.forward`.

    A block is some queries of some heads of some sequences. It reads no keys beyond its last query,
    and none before the window of its first.
    """
    (B, H, Lq, _), Lk, group = q.shape, k.shape[2], q.shape[1] // k.shape[1]
    queries = min(Lq, BLOCK_QUERIES)
    most = Lk if layer.window is None else min(Lk, layer.window + queries - 1)  # keys per block
    matrices = (BLOCK_SCORES_CPU if q.is_cpu else BLOCK_SCORES) // (queries * most)
    heads, sequences = min(H, max(1, matrices)), max(1, matrices // H)
    # whole groups, or equal parts of one
    heads = heads // group * group or max(n for n in range(1, heads + 1) if group % n == 0)
    recompute = torch.is_grad_enabled() and B * H * Lq * most > KEEP_SCORES
    q, keys = layer.normalise(q, k)

    def output(q: Tensor, k: Tensor, v: Tensor, inverse: Tensor | None, *more: Any) -> Tensor:
        return layer.output(q, Keys(k, inverse), v, *more)

    recomputed = partial(checkpoint, output, use_reentrant=False, preserve_rng_state=False)

    def of_heads(part: tuple[slice, slice]) -> Tensor:
        groups = part[0], slice(part[1].start // group, -(-part[1].stop // group))
        inverse = None if keys.inverse_norm is None else keys.inverse_norm[part]
        k, values, end, out = keys.k[groups], v[groups], Lq, []
        # The largest block first: the others then fit into the memory that it frees, and its keys
        # hold the keys of the others, so that gradients are padded to as many, not to all.
        for block in reversed(q[part].split(queries, dim=2)):
            start = end - block.shape[2]
            last = Lk - Lq + end
            first = first_key(Lk - Lq + start, layer.window)
            k, values = k[:, :, :last], values[:, :, :last]
            inputs = (
                block, k[:, :, first:], values[:, :, first:], inverse, part[1],
                context.part(part, slice(start, end), slice(first, last)),
            )  # fmt: skip
            out.append(recomputed(*inputs) if recompute else output(*inputs))
            end = start
        return torch.cat(out[::-1], dim=2)

    sequences_of = [slice(b, b + sequences) for b in range(0, B, sequences)]
    heads_of = [slice(h, h + heads) for h in range(0, H, heads)]
    return torch.cat([torch.cat([of_heads((b, h)) for h in heads_of], 1) for b in sequences_of])


def first_key(position: int, window: int | None) -> int:
    """The first key that the query at a position sees."""
    return 0 if window is None else max(0, position + 1 - window)
