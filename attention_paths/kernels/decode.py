"""The fused kernels for a single query against a long cache.

The cache is split into chunks, so that even one sequence fills the GPU. decode_scores computes the
scores y of a chunk, their maximum, and the sum and the maximum of phi; decode_values computes what
the chunk adds to the output.
"""

import triton
import triton.language as tl

from attention_paths.kernels import tiles
from attention_paths.kernels.phi import relu


@triton.jit
def chunk_span(head, chunk, chunk_size, Lk, OPTIONAL, N):
    """The first position of a chunk's first tile of N keys, and the end of its positions."""
    begin = chunk * chunk_size
    end = tl.minimum(begin + chunk_size, Lk)
    if OPTIONAL.first_key is not None:
        begin = tl.maximum(begin, tiles.load_scalar(OPTIONAL.first_key, head, 0) // N * N)
    return begin, end


@triton.jit
def decode_scores(
    Q,
    K,
    Y,
    CHUNKS,
    H,
    GROUP,
    Lk,
    chunk_size,
    OPTIONAL,
    F,
    C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y of a chunk of the cache, and the chunk's maximum of y, sum of |phi|, and maximum of phi."""
    head, chunk = tiles.program(H)
    k_matrix = tiles.matrix_of(K, head.b, head.h // GROUP)
    Y = Y + head.bh.to(tl.int64) * Lk
    row = tl.arange(0, 1)
    q = tiles.load(tiles.matrix_of(Q, head.b, head.h), row, 1, C).to(tl.float32)  # [1, d]
    bias = tiles.load_optional(OPTIONAL.bias, head, row, 1, 1)
    total = tl.zeros([1], tl.float32)
    a_max = tl.zeros([1], tl.float32)
    y_max = tl.full([1], -float("inf"), tl.float32)
    begin, end = chunk_span(head, chunk, chunk_size, Lk, OPTIONAL, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N, num_stages=3):
        keys = start + tl.arange(0, BLOCK_N)
        k = tiles.load(k_matrix, keys, Lk, C).to(tl.float32)
        y = tl.sum(k * q, 1)
        if C.UNIT:  # as in attention.l2_normalise
            y = y * tl.rsqrt(tl.sum(k * k, 1) + 1e-12)
        key_bias = tiles.load_optional(OPTIONAL.key_bias, head, keys, Lk, 0)
        y = tiles.argument(y[None, :], bias, key_bias, C)[0]
        visible = (keys < Lk)[None, :]
        if OPTIONAL.first_key is not None:
            visible = visible & (keys >= tiles.load_scalar(OPTIONAL.first_key, head, 0))[None, :]
        tl.store(Y + keys[None, :], y, mask=visible)
        if F.shift is not None:
            y, y_max, rescale = tiles.shifted(y, y_max, visible, F, True)
            total = total * rescale
            a_max = a_max * rescale
        a = F.phi(y)[0]
        if C.RECTIFIED:
            a = a - tl.exp2(F.shift(y_max))[:, None]
        a = tl.where(visible, a, 0.0)
        total += tl.sum(tl.abs(a), 1)
        a_max = tl.maximum(a_max, tl.max(a, 1))
    CHUNKS += (head.bh.to(tl.int64) * tl.num_programs(1) + chunk) * 3 + row
    tl.store(CHUNKS, y_max)
    tl.store(CHUNKS + 1, total)
    tl.store(CHUNKS + 2, a_max)


@triton.jit(do_not_specialize=["Lk"])
def decode_values(
    V,
    Y,
    CHUNKS,
    SUMS,
    H,
    GROUP,
    Lk,
    chunk_size,
    OPTIONAL,
    F,
    C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
):
    """A chunk's sums of weighted values and of weights.

    Values whose weight is 0 or, in two stages, negligible are not read.
    """
    head, chunk = tiles.program(H)
    v_matrix = tiles.matrix_of(V, head.b, head.h // GROUP)
    Y = Y + head.bh.to(tl.int64) * Lk

    # ---- the row's shift and gain, combined over all chunks ----
    chunks = tl.arange(0, MAX_CHUNKS)
    exists = chunks < tl.num_programs(1)
    CHUNKS += head.bh.to(tl.int64) * tl.num_programs(1) * 3 + chunks * 3
    total = tl.load(CHUNKS + 1, mask=exists, other=0.0)
    a_max = tl.load(CHUNKS + 2, mask=exists, other=0.0)
    shift = 0.0
    y_sink = 0.0
    if OPTIONAL.sink is not None:
        y_sink = tl.load(OPTIONAL.sink.data + head.h)
    if F.shift is not None:
        y_max = tl.load(CHUNKS, mask=exists, other=-float("inf"))
        top = tl.max(y_max, 0)
        if OPTIONAL.sink is not None:
            top = tl.maximum(top, y_sink)
        shift = F.shift(top)
        rescale = tl.exp2(shift - F.shift(y_max))
        total = total * rescale
        a_max = a_max * rescale
    total = tl.sum(total, 0)
    a_max = tl.max(a_max, 0)
    a_sink = F.phi(y_sink + shift)[0]
    if OPTIONAL.sink is not None:
        total = total + a_sink
        a_max = tl.maximum(a_max, a_sink)
    n = Lk
    if OPTIONAL.first_key is not None:
        n -= tiles.load_scalar(OPTIONAL.first_key, head, 0)
    gain, offset, _ = tiles.second_stage(total, a_max, n.to(tl.float32))
    if OPTIONAL.gain is not None:
        gain = tiles.load_scalar(OPTIONAL.gain, head, 0)
    elif C.P == 0:
        gain = tl.where(total <= tiles.DEAD, 0.0, 1 / total)

    # ---- the chunk's sums ----
    acc = tl.arange(0, C.BLOCK_D) * 0.0
    total_w = 0.0
    if C.P > 0 and OPTIONAL.sink is not None:  # in the first chunk's sum alone
        t_sink = tiles.reweighted(a_sink, gain, offset)
        total_w += tl.where(chunk == 0, tiles.power_p_minus_1(t_sink, C) * t_sink, 0.0)
    begin, end = chunk_span(head, chunk, chunk_size, Lk, OPTIONAL, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N, num_stages=3):
        keys = start + tl.arange(0, BLOCK_N)
        a = F.phi(tl.load(Y + keys, mask=keys < Lk, other=0.0) + shift)[0]
        if C.RECTIFIED:
            a = relu(a - tl.exp2(shift))[0]
        if C.P > 0:
            t = tiles.reweighted(a, gain, offset)
            w = tiles.power_p_minus_1(t, C) * t + 0 * gain  # NaN for a gain of NaN
            # the row's sum is at least 1, so what is left out is below float32 rounding
            skip = w * Lk <= 2.0**-24
        else:
            w = gain * a
            skip = w == 0
        skip = skip | (keys >= Lk)
        if OPTIONAL.first_key is not None:
            skip = skip | (keys < tiles.load_scalar(OPTIONAL.first_key, head, 0))
        w = tl.where(skip, 0.0, w)
        total_w += tl.sum(w, 0)
        v = tiles.load(v_matrix, tl.where(skip, Lk, keys), Lk, C)
        acc += tl.sum(w[:, None] * v.to(tl.float32), 0)
    columns = tl.arange(0, C.BLOCK_D)
    SUMS += (head.bh.to(tl.int64) * tl.num_programs(1) + chunk) * (C.D + 1)
    tl.store(SUMS + columns, acc, mask=columns < C.D)
    tl.store(SUMS + C.D, total_w)
