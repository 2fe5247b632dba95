"""The fused kernels of the backward pass, in memory linear in L.

A tile's dz comes from dp_ij = dO'_i . v_j, where dO'_i = factor_i dO_i and delta_i = factor_i D_i:

    one stage    factor = gain     A = factor a         dz = (dp - delta) phi'(z)
    two stages   factor = p / W    A = factor t^p / p
                 dz = gain (t^(p-1) (dp - delta) - E / n) phi'(z)

In one stage delta has the sign of a, and without l1 there is none. dv sums a dO', or t^p dO' / p.
With the constant SLOPE in factor and in E, dz is the gradient of y.
"""

import triton
import triton.language as tl

from attention_paths.kernels import tiles
from attention_paths.kernels.phi import relu


@triton.jit
def backward_rows(
    DOUT, OUT, U, SCALED, ROWS, TERMS, DSINK, H, L, NUMBERS, F, C: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """dO', the TERMS of rows and, if there is a sink, each row's part of its gradient."""
    bh, rows = tl.program_id(0), tl.program_id(1) * M + tl.arange(0, M)
    b, h = bh // H, bh % H
    dout = tiles.load(tiles.head_of(DOUT, b, h), DOUT.strides[2], rows, L, C).to(tl.float32)
    out = tiles.load(tiles.own_head_of(OUT, b, h, H, L, C.D), H * C.D, rows, L, C).to(tl.float32)
    along = tl.sum(dout * out, 1)
    gain = tiles.saved(ROWS, tiles.GAIN, bh, rows, L)
    factor = C.SLOPE * (tiles.saved(ROWS, tiles.WEIGHT, bh, rows, L) if C.P > 0 else gain)
    if C.P > 0:
        u = tiles.load(tiles.own_head_of(U, b, h, H, L, C.D), H * C.D, rows, L, C).to(tl.float32)
        coupled = tiles.saved(ROWS, tiles.COUPLING, bh, rows, L) * (tl.sum(dout * u, 1) - along)
        coupled *= C.SLOPE
        tiles.save(TERMS, tiles.COUPLED, coupled, bh, rows, L)
    tiles.save(TERMS, tiles.DELTA, factor * along, bh, rows, L)
    if NUMBERS.sink is not None:  # dz of a key whose value is 0
        y = tl.zeros([M], tl.float32) + tl.load(NUMBERS.sink.data + h)
        if F.shift is not None:
            y += tiles.saved(ROWS, tiles.SHIFT, bh, rows, L)
        a, slope = F.phi(y)
        dz = -factor * along
        if C.P > 0:
            t = tiles.reweighted(a, gain, tiles.saved(ROWS, tiles.OFFSET, bh, rows, L))
            dz = (tiles.power_less_one(t, C) * dz - coupled) * gain
        tiles.save(DSINK, 0, dz * slope, bh, rows, L)
    dout = dout * factor[:, None]
    tiles.store(tiles.own_head_of(SCALED, b, h, H, L, C.D), H * C.D, rows, L, dout, C)


@triton.jit
def row_bias(NUMBERS, ROWS, b, h, bh, rows, L, AXIS: tl.constexpr, F):
    """The bias of rows and their shift, with a new axis for keys; None where both are missing."""
    bias = tiles.numbers_of(NUMBERS.bias, b, h, rows, L, AXIS)
    if F.shift is not None:
        shift = tl.expand_dims(tiles.saved(ROWS, tiles.SHIFT, bh, rows, L), AXIS)
        bias = shift if bias is None else shift + bias
    return bias


@triton.jit
def row_terms(ROWS, TERMS, bh, rows, L, AXIS: tl.constexpr, C: tl.constexpr):
    """The numbers of rows that the gradients of a tile need, with a new axis for the keys."""
    delta = tl.expand_dims(tiles.saved(TERMS, tiles.DELTA, bh, rows, L), AXIS)
    gain, offset, coupled, floor = delta, delta, delta, delta
    if C.P > 0:
        gain = tl.expand_dims(tiles.saved(ROWS, tiles.GAIN, bh, rows, L), AXIS)
        offset = tl.expand_dims(tiles.saved(ROWS, tiles.OFFSET, bh, rows, L), AXIS)
        coupled = tl.expand_dims(tiles.saved(TERMS, tiles.COUPLED, bh, rows, L), AXIS)
    if C.RECTIFIED:
        floor = tl.expand_dims(tl.exp2(tiles.saved(ROWS, tiles.SHIFT, bh, rows, L)), AXIS)
    return gain, offset, delta, coupled, floor


@triton.jit
def gradients(
    y, dp, bias, key_bias, terms, visible, NUMBERS, F, C: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """The weights of a tile without their factors, dz, and the gradient of the product."""
    gain, offset, delta, coupled, floor = terms
    y, cap_slope = tiles.argument(y, bias, key_bias, C)
    a, slope = F.phi(y)
    if C.P > 0:
        t = tiles.reweighted(a, gain, offset)
        u = tiles.power_less_one(t, C)
        A = u * t
        dz = (u * (dp - delta) - coupled) * slope * gain
    else:
        A = a
        if C.RECTIFIED:
            a = a - floor
            A = relu(a)[0]
            dp = tl.where(a > 0, dp, 0.0)
        if NUMBERS.gain is None:  # the gradient of sum |a|
            dp -= tl.where(a > 0, delta, tl.where(a < 0, -delta, 0.0)) if C.SIGNED else delta
        dz = dp * slope
    if MASKED:
        A, dz = tl.where(visible, A, 0.0), tl.where(visible, dz, 0.0)
    dy = dz if C.CAP is None else dz * cap_slope
    return A, dz, dy if C.SCALE == 1 else dy * C.SCALE


@triton.jit
def row_tiles(block, past, Lq, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, C: tl.constexpr):
    """For each part, the first row of its tiles and the end of its rows, for a block of keys."""
    begin = tl.maximum(block * BLOCK_N - past, 0) // BLOCK_M * BLOCK_M
    # the first block of rows that all see all of these keys, unless a window hides them
    full = tl.cdiv(tl.maximum(block * BLOCK_N + BLOCK_N - 1 - past, 0), BLOCK_M) * BLOCK_M
    whole, last = Lq, Lq
    if C.WINDOW is not None:
        end = block * BLOCK_N - past + C.WINDOW  # of the rows that see the first of these keys
        whole = tl.minimum(tl.maximum(end, 0) // BLOCK_M * BLOCK_M, Lq)
        last = tl.minimum(end + BLOCK_N - 1, Lq)
    return (full, whole), (begin, tl.minimum(full, last)), (tl.maximum(full, whole), last)


@triton.jit(do_not_specialize=tiles.UNSPECIALISED)
def backward_keys(
    Q, K, V, DOUT, ROWS, TERMS, DQ, DK, DV, DKEY_BIAS, H, GROUP, Lq, Lk, NUMBERS, F,
    C: tl.constexpr, ATOMIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, the gradient of its bias and, if ATOMIC, its part of dq.

    Tiles are [keys, rows].
    """
    bh, block = tl.program_id(0), tl.program_id(1)
    b, h, past = bh // H, bh % H, Lk - Lq
    dout_head = tiles.own_head_of(DOUT, b, h, H, Lq, C.D)
    dq_head = tiles.own_head_of(DQ, b, h, H, Lq, C.D)
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tiles.load(tiles.head_of(K, b, h // GROUP), K.strides[2], keys, Lk, C)
    v = tiles.load(tiles.head_of(V, b, h // GROUP), V.strides[2], keys, Lk, C)
    key_bias = tiles.numbers_of(NUMBERS.key_bias, b, h, keys, Lk, 1)
    parts = row_tiles(block, past, Lq, BLOCK_M, BLOCK_N, C)

    dk = tl.zeros(k.shape, tl.float32)
    dv = tl.zeros(k.shape, tl.float32)
    dkey_bias = tl.zeros([BLOCK_N], tl.float32)
    for PART in tl.static_range(2 if C.WINDOW is None else 3):
        for start in range(parts[PART][0], parts[PART][1], BLOCK_M):
            rows = start + tl.arange(0, BLOCK_M)
            q = tiles.load(tiles.head_of(Q, b, h), Q.strides[2], rows, Lq, C)
            dout = tiles.load(dout_head, H * C.D, rows, Lq, C)
            bias = row_bias(NUMBERS, ROWS, b, h, bh, rows, Lq, 0, F)
            terms = row_terms(ROWS, TERMS, bh, rows, Lq, 0, C)
            # 0 for rows that do not exist, whose y it could make infinite
            own = None if key_bias is None else tl.where((rows < Lq)[None, :], key_bias, 0.0)
            y = tl.dot(k, tl.trans(q), input_precision=C.PRECISION)
            dp = tl.dot(v, tl.trans(dout), input_precision=C.PRECISION)
            visible = tiles.visible_to(rows[None, :], keys[:, None], past, C)
            A, dz, dy = gradients(y, dp, bias, own, terms, visible, NUMBERS, F, C, PART > 0)
            if NUMBERS.key_bias is not None:
                dkey_bias += tl.sum(dz, 1)
            dv = tl.dot(A.to(dout.dtype), dout, dv, input_precision=C.PRECISION)
            dk = tl.dot(dy.to(q.dtype), q, dk, input_precision=C.PRECISION)
            if ATOMIC:
                dy = dy.to(k.dtype)
                # not dot(trans(dy), k): Triton before 3.7.1 miscompiles it for Hopper
                dq = tl.trans(tl.dot(tl.trans(k), dy, input_precision=C.PRECISION))
                at, inside = tiles.places(dq_head, H * C.D, rows, Lq, C)
                tl.atomic_add(at, dq, mask=inside, sem="relaxed")
    dv *= 1 / (C.SLOPE * (C.P if C.P > 0 else 1))
    tiles.store(tiles.own_head_of(DK, b, h, H, Lk, C.D), H * C.D, keys, Lk, dk, C)
    tiles.store(tiles.own_head_of(DV, b, h, H, Lk, C.D), H * C.D, keys, Lk, dv, C)
    if NUMBERS.key_bias is not None:
        tiles.save(DKEY_BIAS, 0, dkey_bias, bh, keys, Lk)


@triton.jit(do_not_specialize=tiles.UNSPECIALISED)
def backward_queries(
    Q, K, V, DOUT, ROWS, TERMS, DQ, DBIAS, H, GROUP, Lq, Lk, NUMBERS, F, C: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What the atomics would sum for dq, for a block of rows; the gradient of their bias."""
    bh, b, h, past, rows, q, k_head, v_head, parts = tiles.rows_and_keys(
        Q, K, V, H, GROUP, Lq, Lk, C, BLOCK_M, BLOCK_N
    )
    dout = tiles.load(tiles.own_head_of(DOUT, b, h, H, Lq, C.D), H * C.D, rows, Lq, C)
    bias = row_bias(NUMBERS, ROWS, b, h, bh, rows, Lq, 1, F)
    terms = row_terms(ROWS, TERMS, bh, rows, Lq, 1, C)

    dq = tl.zeros(q.shape, tl.float32)
    dbias = tl.zeros([BLOCK_M], tl.float32)
    for PART in tl.static_range(2 if C.WINDOW is None else 3):
        for start in range(parts[PART][0], parts[PART][1], BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            k = tiles.load(k_head, K.strides[2], keys, Lk, C)
            v = tiles.load(v_head, V.strides[2], keys, Lk, C)
            y = tl.dot(q, tl.trans(k), input_precision=C.PRECISION)
            dp = tl.dot(dout, tl.trans(v), input_precision=C.PRECISION)
            key_bias = tiles.numbers_of(NUMBERS.key_bias, b, h, keys, Lk, 0)
            visible = tiles.visible_to(rows[:, None], keys[None, :], past, C)
            _, dz, dy = gradients(y, dp, bias, key_bias, terms, visible, NUMBERS, F, C, PART > 0)
            dbias += tl.sum(dz, 1)
            dq = tl.dot(dy.to(k.dtype), k, dq, input_precision=C.PRECISION)
    tiles.store(tiles.own_head_of(DQ, b, h, H, Lq, C.D), H * C.D, rows, Lq, dq, C)
    if NUMBERS.bias is not None:
        tiles.save(DBIAS, 0, dbias, bh, rows, Lq)
