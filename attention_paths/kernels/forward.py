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
def arguments(q, K, stride, bias, NUMBERS, b, h, keys, Lk, C: tl.constexpr):
    """The argument y of phi for a tile [rows, keys]."""
    k = tiles.load(K, stride, keys, Lk, C)
    y = tl.dot(q, tl.trans(k), input_precision=C.PRECISION)
    key_bias = tiles.numbers_of(NUMBERS.key_bias, b, h, keys, Lk, 0)
    return tiles.argument(y, bias, key_bias, C)[0]


@triton.jit(do_not_specialize=tiles.UNSPECIALISED)
def forward_one_stage(
    Q, K, V, OUT, ROWS, H, GROUP, Lq, Lk, NUMBERS, F, C: tl.constexpr, SAVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    bh, b, h, past, rows, q, k_head, v_head, parts = tiles.rows_and_keys(
        Q, K, V, H, GROUP, Lq, Lk, C, BLOCK_M, BLOCK_N
    )
    bias = tiles.numbers_of(NUMBERS.bias, b, h, rows, Lq, 1)

    acc = tl.zeros(q.shape, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    lowest = -float("inf") if C.WINDOW is None else tiles.NO_SCORE
    y_max = tl.full([BLOCK_M], lowest, tl.float32)
    if NUMBERS.sink is not None:
        y_max, total = tiles.sink_of(NUMBERS, h, F, BLOCK_M)
    for PART in tl.static_range(2 if C.WINDOW is None else 3):
        for start in range(parts[PART][0], parts[PART][1], BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            y = arguments(q, k_head, K.strides[2], bias, NUMBERS, b, h, keys, Lk, C)
            visible = tiles.visible_to(rows[:, None], keys[None, :], past, C)
            if F.shift is not None:
                y, y_max, rescale = tiles.shifted(y, y_max, visible, F, PART > 0)
                total, acc = total * rescale, acc * rescale[:, None]
            a = F.phi(y)[0]
            if C.RECTIFIED:
                a = a - tl.exp2(F.shift(y_max))[:, None]
            if PART > 0:
                a = tl.where(visible, a, 0.0)
            if NUMBERS.gain is None:
                total += tl.sum(tl.abs(a), 1)
            if C.RECTIFIED:
                a = relu(a)[0]
            v = tiles.load(v_head, V.strides[2], keys, Lk, C)
            acc = tl.dot(a.to(v.dtype), v, acc, input_precision=C.PRECISION)

    gain = tl.where(total <= tiles.DEAD, 0.0, 1 / total)
    if NUMBERS.gain is not None:
        gain = tl.sum(tiles.numbers_of(NUMBERS.gain, b, h, rows, Lq, 1), 1)
    out = acc * gain[:, None]
    tiles.store(tiles.own_head_of(OUT, b, h, H, Lq, C.D), H * C.D, rows, Lq, out, C)
    if SAVE:
        tiles.save(ROWS, tiles.GAIN, gain, bh, rows, Lq)
        if F.shift is not None:
            tiles.save(ROWS, tiles.SHIFT, F.shift(y_max), bh, rows, Lq)


@triton.jit(do_not_specialize=tiles.UNSPECIALISED)
def forward_two_stages(
    Q, K, V, OUT, U, ROWS, H, GROUP, Lq, Lk, NUMBERS, F, C: tl.constexpr, SAVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    bh, b, h, past, rows, q, k_head, v_head, parts = tiles.rows_and_keys(
        Q, K, V, H, GROUP, Lq, Lk, C, BLOCK_M, BLOCK_N
    )
    bias = tiles.numbers_of(NUMBERS.bias, b, h, rows, Lq, 1)

    # ---- pass 1: each row's sum and maximum of phi ----
    # compensated summation: over a thousand tiles a plain sum is too inexact to detect a tied row
    total, a_max = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    compensation = tl.zeros([BLOCK_M], tl.float32)
    lowest = -float("inf") if C.WINDOW is None else tiles.NO_SCORE
    y_max = tl.full([BLOCK_M], lowest, tl.float32)
    y_sink = y_max
    if NUMBERS.sink is not None:
        y_sink, total = tiles.sink_of(NUMBERS, h, F, BLOCK_M)
        y_max, a_max = y_sink, total
    for PART in tl.static_range(2 if C.WINDOW is None else 3):
        for start in range(parts[PART][0], parts[PART][1], BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            y = arguments(q, k_head, K.strides[2], bias, NUMBERS, b, h, keys, Lk, C)
            visible = tiles.visible_to(rows[:, None], keys[None, :], past, C)
            if F.shift is not None:
                y, y_max, rescale = tiles.shifted(y, y_max, visible, F, PART > 0)
                total, compensation = total * rescale, compensation * rescale
                a_max = a_max * rescale
            if F.total is not None:
                if PART > 0:
                    y = tl.where(visible, y, -float("inf"))
                part = F.total(y)
                if F.shift is None:
                    y_max = tl.maximum(y_max, tl.max(y, 1))
            else:
                a = F.phi(y)[0]
                if PART > 0:
                    a = tl.where(visible, a, 0.0)
                part = tl.sum(a, 1)
                a_max = tl.maximum(a_max, tl.max(a, 1))
            part -= compensation
            compensation = (total + part - total) - part
            total += part
    if F.shift is not None:
        shift = F.shift(y_max)
        bias = shift[:, None] if bias is None else bias + shift[:, None]
        y_max, y_sink = y_max + shift, y_sink + shift
    if F.total is not None:  # the function is increasing
        a_max = F.total(y_max[:, None])
    n = rows + past + 1
    if C.WINDOW is not None:
        n = tl.minimum(n, C.WINDOW)
    n = n.to(tl.float32)
    gain, offset, top = tiles.second_stage(total, a_max, n)

    # ---- pass 2: the re-weighted weights, times V ----
    acc = tl.zeros(q.shape, tl.float32)
    acc_u = tl.zeros(q.shape, tl.float32)
    total_w, total_u = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if NUMBERS.sink is not None:
        a_sink = F.phi(y_sink)[0]
        t_sink = tiles.reweighted(a_sink, gain, offset)
        total_u = tiles.power_less_one(t_sink, C)
        total_w = total_u * t_sink
    for PART in tl.static_range(2 if C.WINDOW is None else 3):
        for start in range(parts[PART][0], parts[PART][1], BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            y = arguments(q, k_head, K.strides[2], bias, NUMBERS, b, h, keys, Lk, C)
            a = F.phi(y)[0]
            t = tiles.reweighted(a, gain[:, None], offset[:, None])
            if PART > 0:
                t = tl.where(tiles.visible_to(rows[:, None], keys[None, :], past, C), t, 0.0)
            u = tiles.power_less_one(t, C)
            w = u * t
            total_w += tl.sum(w, 1)
            v = tiles.load(v_head, V.strides[2], keys, Lk, C)
            acc = tl.dot(w.to(v.dtype), v, acc, input_precision=C.PRECISION)
            if SAVE:
                total_u += tl.sum(u, 1)
                acc_u = tl.dot(u.to(v.dtype), v, acc_u, input_precision=C.PRECISION)

    # where all weights are 0: 0 for a dead row, whose gain is 0, and NaN for a gain of NaN
    inv_w = tl.where(total_w > 0, 1 / total_w, 0 * gain)
    out = acc * inv_w[:, None]
    tiles.store(tiles.own_head_of(OUT, b, h, H, Lq, C.D), H * C.D, rows, Lq, out, C)
    if SAVE:
        u = acc_u * tl.where(total_u > 0, 1 / total_u, 0.0)[:, None]
        tiles.store(tiles.own_head_of(U, b, h, H, Lq, C.D), H * C.D, rows, Lq, u, C)
        tiles.save(ROWS, tiles.GAIN, gain, bh, rows, Lq)
        tiles.save(ROWS, tiles.OFFSET, offset, bh, rows, Lq)
        tiles.save(ROWS, tiles.WEIGHT, C.P * inv_w, bh, rows, Lq)
        # E_i / n_i without its factor (dO_i . U_i - D_i)
        coupling = offset * top * C.P * total_u * inv_w / n
        tiles.save(ROWS, tiles.COUPLING, coupling, bh, rows, Lq)
        if F.shift is not None:
            tiles.save(ROWS, tiles.SHIFT, shift, bh, rows, Lq)
