"""The fused kernels for a single query against a long cache.

The cache is split into chunks, so that even one sequence fills the GPU. decode_scores computes the
scores of a chunk and its part of the row's sum and maximum, decode_values its part of the output,
and decode_sum adds these up.
"""

import triton
import triton.language as tl

from attention_paths import tiles
from attention_paths.phi import relu


@triton.jit
def decode_scores(
    Q, K, scale, bias, Y, PARTS, H, GROUP, Lk, chunk, ADDED, F, C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y of a chunk of the cache, and the chunk's maximum of y, sum of |phi|, and maximum of phi."""
    bh, split = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    k_head, Y = tiles.head_of(K, b, h // GROUP), Y + bh.to(tl.int64) * Lk
    one = tl.arange(0, 1)
    q = tiles.load(tiles.head_of(Q, b, h), 0, one, 1, C).to(tl.float32)  # [1, d]
    alpha = C.ARGUMENT * tl.load(scale + bh)
    beta = C.ARGUMENT * tl.load(bias + bh) if C.BIASED else 0.0
    if C.UNIT:
        q = q * tiles.inverse_norm(q)[:, None]
    total, a_max = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    y_max = tl.full([1], -float("inf"), tl.float32)
    end = tl.minimum(split * chunk + chunk, Lk)
    for start in tl.range(split * chunk, end, BLOCK_N, num_stages=3):
        keys = start + tl.arange(0, BLOCK_N)
        k = tiles.load(k_head, K.strides[2], keys, Lk, C).to(tl.float32)
        y = tl.sum(k * q, 1)
        if C.UNIT:
            y = y * tiles.inverse_norm(k)
        key_bias = (
            None if ADDED.key_bias is None else tiles.key_bias_of(ADDED, b, h, keys, Lk, 0, C)
        )
        y, _ = tiles.argument(y[None, :], alpha, beta, key_bias, C.BIASED, C)
        visible = (keys < Lk)[None, :]
        tl.store(Y + keys[None, :], y, mask=visible)
        if F.shift is not None:
            y, y_max, rescale = tiles.shifted(y, y_max, visible, F, True)
            total, a_max = total * rescale, a_max * rescale
        a = F.phi(y)
        if C.RECTIFIED:
            a = a - tl.exp2(F.shift(y_max))[:, None]
        a = tl.where(visible, a, 0.0)
        total += tl.sum(tl.abs(a), 1)
        a_max = tl.maximum(a_max, tl.max(a, 1))
    at = PARTS + (bh.to(tl.int64) * tl.num_programs(1) + split) * 3 + one
    tl.store(at, y_max)
    tl.store(at + 1, total)
    tl.store(at + 2, a_max)


@triton.jit(do_not_specialize=["Lk"])
def decode_values(
    V, Y, PARTS, norm, SUMS, H, GROUP, Lk, chunk, ADDED, F, C: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A chunk's sums of weighted values and of weights. Values of weight 0 are not read."""
    bh, split = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    v_head, Y = tiles.head_of(V, b, h // GROUP), Y + bh.to(tl.int64) * Lk
    splits = tl.arange(0, SPLITS)
    exists = splits < tl.num_programs(1)
    PARTS += bh.to(tl.int64) * tl.num_programs(1) * 3 + splits * 3
    total = tl.load(PARTS + 1, mask=exists, other=0.0)
    a_max = tl.load(PARTS + 2, mask=exists, other=0.0)
    shift, y_sink = 0.0, 0.0
    if ADDED.sink is not None:
        y_sink = C.ARGUMENT * tl.load(ADDED.sink + h)
    if F.shift is not None:
        y_max = tl.load(PARTS, mask=exists, other=-float("inf"))
        top = tl.max(y_max, 0)
        shift = F.shift(tl.maximum(top, y_sink) if ADDED.sink is not None else top)
        rescale = tl.exp2(shift - F.shift(y_max))
        total, a_max = total * rescale, a_max * rescale
    total, a_max = tl.sum(total, 0), tl.max(a_max, 0)
    a_sink = F.phi(y_sink + shift)
    if ADDED.sink is not None:
        total, a_max = total + a_sink, tl.maximum(a_max, a_sink)
    gain, offset, _ = tiles.second_stage(total, a_max, Lk.to(tl.float32))
    if C.P == 0:
        if C.L1:
            gain = tl.where(total <= tiles.DEAD, 0.0, 1 / total)
        else:
            gain = 1 / (C.VALUE * tl.load(norm + bh))
    acc, total_w = tl.arange(0, C.BLOCK_D) * 0.0, 0.0
    if C.P > 0 and ADDED.sink is not None:  # in the first chunk's sum alone
        t_sink = tiles.reweighted(a_sink, gain, offset)
        total_w += tl.where(split == 0, tiles.power_less_one(t_sink, C) * t_sink, 0.0)
    end = tl.minimum(split * chunk + chunk, Lk)
    for start in tl.range(split * chunk, end, BLOCK_N, num_stages=3):
        keys = start + tl.arange(0, BLOCK_N)
        a = F.phi(tl.load(Y + keys, mask=keys < Lk, other=0.0) + shift)
        if C.RECTIFIED:
            a = relu(a - tl.exp2(shift))
        if C.P > 0:
            t = tiles.reweighted(a, gain, offset)
            w = tiles.power_less_one(t, C) * t + 0 * gain  # NaN for a gain of NaN
            # the row's sum is at least 1, so what is left out is below float32 rounding
            skip = w * Lk <= 2.0**-24
        else:
            w = gain * a
            skip = w == 0
        skip = skip | (keys >= Lk)
        w = tl.where(skip, 0.0, w)
        total_w += tl.sum(w, 0)
        v = tiles.load(v_head, V.strides[2], tl.where(skip, Lk, keys), Lk, C)
        acc += tl.sum(w[:, None] * v.to(tl.float32), 0)
    SUMS += (bh.to(tl.int64) * tl.num_programs(1) + split) * (C.BLOCK_D + 1)
    tl.store(SUMS + tl.arange(0, C.BLOCK_D), acc)
    tl.store(SUMS + C.BLOCK_D, total_w)


@triton.jit
def decode_sum(SUMS, OUT, splits, C: tl.constexpr, SPLITS: tl.constexpr):
    """The output from the sums of all chunks."""
    bh, parts, columns = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, C.BLOCK_D)
    SUMS += bh.to(tl.int64) * splits * (C.BLOCK_D + 1)
    at, exists = SUMS + parts * (C.BLOCK_D + 1), parts < splits
    acc = tl.load(at[:, None] + columns[None, :], mask=exists[:, None], other=0.0)
    acc = tl.sum(acc, 0)
    if C.P > 0:
        total_w = tl.sum(tl.load(at + C.BLOCK_D, exists, 0.0), 0)
        acc *= tl.where(total_w <= 0, 0.0, 1 / total_w)
    at = OUT + bh.to(tl.int64) * C.D + columns
    tl.store(at, acc.to(OUT.dtype.element_ty), mask=columns < C.D)
