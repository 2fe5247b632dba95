"""What the fused kernels share: their arguments, loads and stores, the scores of a tile, stage 2.

A tensor that a kernel writes is contiguous, as [B, L, H, d], or as [.., B, H, L] for statistics of
rows. The inputs of the kernels may have any strides, but their last dimension is contiguous.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attention_paths.kernels.phi import LOG2_E, reciprocal

# As in attention.py; a test compares them.
DEAD = tl.constexpr(1e-30)
TIED = tl.constexpr(16 * 2.0**-23)
# The initial maximum of a row's y with EDGE, where a row may see no key in its first tile: -inf
# would then make the shift infinite.
NO_SCORE = tl.constexpr(-1e30)
# Triton must not compile separate kernels where these arguments are 1 or multiples of 16.
UNSPECIALISED = ["H", "GROUP"]


# ---- arguments ----


class Strided(NamedTuple):
    """A tensor [B, H, L, ..], or the sink's [H], and the strides of its first three dimensions."""

    data: Tensor
    strides: tuple[int, ...]


class OptionalInputs(NamedTuple):
    """The optional inputs of launch.forward."""

    bias: Strided | None
    gain: Strided | None
    sink: Strided | None
    key_bias: Strided | None
    first_key: Strided | None


class Functions(NamedTuple):
    """The functions of a phi.Function. Its shift is None where it does not apply."""

    phi: triton.JITFunction
    shift: triton.JITFunction | None
    total: triton.JITFunction | None


class Constants(NamedTuple):
    """What a kernel is compiled for. A choice that is None or False compiles to nothing."""

    D: int  # the head size
    BLOCK_D: int  # D rounded up to a power of 2, at least 16
    SCALE: float  # of products
    SLOPE: float  # the function's derivative is SLOPE phi'(z)
    RECTIFIED: bool
    CAP: float | None  # the soft cap of y
    P: int | float  # the power of stage 2; 0: there is none
    SIGNED: bool  # phi may be negative
    WINDOW: int | None
    EDGE: bool  # a window or documents hide the first keys from rows
    UNIT: bool  # keys are to be normalised to length 1, in decoding
    PRECISION: str  # of products of float32


# Statistics of rows, float32 [statistic, B, H, Lq], in the symbols of launch.py. The forward pass
# writes STATS:
#     GAIN      gain_i in one stage, gain_i / X_i in two
#     SHIFT     shift_i, if phi is shifted
#     OFFSET    offset_i / X_i                            (two stages)
#     FACTOR    p / W_i                                   (two stages)
#     COUPLING  offset_i p R_i / (W_i n_i)                (two stages)
# backward_rows writes TERMS, from dO and STATS:
#     DELTA     factor_i D_i, with factor_i as in backward.py
#     COUPLED   SLOPE X_i E_i / n_i                       (two stages)
GAIN, SHIFT, OFFSET, FACTOR, COUPLING = (tl.constexpr(i) for i in range(5))
DELTA, COUPLED = (tl.constexpr(i) for i in range(2))


# ---- loads and stores ----


class Head(NamedTuple):
    """A head of a sequence."""

    bh: tl.tensor
    b: tl.tensor
    h: tl.tensor
    H: tl.tensor


class Matrix(NamedTuple):
    """One head [L, D] of a tensor in memory."""

    pointer: tl.tensor
    stride: tl.tensor  # between rows


@triton.jit
def program(H):
    """The head that a program computes, and the index of its block within it."""
    bh = tl.program_id(0)
    index = tl.program_id(1)
    return Head(bh, bh // H, bh % H, H), index


@triton.jit
def matrix_of(x, b, h):
    """One head of a Strided. Its offset has 64 bits: a batch may have over 2^31 elements."""
    pointer = x.data + b.to(tl.int64) * x.strides[0] + h.to(tl.int64) * x.strides[1]
    return Matrix(pointer, x.strides[2])


@triton.jit
def contiguous_matrix(X, head, L, C):
    """One head of a contiguous tensor [B, L, H, D]."""
    pointer = X + (head.b.to(tl.int64) * L * head.H + head.h) * C.D
    return Matrix(pointer, head.H * C.D)


@triton.jit
def pointers_to(matrix, rows, L, C):
    """Pointers [rows, BLOCK_D] to rows of a matrix, and which of them are within bounds."""
    columns = tl.arange(0, C.BLOCK_D)
    inside = (rows < L)[:, None]
    if C.D != C.BLOCK_D:
        inside = inside & (columns < C.D)[None, :]
    return matrix.pointer + rows[:, None] * matrix.stride + columns[None, :], inside


@triton.jit
def load(matrix, rows, L, C):
    """Rows of a matrix as [rows, BLOCK_D], 0 where out of bounds."""
    pointers, inside = pointers_to(matrix, rows, L, C)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store(X, head, rows, L, value, C):
    """Store rows of one head of a contiguous tensor."""
    pointers, inside = pointers_to(contiguous_matrix(X, head, L, C), rows, L, C)
    tl.store(pointers, value.to(X.dtype.element_ty), mask=inside)


@triton.jit
def load_optional(x, head, positions, L, AXIS):
    """Values [positions] of a Strided [B, H, L], with a new axis; None if the Strided is None."""
    if x is not None:  # without an else: None cannot be a result of a function in Triton 3.6
        vector = matrix_of(x, head.b, head.h)
        values = tl.load(vector.pointer + positions * vector.stride, positions < L, 0.0)
        return tl.expand_dims(values, AXIS)


@triton.jit
def load_scalar(x, head, position):
    """The value of a Strided [B, H, L] at a position."""
    vector = matrix_of(x, head.b, head.h)
    return tl.load(vector.pointer + position * vector.stride)


@triton.jit
def store_statistic(STATS, index, value, head, rows, L):
    """Store a statistic of each row: value goes to STATS[index, bh, rows]."""
    pointers = STATS + (tl.num_programs(0) * index + head.bh).to(tl.int64) * L + rows
    tl.store(pointers, value, mask=rows < L)


@triton.jit
def load_statistic(STATS, index, head, rows, L):
    pointers = STATS + (tl.num_programs(0) * index + head.bh).to(tl.int64) * L + rows
    return tl.load(pointers, mask=rows < L, other=0.0)


# ---- matrix products ----


@triton.jit
def dot(a, b, C, acc=None):
    return tl.dot(a, b, acc, input_precision=C.PRECISION)


# ---- which keys a row sees ----
# Each loop over tiles visits them in two or three spans. Span 0 has the tiles that every row of a
# block sees entirely, and needs no mask; span 1 has the tiles on the diagonal; span 2, with EDGE,
# has the tiles on the edge of the window or of documents. A span is the first position of its first
# tile and the end of its positions.


class RowBlock(NamedTuple):
    """A program's block of rows, and the keys and values for them."""

    head: Head
    past: tl.tensor  # keys before the first query
    rows: tl.tensor
    q: tl.tensor
    k: Matrix
    v: Matrix
    spans: tuple[tuple[tl.tensor, tl.tensor], ...]  # of tiles of keys


@triton.jit
def row_block(Q, K, V, H, GROUP, Lq, Lk, OPTIONAL, C, M, N):
    """The RowBlock of a program: M rows, with tiles of N keys."""
    head, index = program(H)
    # longest rows first, so that the GPU does not wait for one long block at the end
    block = tl.num_programs(1) - 1 - index
    past = Lk - Lq
    k = matrix_of(K, head.b, head.h // GROUP)
    v = matrix_of(V, head.b, head.h // GROUP)
    rows = block * M + tl.arange(0, M)
    q = load(matrix_of(Q, head.b, head.h), rows, Lq, C)
    first = block * M + past  # the first row's position among the keys
    unmasked_end = (first + 1) // N * N
    begin = 0
    unmasked_begin = 0
    if C.WINDOW is not None:
        begin = tl.maximum(first + 1 - C.WINDOW, 0)
        unmasked_begin = tl.maximum(first + M - C.WINDOW, 0)
    if OPTIONAL.first_key is not None:  # first keys of the first row and of the last row
        last_row = tl.minimum(block * M + M, Lq) - 1
        begin = tl.maximum(begin, load_scalar(OPTIONAL.first_key, head, block * M))
        unmasked_begin = tl.maximum(unmasked_begin, load_scalar(OPTIONAL.first_key, head, last_row))
    if C.EDGE:
        begin = begin // N * N
        unmasked_begin = tl.minimum(tl.cdiv(unmasked_begin, N) * N, unmasked_end)
    diagonal = (unmasked_end, tl.minimum(first + M, Lk))
    spans = (unmasked_begin, unmasked_end), diagonal, (begin, unmasked_begin)
    return RowBlock(head, past, rows, q, k, v, spans)


@triton.jit
def visible_to(rows, keys, past, first_key, C):
    """Whether rows see keys; rows, keys and first_key (None: no documents) broadcast."""
    visible = keys <= rows + past
    if C.WINDOW is not None:
        visible = visible & (keys > rows + past - C.WINDOW)
    if first_key is not None:
        visible = visible & (keys >= first_key)
    return visible


# ---- the argument y of phi ----


@triton.jit
def soft_capped(y, C):
    """CAP tanh(y / CAP), and its derivative."""
    e = tl.exp2(tl.abs(y) * (-2 * LOG2_E / C.CAP))
    r = reciprocal(1 + e)
    capped = C.CAP * (1 - e) * r
    capped = tl.where(y < 0, -capped, capped)
    # 1 - e would lose the digits of a small y: there by Taylor's series, to 6e-8
    square = (y / C.CAP) * (y / C.CAP)
    near = y * (1 - square * (1 / 3 - 2 / 15 * square))
    return tl.where(square < 0.01, near, capped), 4 * e * r * r


@triton.jit
def argument(y, bias, key_bias, C):
    """y of a tile from its product and the biases of rows and keys, and the soft cap's derivative.

    A bias may be None.
    """
    if C.SCALE != 1:
        y = y * C.SCALE
    cap_slope = y  # without a cap it is unused: Triton 3.6 cannot return a tuple with None
    if C.CAP is not None:
        y, cap_slope = soft_capped(y, C)
    if key_bias is not None:  # biases are added up first, because they may nearly cancel
        bias = key_bias if bias is None else bias + key_bias
    return y if bias is None else y + bias, cap_slope


@triton.jit
def shifted(y, y_max, visible, F, MASKED):
    """y of a tile, shifted, each row's running maximum of y, and the factor of earlier sums of phi.

    A new maximum changes the shift: the factor brings the earlier sums to the new shift.
    """
    visible_y = y
    if MASKED:
        visible_y = tl.where(visible, y, -float("inf"))
    top = tl.maximum(y_max, tl.max(visible_y, 1))
    return y + F.shift(top)[:, None], top, tl.exp2(F.shift(top) - F.shift(y_max))


@triton.jit
def sink_of(sink, h, M):
    """y of a head's sink, for M rows."""
    return tl.zeros([M], tl.float32) + tl.load(sink.data + h)


@triton.jit
def phi_of_maximum(y, F):
    """phi of y where it is the row's maximum."""
    if F.shift is not None:
        y = y + F.shift(y)
    return F.phi(y)[0]


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
def power_p_minus_1(t, C):
    """t^(P - 1) for t >= 0, and 0 at t = 0."""
    if C.P == 1:
        return tl.where(t > 0, 1.0, 0.0)
    elif C.P % 1 == 0 and C.P <= 2**17:
        result = t
        # square-and-multiply over the 17 bits of P - 1, most significant first
        for bit in tl.static_range(16):
            if (C.P - 1) >> (16 - bit):
                result = result * result
                if ((C.P - 1) >> (15 - bit)) & 1:
                    result = result * t
        return result
    else:
        return tl.exp2((C.P - 1) * tl.log2(t))
