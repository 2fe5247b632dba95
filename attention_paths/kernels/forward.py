"""The fused kernels of the forward pass.

One stage reads the keys once. Two stages read them twice, because stage 2 needs the row's sum and
maximum of phi first. Two stages also save, for the backward pass, U_i = sum_j t_ij^(p-1) v_j / R_i
with R_i = sum_j t_ij^(p-1): see launch.py for the formulas.
"""

import triton
import triton.language as tl

from attention_paths.kernels import tiles
from attention_paths.kernels.phi import relu


@triton.jit
def tile_scores(block, keys, bias, OPTIONAL, Lk, C):
    """The argument y of phi for a tile [rows, keys]."""
    k = tiles.load(block.k, keys, Lk, C)
    y = tiles.dot(block.q, tl.trans(k), C)
    key_bias = tiles.load_optional(OPTIONAL.key_bias, block.head, keys, Lk, 0)
    return tiles.argument(y, bias, key_bias, C)[0]


@triton.jit
def visible_in(block, keys, first_key, C):
    return tiles.visible_to(block.rows[:, None], keys[None, :], block.past, first_key, C)


@triton.jit
def lowest_maximum(C, M):
    """The maximum of y of M rows that have seen no key."""
    lowest = tiles.NO_SCORE if C.EDGE else -float("inf")
    return tl.full([M], lowest, tl.float32)


@triton.jit(do_not_specialize=tiles.UNSPECIALISED)
def forward_one_stage(
    Q,
    K,
    V,
    OUT,
    STATS,
    H,
    GROUP,
    Lq,
    Lk,
    OPTIONAL,
    F,
    C: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The output of a block of rows and, if SAVE, their GAIN and SHIFT."""
    block = tiles.row_block(Q, K, V, H, GROUP, Lq, Lk, OPTIONAL, C, BLOCK_M, BLOCK_N)
    head = block.head
    rows = block.rows
    bias = tiles.load_optional(OPTIONAL.bias, head, rows, Lq, 1)
    first_key = tiles.load_optional(OPTIONAL.first_key, head, rows, Lq, 1)

    acc = tl.zeros(block.q.shape, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    y_max = lowest_maximum(C, BLOCK_M)
    if OPTIONAL.sink is not None:
        y_max = tiles.sink_of(OPTIONAL.sink, head.h, BLOCK_M)
        total = tiles.phi_of_maximum(y_max, F)
    for SPAN in tl.static_range(3 if C.EDGE else 2):
        begin, end = block.spans[SPAN]
        for start in range(begin, end, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            y = tile_scores(block, keys, bias, OPTIONAL, Lk, C)
            visible = visible_in(block, keys, first_key, C)
            if F.shift is not None:
                y, y_max, rescale = tiles.shifted(y, y_max, visible, F, SPAN > 0)
                total = total * rescale
                acc = acc * rescale[:, None]
            a = F.phi(y)[0]
            if C.RECTIFIED:
                a = a - tl.exp2(F.shift(y_max))[:, None]
            if SPAN > 0:
                a = tl.where(visible, a, 0.0)
            if OPTIONAL.gain is None:
                total += tl.sum(tl.abs(a), 1)
            if C.RECTIFIED:
                a = relu(a)[0]
            v = tiles.load(block.v, keys, Lk, C)
            acc = tiles.dot(a.to(v.dtype), v, C, acc)

    gain = tl.where(total <= tiles.DEAD, 0.0, 1 / total)
    if OPTIONAL.gain is not None:
        gain = tl.sum(tiles.load_optional(OPTIONAL.gain, head, rows, Lq, 1), 1)  # from [rows, 1]
    out = acc * gain[:, None]
    tiles.store(OUT, head, rows, Lq, out, C)
    if SAVE:
        tiles.store_statistic(STATS, tiles.GAIN, gain, head, rows, Lq)
        if F.shift is not None:
            tiles.store_statistic(STATS, tiles.SHIFT, F.shift(y_max), head, rows, Lq)


@triton.jit
def sum_and_maximum(block, bias, first_key, OPTIONAL, Lk, F, C, M, N):
    """Each row's sum and maximum of phi, its maximum of y, and y of the sink.

    The sum is compensated: over a thousand tiles a plain sum is too inexact to detect a tied row.
    """
    total = tl.zeros([M], tl.float32)
    a_max = tl.zeros([M], tl.float32)
    compensation = tl.zeros([M], tl.float32)
    y_max = lowest_maximum(C, M)
    y_sink = y_max
    if OPTIONAL.sink is not None:
        y_sink = tiles.sink_of(OPTIONAL.sink, block.head.h, M)
        total = tiles.phi_of_maximum(y_sink, F)
        y_max = y_sink
        a_max = total
    for SPAN in tl.static_range(3 if C.EDGE else 2):
        begin, end = block.spans[SPAN]
        for start in range(begin, end, N):
            keys = start + tl.arange(0, N)
            y = tile_scores(block, keys, bias, OPTIONAL, Lk, C)
            visible = visible_in(block, keys, first_key, C)
            if F.shift is not None:
                y, y_max, rescale = tiles.shifted(y, y_max, visible, F, SPAN > 0)
                total = total * rescale
                compensation = compensation * rescale
                a_max = a_max * rescale
            if F.total is not None:
                if SPAN > 0:
                    y = tl.where(visible, y, -float("inf"))
                tile_total = F.total(y)
                if F.shift is None:
                    y_max = tl.maximum(y_max, tl.max(y, 1))
            else:
                a = F.phi(y)[0]
                if SPAN > 0:
                    a = tl.where(visible, a, 0.0)
                tile_total = tl.sum(a, 1)
                a_max = tl.maximum(a_max, tl.max(a, 1))
            tile_total -= compensation
            compensation = (total + tile_total - total) - tile_total
            total += tile_total
    return total, a_max, y_max, y_sink


@triton.jit(do_not_specialize=tiles.UNSPECIALISED)
def forward_two_stages(
    Q,
    K,
    V,
    OUT,
    U,
    STATS,
    H,
    GROUP,
    Lq,
    Lk,
    OPTIONAL,
    F,
    C: tl.constexpr,
    SAVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The output of a block of rows and, if SAVE, U and all of the rows' statistics."""
    block = tiles.row_block(Q, K, V, H, GROUP, Lq, Lk, OPTIONAL, C, BLOCK_M, BLOCK_N)
    head = block.head
    rows = block.rows
    bias = tiles.load_optional(OPTIONAL.bias, head, rows, Lq, 1)
    first_key = tiles.load_optional(OPTIONAL.first_key, head, rows, Lq, 1)

    # ---- pass 1: each row's sum and maximum of phi ----
    total, a_max, y_max, y_sink = sum_and_maximum(
        block, bias, first_key, OPTIONAL, Lk, F, C, BLOCK_M, BLOCK_N
    )
    if F.shift is not None:
        shift = F.shift(y_max)
        bias = shift[:, None] if bias is None else bias + shift[:, None]
        y_max = y_max + shift
        y_sink = y_sink + shift
    if F.total is not None:  # the function is increasing
        # phi in 16 bits may be less than exact: without it the largest t of a nearly tied row is 0
        a_max = tl.minimum(F.total(y_max[:, None]), F.phi(y_max)[0])
    n = rows + block.past + 1
    if first_key is not None:
        n -= tl.sum(first_key, 1)  # from [rows, 1]
    if C.WINDOW is not None:
        n = tl.minimum(n, C.WINDOW)
    n = n.to(tl.float32)
    gain, offset, top = tiles.second_stage(total, a_max, n)

    # ---- pass 2: the re-weighted weights, times V ----
    acc = tl.zeros(block.q.shape, tl.float32)
    acc_u = tl.zeros(block.q.shape, tl.float32)
    total_w = tl.zeros([BLOCK_M], tl.float32)
    total_u = tl.zeros([BLOCK_M], tl.float32)
    if OPTIONAL.sink is not None:
        a_sink = F.phi(y_sink)[0]
        t_sink = tiles.reweighted(a_sink, gain, offset)
        total_u = tiles.power_p_minus_1(t_sink, C)
        total_w = total_u * t_sink
    for SPAN in tl.static_range(3 if C.EDGE else 2):
        begin, end = block.spans[SPAN]
        for start in range(begin, end, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            y = tile_scores(block, keys, bias, OPTIONAL, Lk, C)
            a = F.phi(y)[0]
            t = tiles.reweighted(a, gain[:, None], offset[:, None])
            if SPAN > 0:
                t = tl.where(visible_in(block, keys, first_key, C), t, 0.0)
            u = tiles.power_p_minus_1(t, C)
            w = u * t
            total_w += tl.sum(w, 1)
            v = tiles.load(block.v, keys, Lk, C)
            acc = tiles.dot(w.to(v.dtype), v, C, acc)
            if SAVE:
                total_u += tl.sum(u, 1)
                acc_u = tiles.dot(u.to(v.dtype), v, C, acc_u)

    # where all weights are 0: 0 for a dead row, whose gain is 0, and NaN for a gain of NaN
    inv_w = tl.where(total_w > 0, 1 / total_w, 0 * gain)
    out = acc * inv_w[:, None]
    tiles.store(OUT, head, rows, Lq, out, C)
    if SAVE:
        u = acc_u * tl.where(total_u > 0, 1 / total_u, 0.0)[:, None]
        tiles.store(U, head, rows, Lq, u, C)
        tiles.store_statistic(STATS, tiles.GAIN, gain, head, rows, Lq)
        tiles.store_statistic(STATS, tiles.OFFSET, offset, head, rows, Lq)
        tiles.store_statistic(STATS, tiles.FACTOR, C.P * inv_w, head, rows, Lq)
        # offset is offset_i / X_i, and top is X_i: times (dO_i . U_i - D_i) it is X_i E_i / n_i
        coupling = offset * top * C.P * total_u * inv_w / n
        tiles.store_statistic(STATS, tiles.COUPLING, coupling, head, rows, Lq)
        if F.shift is not None:
            tiles.store_statistic(STATS, tiles.SHIFT, shift, head, rows, Lq)
