"""The fused kernels for a single query against a long cache.

The cache is split into chunks, so that even one sequence fills the GPU. decode_scores computes the
scores of a chunk and its part of the row's sum and maximum, decode_values its part of the output.
"""

import triton
import triton.language as tl

from attention_paths.kernels import tiles
from attention_paths.kernels.phi import relu


@triton.jit
def decode_scores(
    Q, K, Y, PARTS, H, GROUP, Lk, chunk, NUMBERS, F, C: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """y of a chunk of the cache, and the chunk's maximum of y, sum of |phi|, and maximum of phi."""
    bh, split = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    k_head, Y = tiles.head_of(K, b, h // GROUP), Y + bh.to(tl.int64) * Lk
    one = tl.arange(0, 1)
    q = tiles.load(tiles.head_of(Q, b, h), 0, one, 1, C).to(tl.float32)  # [1, d]
    bias = tiles.numbers_of(NUMBERS.bias, b, h, one, 1, 1)
    total, a_max = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    y_max = tl.full([1], -float("inf"), tl.float32)
    end = tl.minimum(split * chunk + chunk, Lk)
    for start in tl.range(split * chunk, end, BLOCK_N, num_stages=3):
        keys = start + tl.arange(0, BLOCK_N)
        k = tiles.load(k_head, K.strides[2], keys, Lk, C).to(tl.float32)
        y = tl.sum(k * q, 1)
        if C.UNIT:  # as in attention.l2_normalise
            y = y * tl.rsqrt(tl.sum(k * k, 1) + 1e-12)
        key_bias = tiles.numbers_of(NUMBERS.key_bias, b, h, keys, Lk, 0)
        y = tiles.argument(y[None, :], bias, key_bias, C)[0]
        visible = (keys < Lk)[None, :]
        tl.store(Y + keys[None, :], y, mask=visible)
        if F.shift is not None:
            y, y_max, rescale = tiles.shifted(y, y_max, visible, F, True)
            total, a_max = total * rescale, a_max * rescale
        a = F.phi(y)[0]
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
    V, Y, PARTS, SUMS, H, GROUP, Lk, chunk, NUMBERS, F, C: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
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
    if NUMBERS.sink is not None:
        y_sink = tl.load(NUMBERS.sink.data + h)
    if F.shift is not None:
        y_max = tl.load(PARTS, mask=exists, other=-float("inf"))
        y_top = tl.max(y_max, 0)
        shift = F.shift(tl.maximum(y_top, y_sink) if NUMBERS.sink is not None else y_top)
        rescale = tl.exp2(shift - F.shift(y_max))
        total, a_max = total * rescale, a_max * rescale
    total, a_max = tl.sum(total, 0), tl.max(a_max, 0)
    a_sink = F.phi(y_sink + shift)[0]
    if NUMBERS.sink is not None:
        total, a_max = total + a_sink, tl.maximum(a_max, a_sink)
    gain, offset, top = tiles.second_stage(total, a_max, Lk.to(tl.float32))
    if NUMBERS.gain is not None:
        gain = tl.load(tiles.head_of(NUMBERS.gain, b, h))
    elif C.P == 0:
        gain = tl.where(total <= tiles.DEAD, 0.0, 1 / total)
    acc, total_w = tl.arange(0, C.BLOCK_D) * 0.0, 0.0
    if C.P > 0 and NUMBERS.sink is not None:  # in the first chunk's sum alone
        t_sink = tiles.reweighted(a_sink, gain, offset)
        total_w += tl.where(split == 0, tiles.power_less_one(t_sink, C) * t_sink, 0.0)
    end = tl.minimum(split * chunk + chunk, Lk)
    for start in tl.range(split * chunk, end, BLOCK_N, num_stages=3):
        keys = start + tl.arange(0, BLOCK_N)
        a = F.phi(tl.load(Y + keys, mask=keys < Lk, other=0.0) + shift)[0]
        if C.RECTIFIED:
            a = relu(a - tl.exp2(shift))[0]
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
    columns = tl.arange(0, C.BLOCK_D)
    SUMS += (bh.to(tl.int64) * tl.num_programs(1) + split) * (C.D + 1)
    tl.store(SUMS + columns, acc, mask=columns < C.D)
    tl.store(SUMS + C.D, total_w)
