"""What the fused kernels share: their arguments, loads and stores, the scores of a tile, stage 2.

Tensors that the kernels make are laid out as [B, L, H, d], or [.., B, H, L] for numbers of rows,
and need no strides. Their inputs have any strides, but contiguous columns.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attention_paths.kernels.phi import LOG2_E, reciprocal

# As in attention.py; a test compares them.
DEAD = tl.constexpr(1e-30)
TIED = tl.constexpr(16 * 2.0**-23)
# The largest score of a row that has seen no key yet. With a window its first tile may have none.
NO_SCORE = tl.constexpr(-1e30)
# Triton must not compile kernels of their own for 1 and for multiples of 16 of these arguments.
UNSPECIALISED = ["H", "GROUP"]


# ---- arguments ----


class Strided(NamedTuple):
    """A tensor [B, H, L, ..] and the strides of its first three dimensions."""

    data: Tensor
    strides: tuple[int, ...]


class Numbers(NamedTuple):
    """The numbers that launch.forward takes."""

    bias: Strided | None
    gain: Strided | None
    sink: Strided | None
    key_bias: Strided | None


class Functions(NamedTuple):
    """The functions of a phi.Function. Its shift is None where it does not apply."""

    phi: triton.JITFunction
    shift: triton.JITFunction | None
    total: triton.JITFunction | None


class Constants(NamedTuple):
    """What a kernel is compiled for. A choice that is None or False compiles to nothing."""

    D: int  # the head size
    BLOCK_D: int  # the next power of 2
    SCALE: float  # of products
    SLOPE: float  # the function's derivative is SLOPE phi'(z)
    RECTIFIED: bool
    CAP: float | None  # the soft cap of y
    P: int | float  # the power of stage 2; 0: there is none
    SIGNED: bool  # phi may be negative
    WINDOW: int | None
    UNIT: bool  # keys are to be normalised to length 1, in decoding
    PRECISION: str  # of products of float32


# Numbers of rows, float32 [number, B, H, Lq]: ROWS comes from the forward pass, TERMS from dO.
# Only two stages have the last three of ROWS and COUPLED.
GAIN, SHIFT, OFFSET, WEIGHT, COUPLING = (tl.constexpr(i) for i in range(5))
DELTA, COUPLED = (tl.constexpr(i) for i in range(2))


# ---- loads and stores ----


@triton.jit
def head_of(x, b, h):
    """A pointer to one head of a Strided x, in 64 bits: a batch may have over 2^31 elements."""
    return x.data + b.to(tl.int64) * x.strides[0] + h.to(tl.int64) * x.strides[1]


@triton.jit
def own_head_of(X, b, h, H, L, D: tl.constexpr):
    """The same for a tensor that a kernel has made."""
    return X + (b.to(tl.int64) * L * H + h) * D


@triton.jit
def places(X, stride, rows, L, C: tl.constexpr):
    """Pointers [rows, BLOCK_D] to rows of X [L, D], and which of them are within bounds."""
    columns = tl.arange(0, C.BLOCK_D)
    inside = (rows < L)[:, None]
    if C.D != C.BLOCK_D:
        inside = inside & (columns < C.D)[None, :]
    return X + rows[:, None] * stride + columns[None, :], inside


@triton.jit
def load(X, stride, rows, L, C: tl.constexpr):
    """Rows of X [L, D] as [rows, BLOCK_D], 0 where out of bounds."""
    at, inside = places(X, stride, rows, L, C)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store(X, stride, rows, L, value, C: tl.constexpr):
    at, inside = places(X, stride, rows, L, C)
    tl.store(at, value.to(X.dtype.element_ty), mask=inside)


@triton.jit
def numbers_of(x, b, h, at, L, AXIS: tl.constexpr):
    """The numbers of rows or keys, with a new axis, from a Strided x [B, H, L]; None of None."""
    if x is not None:  # and no else: Triton 3.6 has no None to return
        return tl.expand_dims(tl.load(head_of(x, b, h) + at * x.strides[2], at < L, 0.0), AXIS)


@triton.jit
def save(ROWS, index, value, bh, rows, L):
    """Store a number of each row: value goes to ROWS[index, bh, rows]."""
    at = ROWS + (tl.num_programs(0) * index + bh).to(tl.int64) * L + rows
    tl.store(at, value, mask=rows < L)


@triton.jit
def saved(ROWS, index, bh, rows, L):
    at = ROWS + (tl.num_programs(0) * index + bh).to(tl.int64) * L + rows
    return tl.load(at, mask=rows < L, other=0.0)


# ---- which keys a row sees ----
# Each loop over tiles runs in parts: part 0, without a mask, over the tiles that every row of a
# block sees whole, part 1 over those on the diagonal, and with a window part 2 over those on its
# edge.


@triton.jit
def rows_and_keys(Q, K, V, H, GROUP, Lq, Lk, C: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """A program's block of M rows, the heads of K and V for it, and its parts of tiles of N keys.

    A part is the first key of its tiles and the end of its keys.
    """
    # longest rows first, so that the GPU does not wait for one long block at the end
    bh, block = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    b, h, past = bh // H, bh % H, Lk - Lq
    k_head, v_head = head_of(K, b, h // GROUP), head_of(V, b, h // GROUP)
    rows = block * M + tl.arange(0, M)
    q = load(head_of(Q, b, h), Q.strides[2], rows, Lq, C)
    row = block * M + past  # the first row's own key
    full, begin, whole = (row + 1) // N * N, 0, 0
    if C.WINDOW is not None:
        begin = tl.maximum(row + 1 - C.WINDOW, 0) // N * N
        whole = tl.cdiv(tl.maximum(row + M - C.WINDOW, 0), N) * N
        whole = tl.minimum(whole, full)
    parts = (whole, full), (full, tl.minimum(row + M, Lk)), (begin, whole)
    return bh, b, h, past, rows, q, k_head, v_head, parts


@triton.jit
def visible_to(rows, keys, past, C: tl.constexpr):
    """Whether rows see keys, which broadcast against them."""
    visible = keys <= rows + past
    if C.WINDOW is not None:
        visible = visible & (keys > rows + past - C.WINDOW)
    return visible


# ---- the argument y of phi ----


@triton.jit
def soft_capped(y, C: tl.constexpr):
    """CAP tanh(y / CAP), and its derivative."""
    e = tl.exp2(tl.abs(y) * (-2 * LOG2_E / C.CAP))
    r = reciprocal(1 + e)
    capped = C.CAP * (1 - e) * r
    return tl.where(y < 0, -capped, capped), 4 * e * r * r


@triton.jit
def argument(y, bias, key_bias, C: tl.constexpr):
    """y of a tile from its product and the biases of rows and keys, and the soft cap's derivative.

    A bias may be None.
    """
    if C.SCALE != 1:
        y = y * C.SCALE
    cap_slope = y
    if C.CAP is not None:
        y, cap_slope = soft_capped(y, C)
    if key_bias is not None:  # added to the other first, because they may nearly cancel
        bias = key_bias if bias is None else bias + key_bias
    return y if bias is None else y + bias, cap_slope


@triton.jit
def shifted(y, y_max, visible, F, MASKED: tl.constexpr):
    """y of a tile, shifted, each row's running maximum of y, and the factor of earlier sums of phi.

    A new maximum changes the shift, and with it those sums.
    """
    seen = tl.where(visible, y, -float("inf")) if MASKED else y
    top = tl.maximum(y_max, tl.max(seen, 1))
    return y + F.shift(top)[:, None], top, tl.exp2(F.shift(top) - F.shift(y_max))


@triton.jit
def sink_of(NUMBERS, h, F, M: tl.constexpr):
    """y of a head's sink for M rows, and phi of it where it is the row's maximum."""
    y = tl.zeros([M], tl.float32) + tl.load(NUMBERS.sink.data + h)
    a = F.phi(y + F.shift(y) if F.shift is not None else y)[0]
    return y, a


# ---- stage 2 ----
# Conditions on sums are false for NaN: a row that has a NaN comes out as NaN, not as 0.


@triton.jit
def second_stage(total, a_max, n):
    """gain and offset of rows and max_j x_ij, from the sum and the maximum of phi.

    gain and offset are divided by max_j x_ij.
    """
    gain = tl.where(total <= DEAD, 0.0, n / total)
    top = gain * a_max
    offset = tl.where((n > 3) & (top - 1 > TIED), 1.0, 0.0)
    top = top - offset
    inv_top = tl.where(top <= 0, 0.0, 1 / top)
    return gain * inv_top, offset * inv_top, top


@triton.jit
def reweighted(a, gain, offset):
    """t_ij of a = phi(z_ij), clamped to 1: a may be rounded to more than the row's maximum."""
    return tl.clamp(gain * a - offset, 0.0, 1.0)


@triton.jit
def power_less_one(t, C: tl.constexpr):
    """t^(P - 1) for t >= 0, and 0 at t = 0."""
    if C.P == 1:
        return tl.where(t > 0, 1.0, 0.0)
    elif C.P % 1 == 0:
        result = t
        for bit in tl.static_range(16):  # P - 1 in binary, from the second digit on
            if (C.P - 1) >> (16 - bit):
                result = result * result
                if ((C.P - 1) >> (15 - bit)) & 1:
                    result = result * t
        return result
    else:
        return tl.exp2((C.P - 1) * tl.log2(t))
