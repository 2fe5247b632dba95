"""Fused attention in Triton: forward, backward and decoding, in memory linear in L.

For one head, and row i that sees the keys j < n_i (in attention.py's notation):

    z_ij = scale_i s_ij + bias_i + shift_i,   a_ij = phi(z_ij)

one stage     O_i = gain_i sum_j a_ij v_j             gain is 1 / sum_j |a_ij|, or 1 / norm_i
two stages    x_ij = gain_i a_ij - offset_i           gain is n_i / sum_j a_ij
              t_ij = relu(x_ij) / max_j x_ij          within 0 to 1, so that no power overflows
              O_i = sum_j t_ij^p v_j / W_i            W_i = sum_j t_ij^p

The second stage needs the row's sum and maximum first: its forward pass reads the keys twice. With
U_i = sum_j t_ij^(p-1) v_j / R_i, R_i = sum_j t_ij^(p-1), and X_i = max_j x_ij, its backward is

    D_i   = dO_i . O_i
    E_i   = offset_i p R_i / (X_i W_i) (dO_i . U_i - D_i)      = sum_j dL/dA_ij A_ij
    dx_ij = p t_ij^(p-1) / (X_i W_i) (dO_i . v_j - D_i)
    da_ij = gain_i dx_ij - E_i gain_i / n_i
    dz_ij = da_ij phi'(z_ij)

so that accumulating U in the forward pass saves the backward pass from computing E separately.
shift_i, which l1 cancels, keeps phi from under- or overflowing (Phi.shift); otherwise it is 0.

With a window of W keys, row i sees the keys i - W < j <= i, and n_i is min(i, W). Tiles in which no
row sees a key are never visited.

Matrix products: one stage has 2 forward and 5 backward, like FlashAttention; two stages have 4 (3
without gradients) and 5. The backward pass accumulates dq with atomics, in 5 products, or, where
the order of summation must be fixed (torch.use_deterministic_algorithms) or scale and bias are
learnt, in a separate kernel, in 7 products.

Products are in the inputs' dtype and accumulate in float32; everything else is float32. float32
inputs are multiplied in full precision, or in TF32 if torch.backends.cuda.matmul.allow_tf32 is set.
"""

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

# The same as in attention.py, which imports this module; a test compares them.
DEAD = tl.constexpr(1e-30)
TIED = tl.constexpr(16 * 2.0**-23)

# With TRITON_INTERPRET=1 in the environment, Triton's interpreter runs the kernels on a CPU.
INTERPRETED = triton.knobs.runtime.interpret
# Each head's 1 / |k| is padded to a multiple of this, which every block of keys divides.
PADDING = tl.constexpr(128)
# The largest score of a row that has seen no key yet: with a window its first tile may have none.
NO_SCORE = tl.constexpr(-1e30)


def blocks(*shapes: tuple[int, int, int, int]) -> list[triton.Config]:
    """Block shapes (BLOCK_M queries, BLOCK_N keys, warps, stages) for the autotuner."""
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
        for m, n, warps, stages in ([(32, 16, 4, 1)] if INTERPRETED else shapes)
    ]


FORWARD_BLOCKS = blocks(
    (128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3), (64, 32, 4, 3)
)  # fmt: skip
BACKWARD_BLOCKS = blocks(
    (64, 128, 8, 2), (32, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 3), (64, 32, 4, 3)
)  # fmt: skip
# For float32 products in full precision: larger blocks or fewer warps run out of registers.
FLOAT32_BLOCKS = blocks((32, 32, 8, 1))
# The autotuner measures once for all calls that share these, and caches the result as JSON.
# `size` and `work` are the bit lengths of the number of keys, and of queries in all heads.
AUTOTUNE_KEY = ["size", "work", "D", "P", "BIASED", "UNIT", "SAVE", "ATOMIC", "PRECISION", "WINDOW"]
# Arguments that Triton would otherwise compile separate kernels for when they are 1 or divisible by
# 16.
UNSPECIALISED = ["B", "H", "size", "work"]


def autotuned(shapes: list[triton.Config], **options):
    """Decorate a kernel: choose its block shape by autotuning."""

    def prune(shapes, tensors, PRECISION, **constants):
        full_precision = tensors["Q"].dtype == torch.float32 and PRECISION == "ieee"
        return FLOAT32_BLOCKS if full_precision else shapes

    prune_by = {"early_config_prune": prune}
    return triton.autotune(
        shapes, AUTOTUNE_KEY, prune_configs_by=prune_by, cache_results=True, **options
    )


# ---- phi ----
# Each phi has a slope, its derivative; the compiler computes their common terms once. Most of the
# kernels' instructions are here (python -m tests.compile_kernels counts them): tl.exp takes 5 and a
# division 9, to be exact for numbers that do not occur, while tl.exp2 and tl.rsqrt take 1.

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(z):
    return tl.exp2(z * LOG2_E)


@triton.jit
def exp_of_minus_abs(z):
    return tl.exp2(-tl.abs(z * LOG2_E))


@triton.jit
def reciprocal(x):
    """1 / x for x between 1e-18 and 1e18."""
    return tl.rsqrt(x * x)


@triton.jit
def sigmoid(z):
    e = exp_of_minus_abs(z)
    return tl.where(z >= 0, 1.0, e) * reciprocal(1 + e)


@triton.jit
def sigmoid_slope(z):
    e = exp_of_minus_abs(z)
    r = reciprocal(1 + e)
    return e * r * r


# softplus(z) is max(z, 0) + log1p(e), e = exp(-|z|). log(1 + e) would lose the digits of a small e,
# so log1p(e) / e is a polynomial: its Chebyshev interpolation on [0, 1]. The slope is sigmoid(z).


@triton.jit
def softplus(z):
    # degree 8: largest relative error 2.3e-7 in float32
    e = exp_of_minus_abs(z)
    r = 0.0051261018961668015 * e - 0.029074065387248993
    r = r * e + 0.0775160863995552
    r = r * e - 0.13602247834205627
    r = r * e + 0.19076880812644958
    r = r * e - 0.2483539879322052
    r = r * e + 0.3331812024116516
    r = r * e - 0.4999944567680359
    r = r * e + 0.9999999403953552
    return tl.maximum(z, 0.0) + r * e


@triton.jit
def softplus_slope(z):
    return exp(z - softplus(z))


@triton.jit
def softplus16(z):
    # degree 5: largest relative error 9.5e-6; after a 15th power still below rounding to 16 bits
    e = exp_of_minus_abs(z)
    r = -0.023443655804139023 * e + 0.10013973265592804
    r = r * e - 0.20907953599739562
    r = r * e + 0.32484958072273445
    r = r * e - 0.49931465227181915
    r = r * e + 0.9999905920354417
    return tl.maximum(z, 0.0) + r * e


@triton.jit
def softplus16_slope(z):
    return exp(z - softplus16(z))


@triton.jit
def relu(z):
    return tl.maximum(z, 0.0)


@triton.jit
def relu_slope(z):
    return tl.where(z > 0, 1.0, 0.0)


@triton.jit
def relu2(z):
    return tl.maximum(z, 0.0) * tl.maximum(z, 0.0)


@triton.jit
def relu2_slope(z):
    return 2 * tl.maximum(z, 0.0)


@triton.jit
def relu6(z):
    return tl.minimum(tl.maximum(z, 0.0), 6.0)


@triton.jit
def relu6_slope(z):
    return tl.where((z > 0) & (z < 6), 1.0, 0.0)


@triton.jit
def gelu(z):
    return 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))


@triton.jit
def gelu_slope(z):
    density = 0.3989422804014327 * exp(-0.5 * z * z)
    return 0.5 * (1 + tl.erf(z * 0.7071067811865476)) + z * density


@triton.jit
def mish(z):
    # tanh(softplus(z)) = m / (m + 2) with m = e (e + 2), which is 1 in float32 from z = 20 on
    e = exp(tl.minimum(z, 20.0))
    m = e * (e + 2)
    return z * m * reciprocal(m + 2)


@triton.jit
def mish_slope(z):
    e = exp(tl.minimum(z, 20.0))
    m = e * (e + 2)
    r = reciprocal(m + 2)
    return m * r + z * (4 * (m + 1) * r * r) * (e * reciprocal(1 + e))


@triton.jit
def identity(z):
    return z


@triton.jit
def identity_slope(z):
    return z * 0 + 1


@triton.jit
def shift_to_top(top):
    return -top


@triton.jit
def shift_out_of_tail(top):
    return tl.maximum(-40 - top, 0.0)


# Phi.kernel is a key of this table: phi, its slope, and its shift or None. Adding a shift to z must
# multiply phi by exp(shift). For 16-bit inputs an entry NAME16, if there is one, replaces NAME.
PHIS = {
    "exp": (exp, exp, shift_to_top),
    "sigmoid": (sigmoid, sigmoid_slope, shift_out_of_tail),
    "softplus": (softplus, softplus_slope, shift_out_of_tail),
    "softplus16": (softplus16, softplus16_slope, shift_out_of_tail),
    "relu": (relu, relu_slope, None),
    "relu2": (relu2, relu2_slope, None),
    "relu6": (relu6, relu6_slope, None),
    "gelu": (gelu, gelu_slope, None),
    "mish": (mish, mish_slope, None),
    "identity": (identity, identity_slope, None),
}


# ---- shared by the kernels ----


@triton.jit
def _at(X, strides, b, h):
    """A pointer to one head of X [B, H, ..], in 64 bits: a batch may have over 2^31 elements."""
    return X + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]


@triton.jit
def _load(X, strides, rows, L, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of X [L, D] as [rows, BLOCK_D], 0 where out of bounds."""
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < L)[:, None]
    if D != BLOCK_D:
        inside = inside & (columns < D)[None, :]
    at = X + rows[:, None] * strides[2] + columns[None, :] * strides[3]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _store(X, strides, rows, L, value, D: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < L)[:, None]
    if D != BLOCK_D:
        inside = inside & (columns < D)[None, :]
    at = X + rows[:, None] * strides[2] + columns[None, :] * strides[3]
    tl.store(at, value.to(X.dtype.element_ty), mask=inside)


@triton.jit
def _activate(
    s, alpha, beta, z_max, visible, PHI: tl.constexpr, SHIFT: tl.constexpr, BIASED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """phi of a tile's scores; with a shift also what it changes.

    That is each row's running maximum of z, and the factor by which earlier sums of phi are
    rescaled, because a new maximum changes the shift.
    """
    z = s * alpha[:, None]
    if BIASED:
        z += beta[:, None]
    rescale = z_max
    if SHIFT is not None:
        seen = tl.where(visible, z, -float("inf")) if MASKED else z
        top = tl.maximum(z_max, tl.max(seen, 1))
        rescale = exp(SHIFT(top) - SHIFT(z_max))
        z_max = top
        z += SHIFT(top)[:, None]
    a = PHI(z)
    if MASKED:
        a = tl.where(visible, a, 0.0)
    return a, z_max, rescale


@triton.jit
def _second_stage(total, a_max, n):
    """gain and offset of rows, and max_j x_ij, from phi's sum and maximum.

    Both are divided by that maximum.
    """
    gain = tl.where(total > DEAD, n / total, 0.0)
    top = gain * a_max
    offset = tl.where((n > 3) & (top - 1 > TIED), 1.0, 0.0)
    top = top - offset
    inv_top = tl.where(top > 0, 1 / top, 0.0)
    return gain * inv_top, offset * inv_top, top


@triton.jit
def _reweighted(a, gain, offset):
    """t_ij of a = phi(z_ij), clamped to 1: a recomputed a may be rounded above its maximum."""
    return tl.clamp(gain * a - offset, 0.0, 1.0)


@triton.jit
def _save(ROWS, index, value, bh, rows, heads, L):
    """Store a row vector: value goes to ROWS[index, bh, rows] of ROWS [.., B H, L]."""
    at = ROWS + (index * heads + bh).to(tl.int64) * L + rows
    tl.store(at, value, mask=rows < L)


@triton.jit
def _saved(ROWS, index, bh, rows, heads, L):
    return tl.load(ROWS + (index * heads + bh).to(tl.int64) * L + rows, mask=rows < L, other=0.0)


@triton.jit
def _power_less_one(t, P: tl.constexpr):
    """t^(p - 1) for t >= 0, and 0 at t = 0."""
    if P == 1:
        return tl.where(t > 0, 1.0, 0.0)
    elif P % 1 == 0:
        result = t
        for bit in tl.static_range(16):
            if ((P - 2) >> bit) & 1:
                result = result * t
            if (P - 2) >> (bit + 1):
                t = t * t
        return result
    else:
        return tl.exp2((P - 1) * tl.log2(t))


@triton.jit
def _inverse_norm(x):
    """1 / |x| of every row: see attention.l2_normalise."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-12)


@triton.jit
def _project(dx, x):
    """The part of a gradient that passes through x / |x|: its component orthogonal to x."""
    inverse = _inverse_norm(x)
    along = tl.sum(dx * x.to(tl.float32), 1) * inverse * inverse
    return dx - along[:, None] * x


# ---- forward ----


@triton.jit
def _inverse_norms(X, OUT, strides, H, L, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr):
    """1 / |x| of every row of X [B, H, L, D], into OUT [B, H, L rounded up to PADDING]."""
    bh, rows = tl.program_id(0), tl.program_id(1) * M + tl.arange(0, M)
    x = _load(_at(X, strides, bh // H, bh % H), strides, rows, L, D, BLOCK_D)
    tl.store(_padded(OUT, bh, L) + rows, _inverse_norm(x))


@triton.jit
def _padded(K_INVERSE, bh, Lk):
    """One head's 1 / |k| from _inverse_norms, padded so that tiles are read without a mask."""
    return K_INVERSE + bh.to(tl.int64) * (tl.cdiv(Lk, PADDING) * PADDING)


@triton.jit
def _scores(q, k, K_INVERSE, keys, UNIT: tl.constexpr, PRECISION: tl.constexpr):
    """q_i . k_j, divided by |k_j| if UNIT: [rows, keys]."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if UNIT:
        s = s * tl.load(K_INVERSE + keys)[None, :]
    return s


@triton.jit
def _scale_and_bias(
    q, SCALE, BIAS, scale_strides, bias_strides, h, rows, L, BIASED: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """The scale of a block's rows, divided by |q_i| if UNIT, and their bias."""
    alpha = tl.load(SCALE + h * scale_strides[0] + rows * scale_strides[1], rows < L, 0.0)
    if UNIT:
        alpha *= _inverse_norm(q)
    beta = alpha * 0
    if BIASED:
        beta = tl.load(BIAS + h * bias_strides[0] + rows * bias_strides[1], rows < L, 0.0)
    return alpha, beta


# Each loop over tiles runs in parts: part 0, without a mask, over the tiles that every row of a
# block sees whole, part 1 over those on the diagonal, and with a window part 2 over those on its
# edge.


@triton.jit
def _key_tiles(block, past, Lk, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """For each part, the first key of its tiles and the end of its keys, for a block of rows."""
    row = block * BLOCK_M + past  # the first row's own key
    full, begin, whole = (row + 1) // BLOCK_N * BLOCK_N, 0, 0
    if WINDOW is not None:
        begin = tl.maximum(row + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
        whole = tl.cdiv(tl.maximum(row + BLOCK_M - WINDOW, 0), BLOCK_N) * BLOCK_N
        whole = tl.minimum(whole, full)
    return (whole, full), (full, tl.minimum(row + BLOCK_M, Lk)), (begin, whole)


@triton.jit
def _visible(keys, rows, past, WINDOW: tl.constexpr):
    """Whether rows see keys, which broadcast against them."""
    visible = keys <= rows + past
    if WINDOW is not None:
        visible = visible & (keys > rows + past - WINDOW)
    return visible


@autotuned(FORWARD_BLOCKS)
@triton.jit(do_not_specialize=UNSPECIALISED)
def _forward_one_stage(
    Q, K, V, SCALE, BIAS, NORM, K_INVERSE, OUT, ROWS,
    q_strides, k_strides, v_strides, out_strides, scale_strides, bias_strides, norm_strides,
    B, H, Lq, Lk, size, work, PHI: tl.constexpr, SHIFT: tl.constexpr, L1: tl.constexpr,
    BIASED: tl.constexpr, UNIT: tl.constexpr, SAVE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    # longest rows first, so that the GPU does not wait for one long block at the end
    bh, block = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    b, h, past = bh // H, bh % H, Lk - Lq
    K, V = _at(K, k_strides, b, h), _at(V, v_strides, b, h)
    K_INVERSE = _padded(K_INVERSE, bh, Lk)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q = _load(_at(Q, q_strides, b, h), q_strides, rows, Lq, D, BLOCK_D)
    alpha, beta = _scale_and_bias(
        q, SCALE, BIAS, scale_strides, bias_strides, h, rows, Lq, BIASED, UNIT
    )
    tiles = _key_tiles(block, past, Lk, BLOCK_M, BLOCK_N, WINDOW)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    a_max = tl.full([BLOCK_M], DEAD, tl.float32)
    z_max = tl.full([BLOCK_M], -float("inf") if WINDOW is None else NO_SCORE, tl.float32)
    for PART in tl.static_range(2 if WINDOW is None else 3):
        for start in range(tiles[PART][0], tiles[PART][1], BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            k = _load(K, k_strides, keys, Lk, D, BLOCK_D)
            s = _scores(q, k, K_INVERSE, keys, UNIT, PRECISION)
            visible = _visible(keys[None, :], rows[:, None], past, WINDOW)
            a, z_max, rescale = _activate(
                s, alpha, beta, z_max, visible, PHI, SHIFT, BIASED, PART > 0
            )
            if SHIFT is not None:
                total, acc = total * rescale, acc * rescale[:, None]
            if L1:
                total += tl.sum(tl.abs(a), 1)
            v = _load(V, v_strides, keys, Lk, D, BLOCK_D)
            if v.dtype == tl.float16:  # its range is too small for unnormalised weights
                before, a_max = a_max, tl.maximum(a_max, tl.max(tl.abs(a), 1))
                a, acc = a / a_max[:, None], acc * (before / a_max)[:, None]
            acc = tl.dot(a.to(v.dtype), v, acc, input_precision=PRECISION)

    if L1:
        gain = tl.where(total > DEAD, 1 / total, 0.0)
    else:
        gain = 1 / tl.load(NORM + h * norm_strides[0] + rows * norm_strides[1], rows < Lq, 1.0)
    restored = gain * a_max if V.dtype.element_ty == tl.float16 else gain
    _store(_at(OUT, out_strides, b, h), out_strides, rows, Lq, acc * restored[:, None], D, BLOCK_D)
    if SAVE:
        if SHIFT is not None:
            beta += SHIFT(z_max)
        _save(ROWS, 0, alpha, bh, rows, B * H, Lq)
        _save(ROWS, 1, beta, bh, rows, B * H, Lq)
        _save(ROWS, 2, gain, bh, rows, B * H, Lq)


@autotuned(FORWARD_BLOCKS)
@triton.jit(do_not_specialize=UNSPECIALISED)
def _forward_two_stages(
    Q, K, V, SCALE, BIAS, K_INVERSE, OUT, U, ROWS,
    q_strides, k_strides, v_strides, out_strides, scale_strides, bias_strides,
    B, H, Lq, Lk, size, work, PHI: tl.constexpr, SHIFT: tl.constexpr, P: tl.constexpr,
    BIASED: tl.constexpr, UNIT: tl.constexpr, SAVE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    bh, block = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    b, h, past = bh // H, bh % H, Lk - Lq
    K, V = _at(K, k_strides, b, h), _at(V, v_strides, b, h)
    K_INVERSE = _padded(K_INVERSE, bh, Lk)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q = _load(_at(Q, q_strides, b, h), q_strides, rows, Lq, D, BLOCK_D)
    alpha, beta = _scale_and_bias(
        q, SCALE, BIAS, scale_strides, bias_strides, h, rows, Lq, BIASED, UNIT
    )
    tiles = _key_tiles(block, past, Lk, BLOCK_M, BLOCK_N, WINDOW)

    # ---- pass 1: each row's sum and maximum of phi ----
    # compensated summation: over a thousand tiles a plain sum is too inexact to detect a tied row
    total, a_max = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    compensation = tl.zeros([BLOCK_M], tl.float32)
    z_max = tl.full([BLOCK_M], -float("inf") if WINDOW is None else NO_SCORE, tl.float32)
    for PART in tl.static_range(2 if WINDOW is None else 3):
        for start in range(tiles[PART][0], tiles[PART][1], BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            k = _load(K, k_strides, keys, Lk, D, BLOCK_D)
            s = _scores(q, k, K_INVERSE, keys, UNIT, PRECISION)
            visible = _visible(keys[None, :], rows[:, None], past, WINDOW)
            a, z_max, rescale = _activate(
                s, alpha, beta, z_max, visible, PHI, SHIFT, BIASED, PART > 0
            )
            if SHIFT is not None:
                total, a_max = total * rescale, a_max * rescale
                compensation = compensation * rescale
            part = tl.sum(a, 1) - compensation
            compensation = (total + part - total) - part
            total += part
            a_max = tl.maximum(a_max, tl.max(a, 1))
    if SHIFT is not None:
        beta += SHIFT(z_max)
    n = rows + past + 1
    if WINDOW is not None:
        n = tl.minimum(n, WINDOW)
    n = n.to(tl.float32)
    gain, offset, top = _second_stage(total, a_max, n)

    # ---- pass 2: the re-weighted weights, times V ----
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_u = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total_w, total_u = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    for PART in tl.static_range(2 if WINDOW is None else 3):
        for start in range(tiles[PART][0], tiles[PART][1], BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            k = _load(K, k_strides, keys, Lk, D, BLOCK_D)
            s = _scores(q, k, K_INVERSE, keys, UNIT, PRECISION)
            visible = _visible(keys[None, :], rows[:, None], past, WINDOW)
            a, _, _ = _activate(s, alpha, beta, z_max, visible, PHI, None, BIASED, PART > 0)
            t = _reweighted(a, gain[:, None], offset[:, None])
            u = _power_less_one(t, P)
            w = u * t
            total_w += tl.sum(w, 1)
            v = _load(V, v_strides, keys, Lk, D, BLOCK_D)
            acc = tl.dot(w.to(v.dtype), v, acc, input_precision=PRECISION)
            if SAVE:
                total_u += tl.sum(u, 1)
                acc_u = tl.dot(u.to(v.dtype), v, acc_u, input_precision=PRECISION)

    inv_w = tl.where(total_w > 0, 1 / total_w, 0.0)
    _store(_at(OUT, out_strides, b, h), out_strides, rows, Lq, acc * inv_w[:, None], D, BLOCK_D)
    if SAVE:
        inv_u = tl.where(total_u > 0, 1 / total_u, 0.0)
        _store(_at(U, out_strides, b, h), out_strides, rows, Lq, acc_u * inv_u[:, None], D, BLOCK_D)
        _save(ROWS, 0, alpha, bh, rows, B * H, Lq)
        _save(ROWS, 1, beta, bh, rows, B * H, Lq)
        _save(ROWS, 2, gain, bh, rows, B * H, Lq)
        _save(ROWS, 3, offset, bh, rows, B * H, Lq)
        _save(ROWS, 4, inv_w, bh, rows, B * H, Lq)
        # E_i gain_i / n_i without its factor (dO_i . U_i - D_i)
        _save(ROWS, 5, offset * gain * top * P * total_u * inv_w / n, bh, rows, B * H, Lq)


# ---- backward ----


# A tile's dz from dp_ij = dO_i . v_j, with per-row terms that are computed once:
# one stage    A = gain a       dz = (gain dp - delta) phi'(z), delta = gain D_i, times a's sign
# two stages   A = inv_w t^p    dz = (t^(p-1) (slope dp - delta) - coupling) phi'(z),
#              slope = p gain inv_w, delta = slope D_i, coupling = E_i gain_i / n_i


@triton.jit
def _backward_rows(
    DOUT, OUT, U, ROWS, TERMS, dout_strides, out_strides, B, H, L, P: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """delta and, for two stages, coupling and slope."""
    bh, rows = tl.program_id(0), tl.program_id(1) * M + tl.arange(0, M)
    b, h = bh // H, bh % H
    dout = _load(_at(DOUT, dout_strides, b, h), dout_strides, rows, L, D, BLOCK_D).to(tl.float32)
    out = _load(_at(OUT, out_strides, b, h), out_strides, rows, L, D, BLOCK_D).to(tl.float32)
    along = tl.sum(dout * out, 1)
    slope = _saved(ROWS, 2, bh, rows, B * H, L)
    if P:
        u = _load(_at(U, out_strides, b, h), out_strides, rows, L, D, BLOCK_D).to(tl.float32)
        coupling = _saved(ROWS, 5, bh, rows, B * H, L) * (tl.sum(dout * u, 1) - along)
        slope *= P * _saved(ROWS, 4, bh, rows, B * H, L)
        _save(TERMS, 1, coupling, bh, rows, B * H, L)
        _save(TERMS, 2, slope, bh, rows, B * H, L)
    _save(TERMS, 0, slope * along, bh, rows, B * H, L)


@triton.jit
def _row_terms(ROWS, TERMS, bh, rows, heads, L, P: tl.constexpr):
    """The per-row terms that a tile's gradients need."""
    alpha = _saved(ROWS, 0, bh, rows, heads, L)
    beta = _saved(ROWS, 1, bh, rows, heads, L)
    gain = _saved(ROWS, 2, bh, rows, heads, L)
    delta = _saved(TERMS, 0, bh, rows, heads, L)
    if P:
        offset = _saved(ROWS, 3, bh, rows, heads, L)
        inv_w = _saved(ROWS, 4, bh, rows, heads, L)
        coupling = _saved(TERMS, 1, bh, rows, heads, L)
        slope = _saved(TERMS, 2, bh, rows, heads, L)
    else:
        offset, inv_w, coupling, slope = gain, gain, gain, gain
    return alpha, beta, gain, delta, offset, inv_w, coupling, slope


@triton.jit
def _gradients(
    s, dp, alpha, beta, gain, delta, offset, inv_w, coupling, slope, visible, PHI: tl.constexpr,
    SLOPE: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr, L1: tl.constexpr,
    BIASED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A tile's weights and dz from s, dp and the per-row terms, which broadcast against them."""
    z = s * alpha
    if BIASED:
        z += beta
    a = PHI(z)
    if P:
        t = _reweighted(a, gain, offset)
        u = _power_less_one(t, P)
        A = u * t * inv_w
        da = u * (slope * dp - delta) - coupling
    else:
        A = a * gain
        da = slope * dp
        if L1:  # the gradient of sum |a|
            da -= tl.where(a > 0, delta, tl.where(a < 0, -delta, 0.0)) if SIGNED else delta
    dz = da * SLOPE(z)
    if MASKED:
        A, dz = tl.where(visible, A, 0.0), tl.where(visible, dz, 0.0)
    return A, dz


@triton.jit
def _row_tiles(block, past, Lq, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """For each part, the first row of its tiles and the end of its rows, for a block of keys."""
    begin = tl.maximum(block * BLOCK_N - past, 0) // BLOCK_M * BLOCK_M
    # the first block of rows that all see all of these keys, but for a window
    full = tl.cdiv(tl.maximum(block * BLOCK_N + BLOCK_N - 1 - past, 0), BLOCK_M) * BLOCK_M
    whole, last = Lq, Lq
    if WINDOW is not None:
        end = block * BLOCK_N - past + WINDOW  # of the rows that see the first of these keys
        whole = tl.minimum(tl.maximum(end, 0) // BLOCK_M * BLOCK_M, Lq)
        last = tl.minimum(end + BLOCK_N - 1, Lq)
    return (full, whole), (begin, tl.minimum(full, last)), (tl.maximum(full, whole), last)


@autotuned(BACKWARD_BLOCKS, reset_to_zero=["DQ"])
@triton.jit(do_not_specialize=UNSPECIALISED)
def _backward_keys(
    Q, K, V, DOUT, K_INVERSE, ROWS, TERMS, DQ, DK, DV,
    q_strides, k_strides, v_strides, dout_strides, dq_strides, dk_strides, B, H, Lq, Lk, size, work,
    PHI: tl.constexpr, SLOPE: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr, L1: tl.constexpr,
    BIASED: tl.constexpr, UNIT: tl.constexpr, ATOMIC: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys and, if ATOMIC, its part of dq. Tiles are [keys, rows]."""
    bh, block = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    Q, DOUT = _at(Q, q_strides, b, h), _at(DOUT, dout_strides, b, h)
    DQ = _at(DQ, dq_strides, b, h)
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = _load(_at(K, k_strides, b, h), k_strides, keys, Lk, D, BLOCK_D)
    v = _load(_at(V, v_strides, b, h), v_strides, keys, Lk, D, BLOCK_D)
    inverse, unit_k = 1.0, k
    if UNIT:
        inverse = tl.load(_padded(K_INVERSE, bh, Lk) + keys)[:, None]
        unit_k = (k * inverse).to(k.dtype)
    past = Lk - Lq
    tiles = _row_tiles(block, past, Lq, BLOCK_M, BLOCK_N, WINDOW)

    dk, dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for PART in tl.static_range(2 if WINDOW is None else 3):
        for start in range(tiles[PART][0], tiles[PART][1], BLOCK_M):
            rows = start + tl.arange(0, BLOCK_M)
            q = _load(Q, q_strides, rows, Lq, D, BLOCK_D)
            dout = _load(DOUT, dout_strides, rows, Lq, D, BLOCK_D)
            alpha, beta, gain, delta, offset, inv_w, coupling, slope = _row_terms(
                ROWS, TERMS, bh, rows, B * H, Lq, P
            )
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            if UNIT:
                s = s * inverse
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
            A, dz = _gradients(
                s, dp, alpha[None, :], beta[None, :], gain[None, :], delta[None, :],
                offset[None, :], inv_w[None, :], coupling[None, :], slope[None, :],
                _visible(keys[:, None], rows[None, :], past, WINDOW), PHI, SLOPE, SIGNED, P, L1,
                BIASED, PART > 0,
            )  # fmt: skip
            dv = tl.dot(A.to(dout.dtype), dout, dv, input_precision=PRECISION)
            ds = (dz * alpha[None, :]).to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)
            if ATOMIC:
                dq = tl.dot(tl.trans(ds), unit_k, input_precision=PRECISION)
                columns = tl.arange(0, BLOCK_D)
                at = DQ + rows[:, None] * dq_strides[2] + columns[None, :] * dq_strides[3]
                inside = (rows < Lq)[:, None] & (columns < D)[None, :]
                tl.atomic_add(at, dq, mask=inside, sem="relaxed")
    if UNIT:
        dk = _project(dk, k) * inverse
    _store(_at(DK, dk_strides, b, h), dk_strides, keys, Lk, dk, D, BLOCK_D)
    _store(_at(DV, dk_strides, b, h), dk_strides, keys, Lk, dv, D, BLOCK_D)


@triton.jit
def _finish_queries(
    SUM, DQ, Q, sum_strides, dq_strides, q_strides, H, L, UNIT: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """dq from the float32 sum that the atomics accumulated."""
    bh, rows = tl.program_id(0), tl.program_id(1) * M + tl.arange(0, M)
    b, h = bh // H, bh % H
    dq = _load(_at(SUM, sum_strides, b, h), sum_strides, rows, L, D, BLOCK_D)
    if UNIT:
        q = _load(_at(Q, q_strides, b, h), q_strides, rows, L, D, BLOCK_D)
        dq = _project(dq, q)
    _store(_at(DQ, dq_strides, b, h), dq_strides, rows, L, dq, D, BLOCK_D)


@autotuned(BACKWARD_BLOCKS)
@triton.jit(do_not_specialize=UNSPECIALISED)
def _backward_queries(
    Q, K, V, DOUT, K_INVERSE, ROWS, TERMS, DQ, DSCALE, DBIAS,
    q_strides, k_strides, v_strides, dout_strides, dq_strides, B, H, Lq, Lk, size, work,
    PHI: tl.constexpr, SLOPE: tl.constexpr, SIGNED: tl.constexpr, P: tl.constexpr, L1: tl.constexpr,
    BIASED: tl.constexpr, UNIT: tl.constexpr, LEARNT: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of a block of rows and, if LEARNT, the gradients of scale and bias."""
    bh, block = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    b, h = bh // H, bh % H
    K, V = _at(K, k_strides, b, h), _at(V, v_strides, b, h)
    K_INVERSE = _padded(K_INVERSE, bh, Lk)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q = _load(_at(Q, q_strides, b, h), q_strides, rows, Lq, D, BLOCK_D)
    dout = _load(_at(DOUT, dout_strides, b, h), dout_strides, rows, Lq, D, BLOCK_D)
    alpha, beta, gain, delta, offset, inv_w, coupling, slope = _row_terms(
        ROWS, TERMS, bh, rows, B * H, Lq, P
    )
    past = Lk - Lq
    tiles = _key_tiles(block, past, Lk, BLOCK_M, BLOCK_N, WINDOW)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dscale, dbias = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    for PART in tl.static_range(2 if WINDOW is None else 3):
        for start in range(tiles[PART][0], tiles[PART][1], BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            k = _load(K, k_strides, keys, Lk, D, BLOCK_D)
            v = _load(V, v_strides, keys, Lk, D, BLOCK_D)
            s = _scores(q, k, K_INVERSE, keys, UNIT, PRECISION)
            dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
            _, dz = _gradients(
                s, dp, alpha[:, None], beta[:, None], gain[:, None], delta[:, None],
                offset[:, None], inv_w[:, None], coupling[:, None], slope[:, None],
                _visible(keys[None, :], rows[:, None], past, WINDOW), PHI, SLOPE, SIGNED, P, L1,
                BIASED, PART > 0,
            )  # fmt: skip
            if LEARNT:
                dscale += tl.sum(dz * s, 1)
                dbias += tl.sum(dz, 1)
            ds = dz * alpha[:, None]
            if UNIT:
                ds = ds * tl.load(K_INVERSE + keys)[None, :]
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    if UNIT:
        dq = _project(dq, q)
        dscale *= _inverse_norm(q)
    _store(_at(DQ, dq_strides, b, h), dq_strides, rows, Lq, dq, D, BLOCK_D)
    if LEARNT:
        _save(DSCALE, 0, dscale, bh, rows, B * H, Lq)
        _save(DBIAS, 0, dbias, bh, rows, B * H, Lq)


# ---- decoding: one query row against a long cache ----


@triton.jit
def _decode_scores(
    Q, K, SCALE, BIAS, Z, PARTS, q_strides, k_strides, scale_strides, bias_strides, B, H, Lk, chunk,
    PHI: tl.constexpr, SHIFT: tl.constexpr, BIASED: tl.constexpr, UNIT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """z of a chunk of the cache, and the chunk's maximum of z, sum of |phi|, and maximum of phi."""
    bh, split = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    K, Z = _at(K, k_strides, b, h), Z + bh.to(tl.int64) * Lk
    one = tl.arange(0, 1)
    q = _load(_at(Q, q_strides, b, h), q_strides, one, 1, D, BLOCK_D).to(tl.float32)  # [1, d]
    scale = tl.load(SCALE + h * scale_strides[0] + one)
    bias = tl.load(BIAS + h * bias_strides[0] + one) if BIASED else scale * 0
    if UNIT:
        scale *= _inverse_norm(q)
    total, a_max = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    z_max = tl.full([1], -float("inf"), tl.float32)
    for start in range(split * chunk, tl.minimum(split * chunk + chunk, Lk), BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = _load(K, k_strides, keys, Lk, D, BLOCK_D).to(tl.float32)
        s = tl.sum(k * q, 1)
        if UNIT:
            s = s * _inverse_norm(k)
        inside = keys < Lk
        tl.store(Z + keys, s * tl.sum(scale, 0) + tl.sum(bias, 0), mask=inside)
        a, z_max, rescale = _activate(
            s[None, :], scale, bias, z_max, inside[None, :], PHI, SHIFT, BIASED, True
        )
        if SHIFT is not None:
            total, a_max = total * rescale, a_max * rescale
        total += tl.sum(tl.abs(a), 1)
        a_max = tl.maximum(a_max, tl.max(a, 1))
    at = PARTS + (bh.to(tl.int64) * tl.num_programs(1) + split) * 3 + one
    tl.store(at, z_max)
    tl.store(at + 1, total)
    tl.store(at + 2, a_max)


@triton.jit(do_not_specialize=["Lk"])
def _decode_values(
    V, Z, PARTS, NORM, SUMS, v_strides, norm_strides, B, H, Lk, chunk, PHI: tl.constexpr,
    SHIFT: tl.constexpr, P: tl.constexpr, L1: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A chunk's sums of weighted values and of weights. Values of weight 0 are not read."""
    bh, split = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    V, Z = _at(V, v_strides, b, h), Z + bh.to(tl.int64) * Lk
    parts = tl.arange(0, SPLITS)
    exists = parts < tl.num_programs(1)
    PARTS += bh.to(tl.int64) * tl.num_programs(1) * 3
    total = tl.load(PARTS + parts * 3 + 1, mask=exists, other=0.0)
    a_max = tl.load(PARTS + parts * 3 + 2, mask=exists, other=0.0)
    shift = 0.0
    if SHIFT is not None:
        z_max = tl.load(PARTS + parts * 3, mask=exists, other=-float("inf"))
        shift = SHIFT(tl.max(z_max, 0))
        rescale = exp(shift - SHIFT(z_max))
        total, a_max = total * rescale, a_max * rescale
    total, a_max = tl.sum(total, 0), tl.max(a_max, 0)
    gain, offset, _ = _second_stage(total, a_max, Lk.to(tl.float32))
    if not P:
        if L1:
            gain = tl.where(total > DEAD, 1 / total, 0.0)
        else:
            gain = 1 / tl.load(NORM + h * norm_strides[0])
    acc, total_w = tl.zeros([BLOCK_D], tl.float32), 0.0
    for start in range(split * chunk, tl.minimum(split * chunk + chunk, Lk), BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        a = PHI(tl.load(Z + keys, mask=keys < Lk, other=0.0) + shift)
        if P:
            t = _reweighted(a, gain, offset)
            w = _power_less_one(t, P) * t
            # the row's sum is at least 1, so what is left out is below float32 rounding
            keep = w * Lk > 2.0**-24
        else:
            w = gain * a
            keep = w != 0
        keep = keep & (keys < Lk)
        w = tl.where(keep, w, 0.0)
        total_w += tl.sum(w, 0)
        v = _load(V, v_strides, tl.where(keep, keys, Lk), Lk, D, BLOCK_D)
        acc += tl.sum(w[:, None] * v.to(tl.float32), 0)
    SUMS += (bh.to(tl.int64) * tl.num_programs(1) + split) * (BLOCK_D + 1)
    tl.store(SUMS + tl.arange(0, BLOCK_D), acc)
    tl.store(SUMS + BLOCK_D, total_w)


@triton.jit
def _decode_sum(
    SUMS, OUT, splits, P: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr
):
    """The output from the sums of all chunks."""
    bh, parts, columns = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    SUMS += bh.to(tl.int64) * splits * (BLOCK_D + 1)
    at = SUMS + parts[:, None] * (BLOCK_D + 1)
    acc = tl.sum(tl.load(at + columns[None, :], mask=(parts < splits)[:, None], other=0.0), 0)
    if P:
        total_w = tl.sum(tl.load(SUMS + parts * (BLOCK_D + 1) + BLOCK_D, parts < splits, 0.0), 0)
        acc *= tl.where(total_w > 0, 1 / total_w, 0.0)
    at = OUT + bh.to(tl.int64) * D + columns
    tl.store(at, acc.to(OUT.dtype.element_ty), mask=columns < D)


# ---- the operator ----


def _device(x: Tensor) -> contextlib.AbstractContextManager:
    """A context that launches kernels on x's device."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _phi(name: str, dtype: torch.dtype) -> tuple:
    """The entry of PHIS for inputs of this dtype."""
    return PHIS[name] if dtype.itemsize > 2 else PHIS.get(f"{name}16", PHIS[name])


def _block_d(d: int) -> int:
    return max(16, triton.next_power_of_2(d))


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _p(p: float) -> int | float:
    """p as a kernel constant: 0 for one stage, and an int if it is whole."""
    return int(p) if p == int(p) else p


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty [B, H, L, d] laid out as [B, L, H, d], so that joining the heads copies nothing."""
    B, H, L, d = x.shape
    return x.new_empty(B, L, H, d, dtype=dtype).transpose(1, 2)


def _sizes(q: Tensor, k: Tensor) -> dict[str, int]:
    """The kernels' size arguments for q [B, H, Lq, d] and k [B, H, Lk, d]."""
    (B, H, Lq, _), Lk = q.shape, k.shape[2]
    size, work = Lk.bit_length(), (B * H * Lq).bit_length()
    return dict(B=B, H=H, Lq=Lq, Lk=Lk, size=size, work=work)


def _outputs(
    q: Tensor, k: Tensor, p: float, unit: bool, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised outputs of _forward."""
    (B, H, Lq, _), Lk = q.shape, k.shape[2]
    u = _like(q) if save and p else q.new_empty(0)
    rows = q.new_empty((6 if p else 3) * B * H * Lq if save else 0, dtype=torch.float32)
    padded = triton.cdiv(Lk, PADDING.value) * PADDING.value
    k_inverse = q.new_empty((B, H, padded) if unit else 0, dtype=torch.float32)
    return _like(q), u, rows, k_inverse


@torch.library.custom_op("fused_attention::forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, bias: Tensor | None, norm: Tensor | None,
    phi: str, shifted: bool, p: float, unit: bool, signed: bool, window: int | None, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output and, for the backward pass, U, the row vectors and 1 / |k|."""
    B, H, Lq, d = q.shape
    function, _, shift = _phi(phi, q.dtype)
    l1 = norm is None
    out, u, rows, k_inverse = _outputs(q, k, p, unit, save)
    with _device(q):
        sizes, head = _sizes(q, k), dict(D=d, BLOCK_D=_block_d(d))
        if unit:
            _inverse_norms[B * H, k_inverse.shape[2] // 64](
                k, k_inverse, k.stride(), H, k.shape[2], M=64, **head
            )
        constants = dict(
            PHI=function, SHIFT=shift if shifted else None, BIASED=bias is not None, UNIT=unit,
            SAVE=save, PRECISION=_precision(), WINDOW=window, **head,
        )  # fmt: skip

        def grid(meta):
            return B * H, triton.cdiv(Lq, meta["BLOCK_M"])

        # kernels take a tensor even for an absent argument, and do not read it
        bias, norm = (scale if x is None else x for x in (bias, norm))
        if p:
            _forward_two_stages[grid](
                q, k, v, scale, bias, k_inverse, out, u, rows, q.stride(), k.stride(), v.stride(),
                out.stride(), scale.stride(), bias.stride(), **sizes, **constants, P=_p(p),
            )  # fmt: skip
        else:
            _forward_one_stage[grid](
                q, k, v, scale, bias, norm, k_inverse, out, rows, q.stride(), k.stride(),
                v.stride(), out.stride(), scale.stride(), bias.stride(), norm.stride(),
                **sizes, **constants, L1=l1,
            )  # fmt: skip
    return out, u, rows, k_inverse


@_forward.register_fake
def _(q, k, v, scale, bias, norm, phi, shifted, p, unit, signed, window, save):
    return _outputs(q, k, p, unit, save)


@torch.library.custom_op("fused_attention::backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, u: Tensor, rows: Tensor,
    k_inverse: Tensor, phi: str, p: float, unit: bool, signed: bool, window: int | None, l1: bool,
    biased: bool, learnt: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and, if learnt, the gradients of scale and bias, [B, H, Lq]."""
    (B, H, Lq, d), Lk = q.shape, k.shape[2]
    function, slope, _ = _phi(phi, q.dtype)
    dq, dk, dv = _like(q), _like(k), _like(k)
    dscale, dbias = _row_gradients(q, learnt)
    atomic = not learnt and not torch.are_deterministic_algorithms_enabled()
    summed = _like(q, torch.float32).zero_() if atomic else dq
    terms = q.new_empty((3 if p else 1) * B * H * Lq, dtype=torch.float32)
    sizes = _sizes(q, k)
    head = dict(D=d, BLOCK_D=_block_d(d))
    constants = dict(
        PHI=function,
        SLOPE=slope,
        SIGNED=signed,
        P=_p(p),
        L1=l1,
        BIASED=biased,
        UNIT=unit,
        PRECISION=_precision(),
        WINDOW=window,
        **head,
    )
    with _device(q):
        _backward_rows[B * H, triton.cdiv(Lq, 64)](
            dout, out, u, rows, terms, dout.stride(), out.stride(), B, H, Lq, P=_p(p), M=64, **head
        )  # fmt: skip
        saved = q, k, v, dout, k_inverse, rows, terms
        strides = q.stride(), k.stride(), v.stride(), dout.stride()
        _backward_keys[lambda meta: (B * H, triton.cdiv(Lk, meta["BLOCK_N"]))](
            *saved, summed, dk, dv, *strides, summed.stride(), dk.stride(), **sizes, **constants,
            ATOMIC=atomic,
        )  # fmt: skip
        if atomic:
            _finish_queries[B * H, triton.cdiv(Lq, 64)](
                summed, dq, q, summed.stride(), dq.stride(), q.stride(), H, Lq, UNIT=unit, M=64,
                **head,
            )  # fmt: skip
        else:
            _backward_queries[lambda meta: (B * H, triton.cdiv(Lq, meta["BLOCK_M"]))](
                *saved, dq, dscale, dbias, *strides, dq.stride(), **sizes, **constants,
                LEARNT=learnt,
            )  # fmt: skip
    return dq, dk, dv, dscale, dbias


@_backward.register_fake
def _(dout, q, k, v, out, u, rows, k_inverse, phi, p, unit, signed, window, l1, biased, learnt):
    return _like(q), _like(k), _like(k), *_row_gradients(q, learnt)


def _row_gradients(q: Tensor, learnt: bool) -> tuple[Tensor, Tensor]:
    shape = q.shape[:3] if learnt else (0,)
    return q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)


def _save_for_backward(ctx, inputs, output):
    q, k, v, scale, bias, norm, phi, _, p, unit, signed, window, _ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.constants = phi, p, unit, signed, window, norm is None, bias is not None
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _call_backward(ctx, dout, *_):
    q, k, v, out, *saved = ctx.saved_tensors
    learnt = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    dq, dk, dv, dscale, dbias = _backward(dout, q, k, v, out, *saved, *ctx.constants, learnt)
    dscale = dscale.sum(0) if ctx.needs_input_grad[3] else None
    dbias = dbias.sum(0) if ctx.needs_input_grad[4] else None
    return dq, dk, dv, dscale, dbias, *(None,) * 8


_forward.register_autograd(_call_backward, setup_context=_save_for_backward)


@torch.library.custom_op("fused_attention::decode", mutates_args=())
def _decode(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, bias: Tensor | None, norm: Tensor | None,
    phi: str, shifted: bool, p: float, unit: bool,
) -> Tensor:  # fmt: skip
    """The output for one query row, with the cache split over enough programs to fill the GPU."""
    (B, H, _, d), Lk = q.shape, k.shape[2]
    function, _, shift = _phi(phi, q.dtype)
    block_n = 16 if INTERPRETED else 64
    programs = 4 * _processors(q.device)
    wanted = max(1, min(triton.cdiv(programs, B * H), triton.cdiv(Lk, 2 * block_n), 256))
    chunk = triton.cdiv(triton.cdiv(Lk, wanted), block_n) * block_n
    splits = triton.cdiv(Lk, chunk)
    block_d = _block_d(d)
    z = q.new_empty(B, H, Lk, dtype=torch.float32)
    parts = q.new_empty(B, H, splits, 3, dtype=torch.float32)
    sums = q.new_empty(B, H, splits, block_d + 1, dtype=torch.float32)
    out = _like(q)
    biased, l1 = bias is not None, norm is None
    bias, norm = (scale if x is None else x for x in (bias, norm))
    head = dict(D=d, BLOCK_D=block_d)
    constants = dict(PHI=function, SHIFT=shift if shifted else None, BLOCK_N=block_n, **head)
    reduced = dict(SPLITS=triton.next_power_of_2(splits))
    with _device(q):
        _decode_scores[B * H, splits](
            q, k, scale, bias, z, parts, q.stride(), k.stride(), scale.stride(), bias.stride(),
            B, H, Lk, chunk, BIASED=biased, UNIT=unit, **constants,
        )  # fmt: skip
        _decode_values[B * H, splits](
            v, z, parts, norm, sums, v.stride(), norm.stride(), B, H, Lk, chunk, P=_p(p),
            L1=l1, **constants, **reduced,
        )  # fmt: skip
        _decode_sum[(B * H,)](sums, out, splits, P=_p(p), **head, **reduced)
    return out


@_decode.register_fake
def _(q, k, v, scale, bias, norm, phi, shifted, p, unit):
    return _like(q)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, bias: Tensor | None, norm: Tensor | None, *,
    phi: str, shifted: bool, p: float | None, unit: bool, signed: bool, window: int | None,
) -> Tensor:  # fmt: skip
    """Causal attention [B, H, Lq, d] of q [B, H, Lq, d] over k, v [B, H, Lk, d], Lq <= Lk.

    The queries are the last Lq positions. scale, bias and norm are float32 [H, Lq] of any strides;
    without norm it is l1. phi is a key of PHIS; `shifted` applies its shift; p is the power of
    stage 2, or None; `unit` normalises q and k to unit length; `signed` means that phi may be
    negative; `window` is the number of keys that each row sees, or None. A single query sees all k.
    Gradients flow to q, k, v, scale and bias.
    """
    p = 0.0 if p is None else float(p)
    if shifted and bias is None:
        bias = scale.new_zeros(1).expand(scale.shape)
    learns = any(x is not None and x.requires_grad for x in (q, k, v, scale, bias))
    save = torch.is_grad_enabled() and learns
    if q.shape[2] == 1 and not save:
        return _decode(q, k, v, scale, bias, norm, phi, shifted, p, unit)
    return _forward(q, k, v, scale, bias, norm, phi, shifted, p, unit, signed, window, save)[0]
