"""The fused kernels of the backward pass, in memory linear in L.

backward_rows multiplies each row of dO by a factor, so that the loops over tiles need not:
dO'_i = factor_i dO_i, and delta_i = factor_i D_i. A tile's dp_ij = dO'_i . v_j gives dy, the
gradient of y, from which follows ds, the gradient of the product s_ij = q_i . k_j:

    one stage    factor = SLOPE gain     A = a      dy = (dp - sign(a) delta) phi'(z)
    two stages   factor = SLOPE p / W    A = t^p
                 dy = gain (t^(p-1) (dp - delta) - coupled) phi'(z)

The derivative of the kernels' phi with respect to y is SLOPE phi'(z). Without l1, delta is left
out. In two stages gain is gain_i / X_i of launch.py, and coupled is SLOPE X_i E_i / n_i. A is the
weight without its row's factor: dv_j is the sum of A_ij dO'_i over i, divided by SLOPE and, in two
stages, by p.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from attention_paths.kernels import tiles
from attention_paths.kernels.phi import relu


@triton.jit
def backward_rows(
    DOUT,
    OUT,
    U,
    SCALED,
    STATS,
    TERMS,
    DSINK,
    H,
    L,
    OPTIONAL,
    F,
    C: tl.constexpr,
    M: tl.constexpr,
):
    """dO', the TERMS of rows and, if there is a sink, what each row adds to its gradient."""
    head, index = tiles.program(H)
    rows = index * M + tl.arange(0, M)
    dout = tiles.load(tiles.matrix_of(DOUT, head.b, head.h), rows, L, C).to(tl.float32)
    out = tiles.load(tiles.matrix_of(OUT, head.b, head.h), rows, L, C).to(tl.float32)
    dout_dot_out = tl.sum(dout * out, 1)  # D_i
    gain = tiles.load_statistic(STATS, tiles.GAIN, head, rows, L)
    factor = C.SLOPE * gain
    if C.P > 0:
        factor = C.SLOPE * tiles.load_statistic(STATS, tiles.FACTOR, head, rows, L)
        u = tiles.load(tiles.matrix_of(U, head.b, head.h), rows, L, C).to(tl.float32)
        coupling = tiles.load_statistic(STATS, tiles.COUPLING, head, rows, L)
        coupled = coupling * (tl.sum(dout * u, 1) - dout_dot_out)
        coupled *= C.SLOPE
        tiles.store_statistic(TERMS, tiles.COUPLED, coupled, head, rows, L)
    tiles.store_statistic(TERMS, tiles.DELTA, factor * dout_dot_out, head, rows, L)
    if OPTIONAL.sink is not None:  # dy of a key whose value is 0
        y = tiles.sink_of(OPTIONAL.sink, head.h, M)
        if F.shift is not None:
            y += tiles.load_statistic(STATS, tiles.SHIFT, head, rows, L)
        a, slope = F.phi(y)
        dy = -factor * dout_dot_out
        if C.P > 0:
            offset = tiles.load_statistic(STATS, tiles.OFFSET, head, rows, L)
            t = tiles.reweighted(a, gain, offset)
            dy = (tiles.power_p_minus_1(t, C) * dy - coupled) * gain
        tiles.store_statistic(DSINK, 0, dy * slope, head, rows, L)
    dout = dout * factor[:, None]
    tiles.store(SCALED, head, rows, L, dout, C)


@triton.jit
def load_term(STATS, index, head, rows, L, AXIS):
    """A statistic of rows, with a new axis for the keys."""
    return tl.expand_dims(tiles.load_statistic(STATS, index, head, rows, L), AXIS)


@triton.jit
def row_bias(bias, STATS, head, rows, L, AXIS, F):
    """The bias of rows plus their shift, with a new axis for the keys; None if both are missing."""
    bias = tiles.load_optional(bias, head, rows, L, AXIS)
    if F.shift is not None:
        shift = load_term(STATS, tiles.SHIFT, head, rows, L, AXIS)
        bias = shift if bias is None else shift + bias
    return bias


class RowTerms(NamedTuple):
    """What the gradients of a tile take from its rows, with a new axis for the keys."""

    gain: tl.tensor
    offset: tl.tensor
    delta: tl.tensor
    coupled: tl.tensor
    floor: tl.tensor  # what RECTIFIED subtracts from phi


@triton.jit
def row_terms(STATS, TERMS, head, rows, L, AXIS, C):
    """The RowTerms of rows.

    Unused terms alias delta: Triton 3.6 cannot return a tuple with None.
    """
    delta = load_term(TERMS, tiles.DELTA, head, rows, L, AXIS)
    gain = delta
    offset = delta
    coupled = delta
    floor = delta
    if C.P > 0:
        gain = load_term(STATS, tiles.GAIN, head, rows, L, AXIS)
        offset = load_term(STATS, tiles.OFFSET, head, rows, L, AXIS)
        coupled = load_term(TERMS, tiles.COUPLED, head, rows, L, AXIS)
    if C.RECTIFIED:
        shift = tiles.load_statistic(STATS, tiles.SHIFT, head, rows, L)
        floor = tl.expand_dims(tl.exp2(shift), AXIS)
    return RowTerms(gain, offset, delta, coupled, floor)


@triton.jit
def gradients(s, dp, bias, key_bias, terms, visible, OPTIONAL, F, C, MASKED):
    """A, dy and ds of a tile, from its products s."""
    y, cap_slope = tiles.argument(s, bias, key_bias, C)
    a, slope = F.phi(y)
    if C.P > 0:
        t = tiles.reweighted(a, terms.gain, terms.offset)
        u = tiles.power_p_minus_1(t, C)
        A = u * t
        dy = (u * (dp - terms.delta) - terms.coupled) * slope * terms.gain
    else:
        A = a
        if C.RECTIFIED:
            a = a - terms.floor
            A = relu(a)[0]
            dp = tl.where(a > 0, dp, 0.0)
        if OPTIONAL.gain is None:  # the gradient of sum |a|
            if C.SIGNED:
                dp -= tl.where(a > 0, terms.delta, tl.where(a < 0, -terms.delta, 0.0))
            else:
                dp -= terms.delta
        dy = dp * slope
    if MASKED:
        A = tl.where(visible, A, 0.0)
        dy = tl.where(visible, dy, 0.0)
    ds = dy
    if C.CAP is not None:
        ds = dy * cap_slope
    if C.SCALE != 1:
        ds = ds * C.SCALE
    return A, dy, ds


@triton.jit
def row_spans(head, block, past, Lq, Lk, ROW_ENDS, C, M, N):
    """The spans of tiles of M rows, for a block of N keys."""
    begin = tl.maximum(block * N - past, 0) // M * M
    # the first block of rows that all see all of these keys, unless the edge hides some
    unmasked_begin = tl.cdiv(tl.maximum(block * N + N - 1 - past, 0), M) * M
    unmasked_end = Lq
    last = Lq
    if C.WINDOW is not None:
        end = block * N - past + C.WINDOW  # end of the rows that see the first key
        unmasked_end = tl.minimum(tl.maximum(end, 0) // M * M, Lq)
        last = tl.minimum(end + N - 1, Lq)
    if ROW_ENDS is not None:  # row ends of the first key and of the last key
        last_key = tl.minimum(block * N + N, Lk) - 1
        first_end = tiles.load_scalar(ROW_ENDS, head, block * N)
        unmasked_end = tl.minimum(unmasked_end, first_end // M * M)
        last = tl.minimum(last, tiles.load_scalar(ROW_ENDS, head, last_key))
    diagonal = (begin, tl.minimum(unmasked_begin, last))
    edge = (tl.maximum(unmasked_begin, unmasked_end), last)
    return (unmasked_begin, unmasked_end), diagonal, edge


@triton.jit(do_not_specialize=tiles.UNSPECIALISED)
def backward_keys(
    Q,
    K,
    V,
    DOUT,
    STATS,
    TERMS,
    DQ,
    DK,
    DV,
    DKEY_BIAS,
    ROW_ENDS,
    H,
    GROUP,
    Lq,
    Lk,
    OPTIONAL,
    F,
    C: tl.constexpr,
    ATOMIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dk and dv of a block of keys, the gradient of its bias and, if ATOMIC, what it adds to dq.

    Tiles are [keys, rows].
    """
    head, block = tiles.program(H)
    past = Lk - Lq
    dout_pointer = tiles.contiguous_matrix(DOUT, head, Lq, C).pointer
    dq_pointer = tiles.contiguous_matrix(DQ, head, Lq, C).pointer
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tiles.load(tiles.matrix_of(K, head.b, head.h // GROUP), keys, Lk, C)
    v = tiles.load(tiles.matrix_of(V, head.b, head.h // GROUP), keys, Lk, C)
    key_bias = tiles.load_optional(OPTIONAL.key_bias, head, keys, Lk, 1)
    spans = row_spans(head, block, past, Lq, Lk, ROW_ENDS, C, BLOCK_M, BLOCK_N)

    dk = tl.zeros(k.shape, tl.float32)
    dv = tl.zeros(k.shape, tl.float32)
    dkey_bias = tl.zeros([BLOCK_N], tl.float32)
    for SPAN in tl.static_range(3 if C.EDGE else 2):
        begin, end = spans[SPAN]
        for start in range(begin, end, BLOCK_M):
            rows = start + tl.arange(0, BLOCK_M)
            q = tiles.load(tiles.matrix_of(Q, head.b, head.h), rows, Lq, C)
            dout = tiles.load(tiles.Matrix(dout_pointer, H * C.D), rows, Lq, C)
            bias = row_bias(OPTIONAL.bias, STATS, head, rows, Lq, 0, F)
            terms = row_terms(STATS, TERMS, head, rows, Lq, 0, C)
            # 0 for rows past the end, where the bias could make y infinite
            tile_bias = key_bias
            if key_bias is not None:
                tile_bias = tl.where((rows < Lq)[None, :], key_bias, 0.0)
            s = tiles.dot(k, tl.trans(q), C)
            dp = tiles.dot(v, tl.trans(dout), C)
            first_key = tiles.load_optional(OPTIONAL.first_key, head, rows, Lq, 0)
            visible = tiles.visible_to(rows[None, :], keys[:, None], past, first_key, C)
            A, dy, ds = gradients(s, dp, bias, tile_bias, terms, visible, OPTIONAL, F, C, SPAN > 0)
            if OPTIONAL.key_bias is not None:
                dkey_bias += tl.sum(dy, 1)
            dv = tiles.dot(A.to(dout.dtype), dout, C, dv)
            dk = tiles.dot(ds.to(q.dtype), q, C, dk)
            if ATOMIC:
                ds = ds.to(k.dtype)
                # not dot(trans(ds), k): Triton before 3.7.1 miscompiles it for Hopper
                dq = tl.trans(tiles.dot(tl.trans(k), ds, C))
                dq_matrix = tiles.Matrix(dq_pointer, H * C.D)
                pointers, inside = tiles.pointers_to(dq_matrix, rows, Lq, C)
                tl.atomic_add(pointers, dq, mask=inside, sem="relaxed")
    dv *= 1 / (C.SLOPE * (C.P if C.P > 0 else 1))
    tiles.store(DK, head, keys, Lk, dk, C)
    tiles.store(DV, head, keys, Lk, dv, C)
    if OPTIONAL.key_bias is not None:
        tiles.store_statistic(DKEY_BIAS, 0, dkey_bias, head, keys, Lk)


@triton.jit(do_not_specialize=tiles.UNSPECIALISED)
def backward_queries(
    Q,
    K,
    V,
    DOUT,
    STATS,
    TERMS,
    DQ,
    DBIAS,
    H,
    GROUP,
    Lq,
    Lk,
    OPTIONAL,
    F,
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dq of a block of rows, which takes no atomics, and the gradient of the rows' bias."""
    block = tiles.row_block(Q, K, V, H, GROUP, Lq, Lk, OPTIONAL, C, BLOCK_M, BLOCK_N)
    head = block.head
    rows = block.rows
    dout = tiles.load(tiles.contiguous_matrix(DOUT, head, Lq, C), rows, Lq, C)
    bias = row_bias(OPTIONAL.bias, STATS, head, rows, Lq, 1, F)
    first_key = tiles.load_optional(OPTIONAL.first_key, head, rows, Lq, 1)
    terms = row_terms(STATS, TERMS, head, rows, Lq, 1, C)

    dq = tl.zeros(block.q.shape, tl.float32)
    dbias = tl.zeros([BLOCK_M], tl.float32)
    for SPAN in tl.static_range(3 if C.EDGE else 2):
        begin, end = block.spans[SPAN]
        for start in range(begin, end, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            k = tiles.load(block.k, keys, Lk, C)
            v = tiles.load(block.v, keys, Lk, C)
            s = tiles.dot(block.q, tl.trans(k), C)
            dp = tiles.dot(dout, tl.trans(v), C)
            key_bias = tiles.load_optional(OPTIONAL.key_bias, head, keys, Lk, 0)
            visible = tiles.visible_to(rows[:, None], keys[None, :], block.past, first_key, C)
            _, dy, ds = gradients(s, dp, bias, key_bias, terms, visible, OPTIONAL, F, C, SPAN > 0)
            dbias += tl.sum(dy, 1)
            dq = tiles.dot(ds.to(k.dtype), k, C, dq)
    tiles.store(DQ, head, rows, Lq, dq, C)
    if OPTIONAL.bias is not None:
        tiles.store_statistic(DBIAS, 0, dbias, head, rows, Lq)
