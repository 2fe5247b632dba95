"""Fused attention in Triton: forward, backward and decoding, in memory linear in L.

For one head, and row i that sees the keys j < n_i (in attention.py's notation):

    z_ij = c tanh(scale_i s_ij / c) + bias_i + b_j - m (i - j) + shift_i,   a_ij = phi(z_ij)

one stage     O_i = gain_i sum_j a_ij v_j             gain is 1 / sum_j |a_ij|, or 1 / norm_i
two stages    x_ij = gain_i a_ij - offset_i           gain is n_i / sum_j a_ij
              t_ij = relu(x_ij) / max_j x_ij          within 0 to 1, so that no power overflows
              O_i = sum_j t_ij^p v_j / W_i            W_i = sum_j t_ij^p

The soft cap c, a bias b_j for each key and ALiBi's slope m are choices, and so is a sink: one more
key, whose value is 0 and whose score is a logit of its head, which enters every sum and maximum
over j, but not n_i. What a variant does not choose is not compiled. p is a number, or one for each
row; the gradient of a row's is sum_j A_ij ln(t_ij) (dO_i . v_j - D_i).

The second stage needs the row's sum and maximum first: its forward pass reads the keys twice. With
U_i = sum_j t_ij^(p-1) v_j / R_i, R_i = sum_j t_ij^(p-1), and X_i = max_j x_ij, its backward is

    D_i   = dO_i . O_i
    E_i   = offset_i p R_i / (X_i W_i) (dO_i . U_i - D_i)      = sum_j dL/dA_ij A_ij
    dx_ij = p t_ij^(p-1) / (X_i W_i) (dO_i . v_j - D_i)
    da_ij = gain_i dx_ij - E_i gain_i / n_i
    dz_ij = da_ij phi'(z_ij)

so that accumulating U in the forward pass saves the backward pass from computing E separately.
shift_i, which l1 cancels, keeps phi from under- or overflowing (Function.shift); otherwise it is 0.

With a window of W keys, row i sees the keys i - W < j <= i, and n_i is min(i, W). Tiles in which no
row sees a key are never visited.

Most of the time goes to arithmetic on scores, so a factor of a whole row is applied outside of the
tiles wherever it can be. Before the forward pass, q is multiplied by its row's scale (and, where
the variant normalises them, q and k are divided by their lengths), in units in which exp is exp2: a
tile's product is then the argument y of phi. Before the backward pass, dO is multiplied by the
factor of its row's weights. Both are rounded to the inputs' dtype.

Matrix products: one stage has 2 forward and 5 backward, like FlashAttention; two stages have 4 (3
without gradients) and 5. The backward pass accumulates dq with atomics, in 5 products, or, where
the order of summation must be fixed (torch.use_deterministic_algorithms) or a bias or a power is
learnt, in a separate kernel, in 7 products.

Products are in the inputs' dtype and accumulate in float32; everything else is float32. float32
inputs are multiplied in full precision, or in TF32 if torch.backends.cuda.matmul.allow_tf32 is set.
"""

import contextlib
import functools
import importlib.metadata
import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from errors import UserError

# The same as in attention.py, which imports this module; a test compares them.
DEAD = tl.constexpr(1e-30)
TIED = tl.constexpr(16 * 2.0**-23)

# With TRITON_INTERPRET=1 in the environment, Triton's interpreter runs the kernels on a CPU.
INTERPRETED = triton.knobs.runtime.interpret
# The largest score of a row that has seen no key yet: with a window its first tile may have none.
NO_SCORE = tl.constexpr(-1e30)
# Arguments that Triton would otherwise compile separate kernels for when they are 1 or divisible by
# 16.
UNSPECIALISED = ["H", "GROUP"]


# ---- block shapes, and the assembler ----

# (BLOCK_M queries, BLOCK_N keys, warps, pipeline stages) of each kernel with tiles, for head sizes
# up to the key: for 16 bits by generation, and for float32, which takes twice the memory and, in
# full precision, more registers. They are fixed, not measured at run time, because the order of
# summation depends on them: all processes of a run, and a resumed run, must choose the same. They
# were chosen by instructions for a score, spilled registers and shared memory
# (python -m tests.compile_kernels). At most 128 keys: see softplus_total.
Shape = tuple[int, int, int, int]
ONE_STAGE, TWO_STAGES = "forward, one stage", "forward, two stages"
KEYS, QUERIES = "backward, keys", "backward, queries"
SHAPES: dict[str, dict[str, dict[int, Shape]]] = {
    "hopper": {
        ONE_STAGE: {64: (128, 128, 8, 3), 128: (128, 64, 8, 2)},
        TWO_STAGES: {64: (128, 128, 8, 3), 128: (128, 64, 8, 2)},
        KEYS: {64: (64, 128, 8, 2), 128: (32, 128, 8, 2)},
        QUERIES: {64: (64, 64, 4, 2), 128: (64, 32, 4, 2)},
    },
    "ampere": {
        ONE_STAGE: {64: (128, 64, 8, 2), 128: (128, 32, 8, 2)},
        TWO_STAGES: {64: (128, 64, 8, 2), 128: (128, 32, 8, 2)},
        KEYS: {64: (32, 128, 8, 2), 128: (32, 128, 8, 2)},
        QUERIES: {64: (64, 32, 4, 2), 128: (64, 32, 4, 2)},
    },
    "small": {  # 99 KB of shared memory for a block: capabilities 8.6, 8.9 and 12.0
        ONE_STAGE: {64: (128, 64, 8, 2), 128: (128, 32, 8, 2)},
        TWO_STAGES: {64: (128, 64, 8, 2), 128: (128, 32, 8, 2)},
        KEYS: {64: (32, 128, 8, 2), 128: (32, 64, 8, 2)},
        QUERIES: {64: (64, 32, 4, 2), 128: (64, 32, 4, 2)},
    },
    "tf32": dict.fromkeys(
        (ONE_STAGE, TWO_STAGES, KEYS, QUERIES), {64: (32, 32, 4, 2), 128: (32, 16, 4, 1)}
    ),
    "ieee": dict.fromkeys((ONE_STAGE, TWO_STAGES, KEYS, QUERIES), {128: (32, 32, 8, 1)}),
    "interpreter": dict.fromkeys((ONE_STAGE, TWO_STAGES, KEYS, QUERIES), {128: (32, 16, 4, 1)}),
}
# A JSON file of shapes found by measurement, which come before those above: scripts.tune_kernels.
MEASURED = os.environ.get("ATTENTION_SHAPES")


@functools.cache
def measured_shapes() -> dict[str, Shape]:
    if MEASURED is None:
        return {}
    try:
        return json.loads(Path(MEASURED).read_text())["shapes"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"ATTENTION_SHAPES = {MEASURED} is no file of block shapes: {error}"
        ) from error


@functools.cache
def _shape(
    kernel: str, dtype: torch.dtype, d: int, phi: str, p: float, tf32: bool, device: int
) -> Shape:
    generation = capability()
    if generation == 90:
        choose_assembler()
    if generation == 0:
        kind = "interpreter"
    elif dtype == torch.float32:
        kind = "tf32" if tf32 else "ieee"
    else:
        kinds = {80: "ampere", 87: "ampere", 90: "hopper", 100: "hopper", 103: "hopper"}
        kind = kinds.get(generation, "small")
    size = next(size for size in SHAPES[kind][kernel] if d <= size)
    name = shape_name(generation, kernel, dtype, d, phi, p)
    return measured_shapes().get(name, SHAPES[kind][kernel][size])


def capability() -> int:
    """The current GPU's compute capability, such as 90; 0 in Triton's interpreter."""
    return 0 if INTERPRETED else triton.runtime.driver.active.get_current_target().arch


def shape_name(capability: int, kernel: str, dtype: torch.dtype, d: int, phi: str, p: float) -> str:
    """The name of a measured shape: what it may depend on."""
    power = ", powers" if p == PER_ROW.value else f", p {p:g}" if p else ""
    return f"sm_{capability}, {kernel}, {str(dtype).removeprefix('torch.')}, d {d}, {phi}{power}"


def block_shape(kernel: str, q: Tensor, phi: str, p: float) -> dict[str, int]:
    """The arguments of a kernel's launch that are its block shape."""
    device = 0 if INTERPRETED else triton.runtime.driver.active.get_current_device()
    tf32 = torch.backends.cuda.matmul.allow_tf32
    m, n, warps, stages = _shape(kernel, q.dtype, q.shape[3], phi, p, tf32, device)
    return dict(BLOCK_M=m, BLOCK_N=n, num_warps=warps, num_stages=stages)


@functools.cache
def choose_assembler() -> None:
    """On Hopper, have Triton use a newer ptxas if one is installed, and say which is used.

    Before CUDA 13.3, ptxas can reuse the input registers of an asynchronous matrix product that has
    not read them yet (CUDA 13.3's release notes; triton-lang/triton, pull request 11781). Triton
    3.6 and 3.7 bring version 12.8, which has not been seen to do so in these kernels
    (python -m tests.compile_kernels). A newer one's code needs a driver for CUDA 13 (580 or newer),
    which torch's builds for CUDA 13 need too.
    """
    if "TRITON_PTXAS_PATH" in os.environ:
        return
    try:
        package = importlib.metadata.distribution("nvidia-cuda-nvcc")
        version = tuple(map(int, package.version.split(".")[:2]))
    except importlib.metadata.PackageNotFoundError:
        version = 0, 0
    if version >= (13, 3) and (torch.version.cuda or "").startswith("13"):
        path = package.locate_file(f"nvidia/cu{version[0]}/bin/ptxas")
        os.environ["TRITON_PTXAS_PATH"] = str(path)
        said = f"the kernels are assembled by ptxas {package.version} of nvidia-cuda-nvcc"
    else:
        said = (
            "the kernels are assembled by Triton's own ptxas, which has an error for Hopper that "
            "they are not known to trigger; a version without it, for torch's CUDA 13 builds: "
            "pip install 'nvidia-cuda-nvcc>=13.3'"
        )
    if int(os.environ.get("RANK", 0)) == 0:
        print(said, flush=True)


# ---- phi ----
# Most of the kernels' instructions are here (python -m tests.compile_kernels counts them): tl.exp
# takes 5 and a division 9, to be exact for numbers that do not occur, while tl.exp2 and tl.rsqrt
# take 1. Functions made of exp take y = log2(e) z, so that exp(z) is exp2(y).

LOG2_E = tl.constexpr(math.log2(math.e))
# max(x, 0) of a NaN is NaN with this, and otherwise 0.
NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def exp(y):
    return tl.exp2(y)


@triton.jit
def exp2_of_minus_abs(y):
    # not -tl.abs(y), which is 0 - |y| to Triton: a sign is free, a subtraction is not
    return tl.exp2(tl.abs(y) * -1.0)


@triton.jit
def reciprocal(x):
    """1 / x for x between 1e-18 and 1e18."""
    return tl.rsqrt(x * x)


@triton.jit
def sigmoid(y):
    e = exp2_of_minus_abs(y)
    return tl.where(y >= 0, 1.0, e) * reciprocal(1 + e)


@triton.jit
def sigmoid_slope(y):
    e = exp2_of_minus_abs(y)
    r = reciprocal(1 + e)
    return e * r * r


# softplus is log2(1 + exp2(y)) here, in units of ln 2: max(y, 0) + log2(1 + e), e = exp2(-|y|).
# log2(1 + e) would lose the digits of a small e, so log2(1 + e) / e is a polynomial: log2(e) times
# the Chebyshev interpolation of log1p(e) / e on [0, 1]. The slope is sigmoid(z) = 2^y / (1 + 2^y).


@triton.jit
def log2_of_1_plus(e):
    # degree 8, for e from 0 to 1: largest relative error 2.3e-7 in float32
    r = 0.00739540178 * e - 0.04194501
    r = r * e + 0.111832073
    r = r * e - 0.196238955
    r = r * e + 0.275221213
    r = r * e - 0.358299067
    r = r * e + 0.480678868
    r = r * e - 0.721339523
    r = r * e + 1.44269495
    return r * e


@triton.jit
def softplus(y):
    return tl.maximum(y, 0.0) + log2_of_1_plus(exp2_of_minus_abs(y))


@triton.jit
def softplus_slope(y):
    return tl.exp2(y - softplus(y))


@triton.jit
def softplus16(y):
    # degree 5: largest relative error 9.5e-6; after a 15th power still below rounding to 16 bits
    e = exp2_of_minus_abs(y)
    r = -0.033822046 * e + 0.144471096
    r = r * e - 0.30163801
    r = r * e + 0.468658879
    r = r * e - 0.720358773
    r = r * e + 1.44268147
    return tl.maximum(y, 0.0) + r * e


@triton.jit
def softplus16_slope(y):
    return tl.exp2(y - softplus16(y))


@triton.jit
def _product_less_one(q, r):
    """(1 + q) (1 + r) - 1, which keeps the digits of small q and r."""
    return q + r + q * r


@triton.jit
def softplus_total(y):
    """The sum of softplus over each row of a tile of at most 128 keys; hidden y are -inf.

    A product of all 1 + e has one logarithm, that of a sum has one for each e. It is at most 2 to
    the number of keys, which for 128 is infinite in float32.
    """
    q = tl.reduce(exp2_of_minus_abs(y), 1, _product_less_one)
    logarithm = tl.where(q <= 1, log2_of_1_plus(q), tl.log2(1 + q))
    logarithm = tl.minimum(logarithm, 1.0 * y.shape[1], propagate_nan=NAN)
    return tl.sum(tl.maximum(y, 0.0), 1) + logarithm


@triton.jit
def relu(y):
    return tl.maximum(y, 0.0, propagate_nan=NAN)


@triton.jit
def relu_slope(y):
    return tl.where(y > 0, 1.0, 0.0)


@triton.jit
def relu2(y):
    return relu(y) * relu(y)


@triton.jit
def relu2_slope(y):
    return 2 * tl.maximum(y, 0.0)


@triton.jit
def relu6(y):
    return tl.minimum(relu(y), 6.0, propagate_nan=NAN)


@triton.jit
def relu6_slope(y):
    return tl.where((y > 0) & (y < 6), 1.0, 0.0)


@triton.jit
def gelu(y):
    return 0.5 * y * (1 + tl.erf(y * 0.7071067811865476))


@triton.jit
def gelu_slope(y):
    density = 0.3989422804014327 * tl.exp2(-0.7213475204444817 * y * y)
    return 0.5 * (1 + tl.erf(y * 0.7071067811865476)) + y * density


@triton.jit
def mish(y):
    # tanh(softplus(y)) = m / (m + 2) with m = e (e + 2), which is 1 in float32 from y = 20 on
    e = tl.exp2(tl.minimum(y, 20.0) * LOG2_E)
    m = e * (e + 2)
    return y * m * reciprocal(m + 2)


@triton.jit
def mish_slope(y):
    e = tl.exp2(tl.minimum(y, 20.0) * LOG2_E)
    m = e * (e + 2)
    r = reciprocal(m + 2)
    return m * r + y * (4 * (m + 1) * r * r) * (e * reciprocal(1 + e))


@triton.jit
def identity(y):
    return y


@triton.jit
def identity_slope(y):
    return y * 0 + 1


@triton.jit
def shift_to_top(top):
    return -top


@triton.jit
def shift_to_top_or_zero(top):
    return tl.minimum(-top, 0.0)


@triton.jit
def shift_out_of_tail(top):
    return tl.maximum(-57.70780163555854 - top, 0.0)  # -40 in log2


class Function(NamedTuple):
    """A phi as the kernels compute it: function(y) is `value` phi(z) at y = `argument` z."""

    function: triton.JITFunction
    slope: triton.JITFunction  # phi'(z)
    # Of a row's largest y. Adding a shift to y must multiply the function by exp2(shift).
    shift: triton.JITFunction | None = None
    # The sum of the function over each row of a tile, where that takes less than summing it. The
    # function must be increasing.
    total: triton.JITFunction | None = None
    argument: float = 1.0
    value: float = 1.0
    # phi and |phi| have no kink, across which the rounding of a scaled q could move a score.
    smooth: bool = False
    # phi is the function less 1, or with a shift less exp2(shift). Where it is negative it counts
    # in the l1 norm, by its absolute value, but the weight is 0. Its shift always applies, and it
    # has one stage.
    rectified: bool = False


IN_LOG2 = dict(argument=LOG2_E.value, smooth=True)
SOFTPLUS = dict(shift=shift_out_of_tail, total=softplus_total, value=LOG2_E.value, **IN_LOG2)
# Phi.kernel is a key of this table. For 16-bit inputs an entry NAME16, if there is one, replaces
# NAME.
PHIS = {
    "exp": Function(exp, exp, shift_to_top, **IN_LOG2),
    "sigmoid": Function(sigmoid, sigmoid_slope, shift_out_of_tail, **IN_LOG2),
    "softplus": Function(softplus, softplus_slope, **SOFTPLUS),
    "softplus16": Function(softplus16, softplus16_slope, **SOFTPLUS),
    # relu(exp(z) - 1) / sum |exp(z) - 1|, Zuhri et al. 2025. Their code divides by exp of the
    # largest z, and adds 1e-6 (its kernel) or 1e-8 to the sum; here it is the largest of the z and
    # 0, so that a row far below 0 does not overflow, and a row of zeros is dead.
    "softpick": Function(exp, exp, shift_to_top_or_zero, argument=LOG2_E.value, rectified=True),
    "relu": Function(relu, relu_slope),
    "relu2": Function(relu2, relu2_slope),
    "relu6": Function(relu6, relu6_slope),
    "gelu": Function(gelu, gelu_slope),
    "mish": Function(mish, mish_slope),
    "identity": Function(identity, identity_slope),
}


# ---- shared by the kernels ----
# The tensors that this module makes are laid out as [B, L, H, d] and need no strides; those of
# others have one for the sequence, the head and the row, and columns that are contiguous.


@triton.jit
def _at(X, strides, b, h):
    """A pointer to one head of X [B, H, ..], in 64 bits: a batch may have over 2^31 elements."""
    return X + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]


@triton.jit
def _own(X, b, h, H, L, D: tl.constexpr):
    """The same in a tensor of this module."""
    return X + (b.to(tl.int64) * L * H + h) * D


@triton.jit
def _numbers_of(x, b, h, rows, L, other):
    """The numbers of these rows, of x [B, H, L] given as `_strided`."""
    return tl.load(_at(x.data, x.strides, b, h) + rows * x.strides[2], rows < L, other)


@triton.jit
def _load(X, stride, rows, L, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of X [L, D] as [rows, BLOCK_D], 0 where out of bounds."""
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < L)[:, None]
    if D != BLOCK_D:
        inside = inside & (columns < D)[None, :]
    return tl.load(X + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store(X, stride, rows, L, value, D: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < L)[:, None]
    if D != BLOCK_D:
        inside = inside & (columns < D)[None, :]
    at = X + rows[:, None] * stride + columns[None, :]
    tl.store(at, value.to(X.dtype.element_ty), mask=inside)


# The numbers of rows, float32 [.., B H, Lq]. ROWS, for the backward pass, has ALPHA, the factor of
# q, GAIN and, of two stages, OFFSET, WEIGHT and COUPLING; and last, where they are needed, what is
# added to phi's argument, its shift included, the shift alone, and the power. TERMS has those that
# follow from dO.
ALPHA, GAIN, OFFSET, WEIGHT, COUPLING = (tl.constexpr(i) for i in range(5))
DELTA, COUPLED, FACTOR = (tl.constexpr(i) for i in range(3))


@triton.jit
def _bias_at(P: tl.constexpr):
    return 5 if P else 2


@triton.jit
def _shift_at(P: tl.constexpr):
    return _bias_at(P) + 1


# P, the power of stage 2, is 0 for one stage, and this where each row has one of its own.
PER_ROW = tl.constexpr(-1)
POWER = tl.constexpr(7)


@triton.jit
def _save(ROWS, index, value, bh, rows, L):
    """Store a number of each row: value goes to ROWS[index, bh, rows]."""
    at = ROWS + (tl.num_programs(0) * index + bh).to(tl.int64) * L + rows
    tl.store(at, value, mask=rows < L)


@triton.jit
def _saved(ROWS, index, bh, rows, L):
    at = ROWS + (tl.num_programs(0) * index + bh).to(tl.int64) * L + rows
    return tl.load(at, mask=rows < L, other=0.0)


@triton.jit
def _key_bias(ADDED, b, h, keys, Lk, ARGUMENT: tl.constexpr):
    return ARGUMENT * _numbers_of(ADDED.key_bias, b, h, keys, Lk, 0.0)


@triton.jit
def _soft_capped(y, CAP: tl.constexpr):
    """CAP tanh(y / CAP), and its slope."""
    e = tl.exp2(tl.abs(y) * (-2 * LOG2_E / CAP))
    r = reciprocal(1 + e)
    capped = CAP * (1 - e) * r
    return tl.where(y < 0, -capped, capped), 4 * e * r * r


@triton.jit
def _argument(
    y, alpha, beta, distance, slope, key_bias, CAP: tl.constexpr, EXACT: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """y of a tile from its product and numbers of its rows and keys, and the soft cap's slope.

    The numbers broadcast against the tile.
    """
    if EXACT:
        y = y * alpha
    cap_slope = y
    if CAP is not None:
        y, cap_slope = _soft_capped(y, CAP)
    if key_bias is not None:  # added to the row's own bias first, which it may nearly cancel
        beta = key_bias + beta if BIASED else key_bias
    if BIASED or key_bias is not None:
        y = y + beta
    if slope is not None:
        y = y - slope * distance.to(tl.float32)
    return y, cap_slope


@triton.jit
def _shifted(y, y_max, visible, SHIFT: tl.constexpr, MASKED: tl.constexpr):
    """A tile's y, shifted, each row's running maximum of y, and the factor for earlier sums of phi.

    A new maximum changes the shift, and with it those sums.
    """
    seen = tl.where(visible, y, -float("inf")) if MASKED else y
    top = tl.maximum(y_max, tl.max(seen, 1))
    return y + SHIFT(top)[:, None], top, tl.exp2(SHIFT(top) - SHIFT(y_max))


@triton.jit
def _sink(
    ADDED, h, M: tl.constexpr, PHI: tl.constexpr, SHIFT: tl.constexpr, ARGUMENT: tl.constexpr
):
    """The y of a head's sink for M rows, and phi of it where it is the row's maximum."""
    y = tl.zeros([M], tl.float32) + ARGUMENT * tl.load(ADDED.sink + h)
    return y, PHI(y + SHIFT(y) if SHIFT is not None else y)


# Conditions on sums are false for NaN, so that a row with a NaN in it is NaN, not 0.


@triton.jit
def _second_stage(total, a_max, n):
    """gain and offset of rows, and max_j x_ij, from phi's sum and maximum.

    Both are divided by that maximum.
    """
    gain = tl.where(total <= DEAD, 0.0, n / total)
    top = gain * a_max
    offset = tl.where((n > 3) & (top - 1 > TIED), 1.0, 0.0)
    top = top - offset
    inv_top = tl.where(top <= 0, 0.0, 1 / top)
    return gain * inv_top, offset * inv_top, top


@triton.jit
def _reweighted(a, gain, offset):
    """t_ij of a = phi(z_ij), clamped to 1: a recomputed a may be rounded above its maximum."""
    return tl.clamp(gain * a - offset, 0.0, 1.0)


@triton.jit
def _power_less_one(t, power, P: tl.constexpr):
    """t^(p - 1) for t >= 0, and 0 at t = 0. p is P, or `power` if P is PER_ROW."""
    if P == PER_ROW:
        return tl.where(t > 0, tl.exp2((power - 1) * tl.log2(t)), 0.0)
    elif P == 1:
        return tl.where(t > 0, 1.0, 0.0)
    elif P % 1 == 0:
        result = t
        for bit in tl.static_range(16):  # p - 1 in binary, from the second digit on
            if (P - 1) >> (16 - bit):
                result = result * result
                if ((P - 1) >> (15 - bit)) & 1:
                    result = result * t
        return result
    else:
        return tl.exp2((P - 1) * tl.log2(t))


@triton.jit
def _inverse_norm(x):
    """1 / |x| of every row: see attention.l2_normalise."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-12)


@triton.jit
def _project(dy, y, factor):
    """The part of a gradient of y = factor x that is orthogonal to x, for factor ~ 1 / |x|."""
    y = y.to(tl.float32)
    squared = tl.sum(y * y, 1) + 1e-12 * factor * factor
    along = tl.sum(dy * y, 1) / tl.maximum(squared, 1e-30)
    return dy - along[:, None] * y


# ---- before the forward pass ----


@triton.jit
def _scale_queries(
    Q, scale, bias, norm, powers, OUT, ROWS, strides, H, L, ARGUMENT: tl.constexpr,
    VALUE: tl.constexpr, P: tl.constexpr, UNIT: tl.constexpr, EXACT: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """q' = alpha q, and the ROWS that are known by now.

    If EXACT, q' is q, and products with it are multiplied by alpha.
    """
    bh, rows = tl.program_id(0), tl.program_id(1) * M + tl.arange(0, M)
    b, h = bh // H, bh % H
    q = _load(_at(Q, strides, b, h), strides[2], rows, L, D, BLOCK_D).to(tl.float32)
    alpha = ARGUMENT * _numbers_of(scale, b, h, rows, L, 0.0)
    if UNIT:
        alpha *= _inverse_norm(q)
    scaled = q if EXACT else q * alpha[:, None]
    _store(_own(OUT, b, h, H, L, D), H * D, rows, L, scaled, D, BLOCK_D)
    _save(ROWS, ALPHA, alpha, bh, rows, L)
    if bias is not None:
        _save(ROWS, _bias_at(P), ARGUMENT * _numbers_of(bias, b, h, rows, L, 0.0), bh, rows, L)
    if powers is not None:
        _save(ROWS, POWER, _numbers_of(powers, b, h, rows, L, 1.0), bh, rows, L)
    if norm is not None:
        _save(ROWS, GAIN, 1 / (VALUE * _numbers_of(norm, b, h, rows, L, 1.0)), bh, rows, L)


@triton.jit
def _normalise_keys(
    K, OUT, INVERSE, strides, H, L, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr
):
    """k / |k|, and 1 / |k|."""
    bh, rows = tl.program_id(0), tl.program_id(1) * M + tl.arange(0, M)
    b, h = bh // H, bh % H
    k = _load(_at(K, strides, b, h), strides[2], rows, L, D, BLOCK_D).to(tl.float32)
    inverse = _inverse_norm(k)
    _store(_own(OUT, b, h, H, L, D), H * D, rows, L, k * inverse[:, None], D, BLOCK_D)
    _save(INVERSE, 0, inverse, bh, rows, L)


# ---- forward ----


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


@triton.jit
def _arguments(
    q, K, k_stride, alpha, beta, rows, keys, past, Lk, ADDED, b, h, slope, ARGUMENT: tl.constexpr,
    CAP: tl.constexpr, EXACT: tl.constexpr, BIASED: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y of a tile [rows, keys]."""
    k = _load(K, k_stride, keys, Lk, D, BLOCK_D)
    y = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    key_bias = (
        None if ADDED.key_bias is None else _key_bias(ADDED, b, h, keys, Lk, ARGUMENT)[None, :]
    )
    y, _ = _argument(
        y, alpha[:, None], beta[:, None], rows[:, None] + past - keys[None, :], slope, key_bias,
        CAP, EXACT, BIASED,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=UNSPECIALISED)
def _forward_one_stage(
    Q, K, V, OUT, ROWS, k_strides, v_strides, H, GROUP, Lq, Lk, ADDED, PHI: tl.constexpr,
    SHIFT: tl.constexpr, RECTIFIED: tl.constexpr, ARGUMENT: tl.constexpr, CAP: tl.constexpr,
    L1: tl.constexpr, EXACT: tl.constexpr, BIASED: tl.constexpr, SAVE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # longest rows first, so that the GPU does not wait for one long block at the end
    bh, block = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    b, h, past = bh // H, bh % H, Lk - Lq
    K, V = _at(K, k_strides, b, h // GROUP), _at(V, v_strides, b, h // GROUP)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q = _load(_own(Q, b, h, H, Lq, D), H * D, rows, Lq, D, BLOCK_D)
    alpha = _saved(ROWS, ALPHA, bh, rows, Lq)
    beta = _saved(ROWS, _bias_at(0), bh, rows, Lq) if BIASED else alpha * 0
    slope = None if ADDED.slopes is None else ARGUMENT * tl.load(ADDED.slopes + h)
    tiles = _key_tiles(block, past, Lk, BLOCK_M, BLOCK_N, WINDOW)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    a_max = tl.full([BLOCK_M], DEAD, tl.float32)
    y_max = tl.full([BLOCK_M], -float("inf") if WINDOW is None else NO_SCORE, tl.float32)
    if ADDED.sink is not None:
        y_max, total = _sink(ADDED, h, BLOCK_M, PHI, SHIFT, ARGUMENT)
    for PART in tl.static_range(2 if WINDOW is None else 3):
        for start in range(tiles[PART][0], tiles[PART][1], BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            y = _arguments(
                q, K, k_strides[2], alpha, beta, rows, keys, past, Lk, ADDED, b, h, slope,
                ARGUMENT, CAP, EXACT, BIASED, D, BLOCK_D, PRECISION,
            )  # fmt: skip
            visible = _visible(keys[None, :], rows[:, None], past, WINDOW)
            if SHIFT is not None:
                y, y_max, rescale = _shifted(y, y_max, visible, SHIFT, PART > 0)
                total, acc = total * rescale, acc * rescale[:, None]
            a = PHI(y)
            if RECTIFIED:
                a = a - tl.exp2(SHIFT(y_max))[:, None]
            if PART > 0:
                a = tl.where(visible, a, 0.0)
            if L1:
                total += tl.sum(tl.abs(a), 1)
            if RECTIFIED:
                a = relu(a)
            v = _load(V, v_strides[2], keys, Lk, D, BLOCK_D)
            if v.dtype == tl.float16:  # its range is too small for unnormalised weights
                before, a_max = a_max, tl.maximum(a_max, tl.max(tl.abs(a), 1))
                a, acc = a / a_max[:, None], acc * (before / a_max)[:, None]
            acc = tl.dot(a.to(v.dtype), v, acc, input_precision=PRECISION)

    if L1:
        gain = tl.where(total <= DEAD, 0.0, 1 / total)
    else:
        gain = _saved(ROWS, GAIN, bh, rows, Lq)
    restored = gain * a_max if V.dtype.element_ty == tl.float16 else gain
    _store(_own(OUT, b, h, H, Lq, D), H * D, rows, Lq, acc * restored[:, None], D, BLOCK_D)
    if SAVE:
        if L1:
            _save(ROWS, GAIN, gain, bh, rows, Lq)
        if SHIFT is not None:
            _save(ROWS, _bias_at(0), beta + SHIFT(y_max), bh, rows, Lq)
            if RECTIFIED or ADDED.sink is not None:
                _save(ROWS, _shift_at(0), SHIFT(y_max), bh, rows, Lq)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _forward_two_stages(
    Q, K, V, OUT, U, ROWS, k_strides, v_strides, H, GROUP, Lq, Lk, ADDED, PHI: tl.constexpr,
    SHIFT: tl.constexpr, TOTAL: tl.constexpr, ARGUMENT: tl.constexpr, CAP: tl.constexpr,
    P: tl.constexpr, EXACT: tl.constexpr, BIASED: tl.constexpr, SAVE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    bh, block = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    b, h, past = bh // H, bh % H, Lk - Lq
    K, V = _at(K, k_strides, b, h // GROUP), _at(V, v_strides, b, h // GROUP)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q = _load(_own(Q, b, h, H, Lq, D), H * D, rows, Lq, D, BLOCK_D)
    alpha = _saved(ROWS, ALPHA, bh, rows, Lq)
    beta = _saved(ROWS, _bias_at(P), bh, rows, Lq) if BIASED else alpha * 0
    slope = None if ADDED.slopes is None else ARGUMENT * tl.load(ADDED.slopes + h)
    tiles = _key_tiles(block, past, Lk, BLOCK_M, BLOCK_N, WINDOW)

    # ---- pass 1: each row's sum and maximum of phi ----
    # compensated summation: over a thousand tiles a plain sum is too inexact to detect a tied row
    total, a_max = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    compensation = tl.zeros([BLOCK_M], tl.float32)
    y_max = tl.full([BLOCK_M], -float("inf") if WINDOW is None else NO_SCORE, tl.float32)
    y_sink = y_max
    if ADDED.sink is not None:
        y_sink, total = _sink(ADDED, h, BLOCK_M, PHI, SHIFT, ARGUMENT)
        y_max, a_max = y_sink, total
    for PART in tl.static_range(2 if WINDOW is None else 3):
        for start in range(tiles[PART][0], tiles[PART][1], BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            y = _arguments(
                q, K, k_strides[2], alpha, beta, rows, keys, past, Lk, ADDED, b, h, slope,
                ARGUMENT, CAP, EXACT, BIASED, D, BLOCK_D, PRECISION,
            )  # fmt: skip
            visible = _visible(keys[None, :], rows[:, None], past, WINDOW)
            if SHIFT is not None:
                y, y_max, rescale = _shifted(y, y_max, visible, SHIFT, PART > 0)
                total, compensation = total * rescale, compensation * rescale
                a_max = a_max * rescale
            if TOTAL is not None:
                if PART > 0:
                    y = tl.where(visible, y, -float("inf"))
                part = TOTAL(y)
                if SHIFT is None:
                    y_max = tl.maximum(y_max, tl.max(y, 1))
            else:
                a = PHI(y)
                if PART > 0:
                    a = tl.where(visible, a, 0.0)
                part = tl.sum(a, 1)
                a_max = tl.maximum(a_max, tl.max(a, 1))
            part -= compensation
            compensation = (total + part - total) - part
            total += part
    if SHIFT is not None:
        shift = SHIFT(y_max)
        beta, y_max, y_sink = beta + shift, y_max + shift, y_sink + shift
        if SAVE and ADDED.sink is not None:
            _save(ROWS, _shift_at(P), shift, bh, rows, Lq)
    if TOTAL is not None:  # the function is increasing
        a_max = TOTAL(y_max[:, None])
    n = rows + past + 1
    if WINDOW is not None:
        n = tl.minimum(n, WINDOW)
    n = n.to(tl.float32)
    gain, offset, top = _second_stage(total, a_max, n)

    # ---- pass 2: the re-weighted weights, times V ----
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc_u = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total_w, total_u = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    power = _saved(ROWS, POWER, bh, rows, Lq) if P == PER_ROW else gain
    if ADDED.sink is not None:
        t_sink = _reweighted(PHI(y_sink), gain, offset)
        total_u = _power_less_one(t_sink, power, P)
        total_w = total_u * t_sink
    SHIFTED: tl.constexpr = BIASED or SHIFT is not None
    for PART in tl.static_range(2 if WINDOW is None else 3):
        for start in range(tiles[PART][0], tiles[PART][1], BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            y = _arguments(
                q, K, k_strides[2], alpha, beta, rows, keys, past, Lk, ADDED, b, h, slope,
                ARGUMENT, CAP, EXACT, SHIFTED, D, BLOCK_D, PRECISION,
            )  # fmt: skip
            t = _reweighted(PHI(y), gain[:, None], offset[:, None])
            if PART > 0:
                t = tl.where(_visible(keys[None, :], rows[:, None], past, WINDOW), t, 0.0)
            u = _power_less_one(t, power[:, None], P)
            w = u * t
            total_w += tl.sum(w, 1)
            v = _load(V, v_strides[2], keys, Lk, D, BLOCK_D)
            acc = tl.dot(w.to(v.dtype), v, acc, input_precision=PRECISION)
            if SAVE:
                total_u += tl.sum(u, 1)
                acc_u = tl.dot(u.to(v.dtype), v, acc_u, input_precision=PRECISION)

    # where all weights are 0: 0 for a dead row, whose gain is 0, and NaN for a gain of NaN
    inv_w = tl.where(total_w > 0, 1 / total_w, 0 * gain)
    _store(_own(OUT, b, h, H, Lq, D), H * D, rows, Lq, acc * inv_w[:, None], D, BLOCK_D)
    if SAVE:
        inv_u = tl.where(total_u > 0, 1 / total_u, 0.0)
        _store(_own(U, b, h, H, Lq, D), H * D, rows, Lq, acc_u * inv_u[:, None], D, BLOCK_D)
        _save(ROWS, GAIN, gain, bh, rows, Lq)
        _save(ROWS, OFFSET, offset, bh, rows, Lq)
        _save(ROWS, WEIGHT, inv_w if P == PER_ROW else P * inv_w, bh, rows, Lq)
        # E_i / n_i without its factor (dO_i . U_i - D_i)
        p = power if P == PER_ROW else P
        _save(ROWS, COUPLING, offset * top * p * total_u * inv_w / n, bh, rows, Lq)
        if SHIFT is not None:
            _save(ROWS, _bias_at(P), beta, bh, rows, Lq)


# ---- backward ----


# A tile's dz from dp_ij = dO'_i . v_j, with dO'_i = factor_i dO_i and delta_i = factor_i D_i:
# one stage    factor = gain     A = factor a         dz = (dp - delta) phi'(z)
# two stages   factor = p / W    A = factor t^p / p   dz = gain (t^(p-1) (dp-delta) - E / n) phi'(z)
# with delta times a's sign in one stage, and none there without l1. Where rows have powers of their
# own, factor is 1 / W, and p multiplies t^(p-1) in dz. dv is then the sum of a, t^p / p or t^p
# times dO'. In float16, whose range is too small for it, dO' is dO, and the factor is applied to dp
# and A.


@triton.jit
def _power_gradient(t, dt):
    """The gradient of a power by its part of t^p, from dt = t^(p-1) (dp - delta)."""
    return tl.where(t > 0, dt * t * tl.log2(t) * (1 / LOG2_E), 0.0)


@triton.jit
def _backward_rows(
    DOUT, OUT, U, SCALED, ROWS, TERMS, DSINK, DPOWERS, dout_strides, H, L, ADDED,
    PHI: tl.constexpr, SLOPE: tl.constexpr, SHIFTED: tl.constexpr, ARGUMENT: tl.constexpr,
    VALUE: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """dO', the TERMS of rows and, where they are learnt, the sink's gradient and part of a power's.

    The sink's has a part for each row, and that of a row's power is the sink's.
    """
    bh, rows = tl.program_id(0), tl.program_id(1) * M + tl.arange(0, M)
    b, h = bh // H, bh % H
    dout = _load(_at(DOUT, dout_strides, b, h), dout_strides[2], rows, L, D, BLOCK_D)
    dout = dout.to(tl.float32)
    out = _load(_own(OUT, b, h, H, L, D), H * D, rows, L, D, BLOCK_D).to(tl.float32)
    along = tl.sum(dout * out, 1)
    factor = _saved(ROWS, WEIGHT if P else GAIN, bh, rows, L)
    if P:
        u = _load(_own(U, b, h, H, L, D), H * D, rows, L, D, BLOCK_D).to(tl.float32)
        coupled = _saved(ROWS, COUPLING, bh, rows, L) * (tl.sum(dout * u, 1) - along)
        _save(TERMS, COUPLED, coupled, bh, rows, L)
    _save(TERMS, DELTA, factor * along, bh, rows, L)
    dpower = tl.zeros([M], tl.float32)
    if ADDED.sink is not None:  # the gradients of a tile whose value is 0
        y = tl.zeros([M], tl.float32) + ARGUMENT * tl.load(ADDED.sink + h)
        if SHIFTED:
            y += _saved(ROWS, _shift_at(P), bh, rows, L)
        dz = -factor * along
        if P:
            gain = _saved(ROWS, GAIN, bh, rows, L)
            t = _reweighted(PHI(y), gain, _saved(ROWS, OFFSET, bh, rows, L))
            power = _saved(ROWS, POWER, bh, rows, L) if P == PER_ROW else gain
            dt = _power_less_one(t, power, P) * dz
            if P == PER_ROW:
                dpower = _power_gradient(t, dt)
                dt = dt * power
            dz = (dt - coupled) * gain
        if DSINK is not None:
            _save(DSINK, 0, VALUE * dz * SLOPE(y), bh, rows, L)
    if DPOWERS is not None:
        _save(DPOWERS, 0, dpower, bh, rows, L)
    if SCALED.dtype.element_ty == tl.float16:
        _save(TERMS, FACTOR, factor, bh, rows, L)
    else:
        dout = dout * factor[:, None]
    _store(_own(SCALED, b, h, H, L, D), H * D, rows, L, dout, D, BLOCK_D)


@triton.jit
def _row_terms(
    ROWS, TERMS, bh, rows, L, AXIS: tl.constexpr, P: tl.constexpr, EXACT: tl.constexpr,
    BIASED: tl.constexpr, RECTIFIED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The numbers of each row that a tile's gradients need, with a new axis for the keys."""
    delta = _saved(TERMS, DELTA, bh, rows, L)
    alpha, beta, gain, offset, coupled, factor = delta, delta, delta, delta, delta, delta
    floor, power = delta, delta
    if EXACT:
        alpha = _saved(ROWS, ALPHA, bh, rows, L)
    if BIASED:
        beta = _saved(ROWS, _bias_at(P), bh, rows, L)
    if P:
        gain = _saved(ROWS, GAIN, bh, rows, L)
        offset = _saved(ROWS, OFFSET, bh, rows, L)
        coupled = _saved(TERMS, COUPLED, bh, rows, L)
    if P == PER_ROW:
        power = _saved(ROWS, POWER, bh, rows, L)
    if HALF:
        factor = _saved(TERMS, FACTOR, bh, rows, L)
    if RECTIFIED:
        floor = tl.exp2(_saved(ROWS, _shift_at(P), bh, rows, L))
    return (
        tl.expand_dims(alpha, AXIS), tl.expand_dims(beta, AXIS), tl.expand_dims(gain, AXIS),
        tl.expand_dims(offset, AXIS), tl.expand_dims(delta, AXIS), tl.expand_dims(coupled, AXIS),
        tl.expand_dims(factor, AXIS), tl.expand_dims(floor, AXIS), tl.expand_dims(power, AXIS),
    )  # fmt: skip


@triton.jit
def _gradients(
    y, dp, terms, visible, distance, slope, key_bias, PHI: tl.constexpr, SLOPE: tl.constexpr,
    CAP: tl.constexpr, SIGNED: tl.constexpr, RECTIFIED: tl.constexpr, P: tl.constexpr,
    L1: tl.constexpr, EXACT: tl.constexpr, BIASED: tl.constexpr, HALF: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """A tile's weights, but for their factors, dz, and the gradients of its product and the power.

    They are computed from products and the terms of rows.
    """
    alpha, beta, gain, offset, delta, coupled, factor, floor, power = terms
    y, cap_slope = _argument(y, alpha, beta, distance, slope, key_bias, CAP, EXACT, BIASED)
    a = PHI(y)
    dpower = a
    if HALF:
        dp = dp * factor
    if P:
        t = _reweighted(a, gain, offset)
        u = _power_less_one(t, power, P)
        A = u * t
        dt = u * (dp - delta)
        if P == PER_ROW:
            dpower = _power_gradient(t, dt)
            dt = dt * power
        dz = (dt - coupled) * SLOPE(y) * gain
    else:
        A = a
        if RECTIFIED:
            a = a - floor
            A, dp = relu(a), tl.where(a > 0, dp, 0.0)
        if L1:  # the gradient of sum |a|
            dp -= tl.where(a > 0, delta, tl.where(a < 0, -delta, 0.0)) if SIGNED else delta
        dz = dp * SLOPE(y)
    if HALF:
        A = A * factor
    if MASKED:
        A, dz = tl.where(visible, A, 0.0), tl.where(visible, dz, 0.0)
        dpower = tl.where(visible, dpower, 0.0)
    return A, dz, dz if CAP is None else dz * cap_slope, dpower


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


@triton.jit(do_not_specialize=UNSPECIALISED)
def _backward_keys(
    Q, K, V, DOUT, INVERSE, ROWS, TERMS, DQ, DK, DV, DKEY_BIAS, k_strides, v_strides, H, GROUP, Lq,
    Lk, ADDED, PHI: tl.constexpr, SLOPE: tl.constexpr, ARGUMENT: tl.constexpr, VALUE: tl.constexpr,
    CAP: tl.constexpr, SIGNED: tl.constexpr, RECTIFIED: tl.constexpr, P: tl.constexpr,
    L1: tl.constexpr, EXACT: tl.constexpr, BIASED: tl.constexpr, UNIT: tl.constexpr,
    ATOMIC: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, its bias's gradient if learnt and, if ATOMIC, its part of dq.

    Tiles are [keys, rows].
    """
    bh, block = tl.program_id(0), tl.program_id(1)
    b, h, past = bh // H, bh % H, Lk - Lq
    Q, DOUT = _own(Q, b, h, H, Lq, D), _own(DOUT, b, h, H, Lq, D)
    DQ = _own(DQ, b, h, H, Lq, D)
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = _load(_at(K, k_strides, b, h // GROUP), k_strides[2], keys, Lk, D, BLOCK_D)
    v = _load(_at(V, v_strides, b, h // GROUP), v_strides[2], keys, Lk, D, BLOCK_D)
    slope = None if ADDED.slopes is None else ARGUMENT * tl.load(ADDED.slopes + h)
    bias = None if ADDED.key_bias is None else _key_bias(ADDED, b, h, keys, Lk, ARGUMENT)[:, None]
    HALF: tl.constexpr = DOUT.dtype.element_ty == tl.float16
    tiles = _row_tiles(block, past, Lq, BLOCK_M, BLOCK_N, WINDOW)

    dk, dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dkey_bias = tl.zeros([BLOCK_N], tl.float32)
    for PART in tl.static_range(2 if WINDOW is None else 3):
        for start in range(tiles[PART][0], tiles[PART][1], BLOCK_M):
            rows = start + tl.arange(0, BLOCK_M)
            q = _load(Q, H * D, rows, Lq, D, BLOCK_D)
            dout = _load(DOUT, H * D, rows, Lq, D, BLOCK_D)
            terms = _row_terms(ROWS, TERMS, bh, rows, Lq, 0, P, EXACT, BIASED, RECTIFIED, HALF)
            # 0 for rows that do not exist, whose y it could make infinite
            key_bias = None if bias is None else bias * tl.where(rows < Lq, 1.0, 0.0)[None, :]
            y = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
            A, dz, ds, _ = _gradients(
                y, dp, terms, _visible(keys[:, None], rows[None, :], past, WINDOW),
                rows[None, :] + past - keys[:, None], slope, key_bias, PHI, SLOPE, CAP, SIGNED,
                RECTIFIED, P, L1, EXACT, BIASED, HALF, PART > 0,
            )  # fmt: skip
            if DKEY_BIAS is not None:
                dkey_bias += tl.sum(dz, 1)
            dv = tl.dot(A.to(dout.dtype), dout, dv, input_precision=PRECISION)
            scaled = ds * terms[0] if EXACT else ds
            dk = tl.dot(scaled.to(q.dtype), q, dk, input_precision=PRECISION)
            if ATOMIC:
                ds = ds.to(k.dtype)
                # not dot(trans(ds), k): Triton before 3.7.1 miscompiles that for Hopper
                dq = tl.trans(tl.dot(tl.trans(k), ds, input_precision=PRECISION))
                columns = tl.arange(0, BLOCK_D)
                at = DQ + rows[:, None] * (H * D) + columns[None, :]
                inside = (rows < Lq)[:, None] & (columns < D)[None, :]
                tl.atomic_add(at, dq, mask=inside, sem="relaxed")
    dk *= VALUE / ARGUMENT
    if UNIT:
        inverse = _saved(INVERSE, 0, bh // GROUP, keys, Lk)
        dk = _project(dk, k, inverse) * inverse[:, None]
    if P and P != PER_ROW:
        dv *= 1 / P
    _store(_own(DK, b, h, H, Lk, D), H * D, keys, Lk, dk, D, BLOCK_D)
    _store(_own(DV, b, h, H, Lk, D), H * D, keys, Lk, dv, D, BLOCK_D)
    if DKEY_BIAS is not None:
        _save(DKEY_BIAS, 0, VALUE * dkey_bias, bh, keys, Lk)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _backward_queries(
    Q, K, V, DOUT, ROWS, TERMS, DQ, DBIAS, DPOWERS, k_strides, v_strides, H, GROUP, Lq, Lk, ADDED,
    PHI: tl.constexpr, SLOPE: tl.constexpr, ARGUMENT: tl.constexpr, VALUE: tl.constexpr,
    CAP: tl.constexpr, SIGNED: tl.constexpr, RECTIFIED: tl.constexpr, P: tl.constexpr,
    L1: tl.constexpr, EXACT: tl.constexpr, BIASED: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What the atomics would sum for dq, for a block of rows.

    If they are learnt, the bias's gradient, and what the tiles add to that of the powers.
    """
    bh, block = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    b, h, past = bh // H, bh % H, Lk - Lq
    K, V = _at(K, k_strides, b, h // GROUP), _at(V, v_strides, b, h // GROUP)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q = _load(_own(Q, b, h, H, Lq, D), H * D, rows, Lq, D, BLOCK_D)
    dout = _load(_own(DOUT, b, h, H, Lq, D), H * D, rows, Lq, D, BLOCK_D)
    HALF: tl.constexpr = DOUT.dtype.element_ty == tl.float16
    terms = _row_terms(ROWS, TERMS, bh, rows, Lq, 1, P, EXACT, BIASED, RECTIFIED, HALF)
    slope = None if ADDED.slopes is None else ARGUMENT * tl.load(ADDED.slopes + h)
    tiles = _key_tiles(block, past, Lk, BLOCK_M, BLOCK_N, WINDOW)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dbias, dpowers = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    for PART in tl.static_range(2 if WINDOW is None else 3):
        for start in range(tiles[PART][0], tiles[PART][1], BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            k = _load(K, k_strides[2], keys, Lk, D, BLOCK_D)
            v = _load(V, v_strides[2], keys, Lk, D, BLOCK_D)
            y = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
            key_bias = (
                None if ADDED.key_bias is None
                else _key_bias(ADDED, b, h, keys, Lk, ARGUMENT)[None, :]
            )  # fmt: skip
            _, dz, ds, dpower = _gradients(
                y, dp, terms, _visible(keys[None, :], rows[:, None], past, WINDOW),
                rows[:, None] + past - keys[None, :], slope, key_bias, PHI, SLOPE, CAP, SIGNED,
                RECTIFIED, P, L1, EXACT, BIASED, HALF, PART > 0,
            )  # fmt: skip
            if DBIAS is not None:
                dbias += tl.sum(dz, 1)
            if DPOWERS is not None:
                dpowers += tl.sum(dpower, 1)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    _store(_own(DQ, b, h, H, Lq, D), H * D, rows, Lq, dq, D, BLOCK_D)
    if DBIAS is not None:
        _save(DBIAS, 0, VALUE * dbias, bh, rows, Lq)
    if DPOWERS is not None:
        _save(DPOWERS, 0, dpowers + _saved(DPOWERS, 0, bh, rows, Lq), bh, rows, Lq)


@triton.jit
def _finish_queries(
    SUM, Q, ROWS, ORIGINAL, DQ, DSCALE, strides, H, L, ARGUMENT: tl.constexpr,
    VALUE: tl.constexpr, UNIT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """dq from its sum over keys and, if it is learnt, the scale's gradient.

    That needs the original q: a scale of 0 makes q' 0.
    """
    bh, rows = tl.program_id(0), tl.program_id(1) * M + tl.arange(0, M)
    b, h = bh // H, bh % H
    dq = _load(_own(SUM, b, h, H, L, D), H * D, rows, L, D, BLOCK_D)
    alpha = _saved(ROWS, ALPHA, bh, rows, L)
    if DSCALE is not None:
        q = _load(_at(ORIGINAL, strides, b, h), strides[2], rows, L, D, BLOCK_D).to(tl.float32)
        dscale = VALUE * tl.sum(dq * q, 1)
        if UNIT:
            dscale *= _inverse_norm(q)
        _save(DSCALE, 0, dscale, bh, rows, L)
    if UNIT:
        q = _load(_own(Q, b, h, H, L, D), H * D, rows, L, D, BLOCK_D)
        dq = _project(dq, q, alpha)
    dq *= (VALUE / ARGUMENT * alpha)[:, None]
    _store(_own(DQ, b, h, H, L, D), H * D, rows, L, dq, D, BLOCK_D)


# ---- decoding: one query row against a long cache ----


@triton.jit
def _number(X, bh, EACH: tl.constexpr):
    """A number, given as a tensor that has one for EACH sequence and head, or as itself."""
    return tl.load(X + bh) if EACH else X


@triton.jit
def _filled(FILLED, Lk):
    """How many of a cache's keys there are."""
    return Lk if FILLED is None else tl.load(FILLED).to(tl.int32)


@triton.jit
def _decode_scores(
    Q, K, scale, bias, Y, PARTS, q_strides, k_strides, H, GROUP, Lk, chunk, ADDED, FILLED,
    PHI: tl.constexpr, SHIFT: tl.constexpr, RECTIFIED: tl.constexpr, ARGUMENT: tl.constexpr,
    CAP: tl.constexpr, SCALES: tl.constexpr, BIASES: tl.constexpr, UNIT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y of a chunk of the cache, and the chunk's maximum of y, sum of |phi|, and maximum of phi."""
    bh, split = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    K, Y = _at(K, k_strides, b, h // GROUP), Y + bh.to(tl.int64) * Lk
    n = _filled(FILLED, Lk)
    one = tl.arange(0, 1)
    q = _load(_at(Q, q_strides, b, h), 0, one, 1, D, BLOCK_D).to(tl.float32)  # [1, d]
    alpha = ARGUMENT * _number(scale, bh, SCALES)
    beta = ARGUMENT * _number(bias, bh, BIASES)
    slope = None if ADDED.slopes is None else ARGUMENT * tl.load(ADDED.slopes + h)
    if UNIT:
        q = q * _inverse_norm(q)[:, None]
    total, a_max = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    y_max = tl.full([1], -float("inf"), tl.float32)
    end = tl.minimum(split * chunk + chunk, n)
    for start in tl.range(split * chunk, end, BLOCK_N, num_stages=3):
        keys = start + tl.arange(0, BLOCK_N)
        k = _load(K, k_strides[2], keys, n, D, BLOCK_D).to(tl.float32)
        y = tl.sum(k * q, 1)
        if UNIT:
            y = y * _inverse_norm(k)
        key_bias = None if ADDED.key_bias is None else _key_bias(ADDED, b, h, keys, n, ARGUMENT)
        y, _ = _argument(y, alpha, beta, n - 1 - keys, slope, key_bias, CAP, True, True)
        visible = keys < n
        tl.store(Y + keys, y, mask=visible)
        y = y[None, :]
        if SHIFT is not None:
            y, y_max, rescale = _shifted(y, y_max, visible[None, :], SHIFT, True)
            total, a_max = total * rescale, a_max * rescale
        a = PHI(y)
        if RECTIFIED:
            a = a - tl.exp2(SHIFT(y_max))[:, None]
        a = tl.where(visible[None, :], a, 0.0)
        total += tl.sum(tl.abs(a), 1)
        a_max = tl.maximum(a_max, tl.max(a, 1))
    at = PARTS + (bh.to(tl.int64) * tl.num_programs(1) + split) * 3 + one
    tl.store(at, y_max)
    tl.store(at + 1, total)
    tl.store(at + 2, a_max)


@triton.jit(do_not_specialize=["Lk"])
def _decode_values(
    V, Y, PARTS, norm, power, SUMS, v_strides, H, GROUP, Lk, chunk, ADDED, FILLED,
    PHI: tl.constexpr, SHIFT: tl.constexpr, RECTIFIED: tl.constexpr, ARGUMENT: tl.constexpr,
    VALUE: tl.constexpr,
    NORMS: tl.constexpr, POWERS: tl.constexpr, P: tl.constexpr, L1: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A chunk's sums of weighted values and of weights. Values of weight 0 are not read."""
    bh, split = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    V, Y = _at(V, v_strides, b, h // GROUP), Y + bh.to(tl.int64) * Lk
    n = _filled(FILLED, Lk)
    parts = tl.arange(0, SPLITS)
    exists = parts < tl.num_programs(1)
    PARTS += bh.to(tl.int64) * tl.num_programs(1) * 3
    total = tl.load(PARTS + parts * 3 + 1, mask=exists, other=0.0)
    a_max = tl.load(PARTS + parts * 3 + 2, mask=exists, other=0.0)
    shift, y_sink = 0.0, 0.0
    if ADDED.sink is not None:
        y_sink = ARGUMENT * tl.load(ADDED.sink + h)
    if SHIFT is not None:
        y_max = tl.load(PARTS + parts * 3, mask=exists, other=-float("inf"))
        top = tl.max(y_max, 0)
        shift = SHIFT(tl.maximum(top, y_sink) if ADDED.sink is not None else top)
        rescale = tl.exp2(shift - SHIFT(y_max))
        total, a_max = total * rescale, a_max * rescale
    total, a_max = tl.sum(total, 0), tl.max(a_max, 0)
    a_sink = PHI(y_sink + shift)
    if ADDED.sink is not None:
        total, a_max = total + a_sink, tl.maximum(a_max, a_sink)
    gain, offset, _ = _second_stage(total, a_max, n.to(tl.float32))
    if not P:
        if L1:
            gain = tl.where(total <= DEAD, 0.0, 1 / total)
        else:
            gain = 1 / (VALUE * _number(norm, bh, NORMS))
    acc, total_w = tl.zeros([BLOCK_D], tl.float32), 0.0
    power = _number(power, bh, POWERS)
    if P and ADDED.sink is not None:  # in the first chunk's sum alone
        t_sink = _reweighted(a_sink, gain, offset)
        w_sink = _power_less_one(t_sink, power, P) * t_sink
        total_w += tl.where(split == 0, w_sink, 0.0)
    end = tl.minimum(split * chunk + chunk, n)
    for start in tl.range(split * chunk, end, BLOCK_N, num_stages=3):
        keys = start + tl.arange(0, BLOCK_N)
        a = PHI(tl.load(Y + keys, mask=keys < n, other=0.0) + shift)
        if RECTIFIED:
            a = relu(a - tl.exp2(shift))
        if P:
            t = _reweighted(a, gain, offset)
            w = _power_less_one(t, power, P) * t + 0 * gain  # NaN for a gain of NaN
            # the row's sum is at least 1, so what is left out is below float32 rounding
            skip = w * n <= 2.0**-24
        else:
            w = gain * a
            skip = w == 0
        skip = skip | (keys >= n)
        w = tl.where(skip, 0.0, w)
        total_w += tl.sum(w, 0)
        v = _load(V, v_strides[2], tl.where(skip, n, keys), n, D, BLOCK_D)
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
        acc *= tl.where(total_w <= 0, 0.0, 1 / total_w)
    at = OUT + bh.to(tl.int64) * D + columns
    tl.store(at, acc.to(OUT.dtype.element_ty), mask=columns < D)


# ---- the operator ----


def _device(x: Tensor) -> contextlib.AbstractContextManager:
    """A context that launches kernels on x's device."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _phi(name: str, dtype: torch.dtype) -> Function:
    """The entry of PHIS for inputs of this dtype."""
    return PHIS[name] if dtype.itemsize > 2 else PHIS.get(f"{name}16", PHIS[name])


def _head(d: int) -> dict[str, int]:
    return dict(D=d, BLOCK_D=max(16, triton.next_power_of_2(d)))


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _p(p: float) -> int | float:
    """p as a kernel constant: 0 for one stage, and an int if it is whole."""
    return int(p) if p == int(p) else p


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty [B, H, L, d] laid out as [B, L, H, d], so that joining the heads copies nothing."""
    B, H, L, d = x.shape
    return x.new_empty(B, L, H, d, dtype=dtype).transpose(1, 2)


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _strides(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:3]


class Strided(NamedTuple):
    data: Tensor
    strides: tuple[int, ...]


def _strided(x: Tensor | None) -> Strided | None:
    """x [B, H, L] of any strides, as an argument of a kernel."""
    return None if x is None else Strided(x, x.stride())


def _cap(softcap: float | None, function: Function) -> float | None:
    """The soft cap of y, as a kernel constant."""
    return None if softcap is None else function.argument * softcap


class Added(NamedTuple):
    """What some variants add to a head's scores or keys, as an argument of the kernels."""

    sink: Tensor | None
    slopes: Tensor | None
    key_bias: Strided | None


def _numbers(q: Tensor, count: int) -> Tensor:
    """That many float32 numbers for each row of q."""
    return q.new_empty(count * q.shape[0] * q.shape[1] * q.shape[2], dtype=torch.float32)


def _outputs(
    q: Tensor, k: Tensor, bias: Tensor | None, sink: Tensor | None, phi: str, shifted: bool,
    p: float, unit: bool, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Uninitialised outputs of _forward."""
    u = _like(q) if save and p else q.new_empty(0)
    unit_k = _like(k) if unit else k.new_empty(0)
    # up to the last that is needed: see ROWS
    if p == PER_ROW.value:
        more = 3
    elif shifted and (sink is not None or PHIS[phi].rectified):
        more = 2
    else:
        more = int(shifted or bias is not None)
    rows = _numbers(q, (5 if p else 2) + more)
    return _like(q), u, _like(q), unit_k, rows, _numbers(k, unit)


@torch.library.custom_op("fused_attention::forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, bias: Tensor | None, norm: Tensor | None,
    powers: Tensor | None, sink: Tensor | None, slopes: Tensor | None, key_bias: Tensor | None,
    phi: str, shifted: bool,
    p: float, unit: bool, signed: bool, window: int | None, softcap: float | None, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output and, for the backward pass, U, q', k / |k| if `unit`, ROWS and 1 / |k|."""
    (B, H, Lq, d), Lk = q.shape, k.shape[2]
    q, k, v = map(_rows_contiguous, (q, k, v))
    function, biased = _phi(phi, q.dtype), bias is not None
    exact = not (unit or function.smooth)
    outputs = _outputs(q, k, bias, sink, phi, shifted, p, unit, save)
    out, u, scaled_q, unit_k, rows, inverse = outputs
    head, shift = _head(d), function.shift if shifted else None
    with _device(q):
        _scale_queries[B * H, triton.cdiv(Lq, 64)](
            q, *map(_strided, (scale, bias, norm, powers)), scaled_q, rows, _strides(q), H, Lq,
            ARGUMENT=function.argument, VALUE=function.value, P=_p(p), UNIT=unit, EXACT=exact,
            M=64, **head,
        )  # fmt: skip
        if unit:
            _normalise_keys[B * k.shape[1], triton.cdiv(Lk, 64)](
                k, unit_k, inverse, _strides(k), k.shape[1], Lk, M=64, **head
            )
            k = unit_k
        constants = dict(
            PHI=function.function, SHIFT=shift, ARGUMENT=function.argument,
            CAP=_cap(softcap, function), EXACT=exact, BIASED=biased, SAVE=save,
            PRECISION=_precision(), WINDOW=window, **head,
        )  # fmt: skip
        added = Added(sink, slopes, _strided(key_bias))
        sizes = _strides(k), _strides(v), H, H // k.shape[1], Lq, Lk, added
        if p:
            shape = block_shape(TWO_STAGES, q, phi, p)
            _forward_two_stages[B * H, triton.cdiv(Lq, shape["BLOCK_M"])](
                scaled_q, k, v, out, u, rows, *sizes, **constants, TOTAL=function.total, P=_p(p),
                **shape,
            )  # fmt: skip
        else:
            shape = block_shape(ONE_STAGE, q, phi, p)
            _forward_one_stage[B * H, triton.cdiv(Lq, shape["BLOCK_M"])](
                scaled_q, k, v, out, rows, *sizes, **constants, L1=norm is None,
                RECTIFIED=function.rectified, **shape,
            )  # fmt: skip
    return outputs


@_forward.register_fake
def _(
    q, k, v, scale, bias, norm, powers, sink, slopes, key_bias, phi, shifted, p, unit, signed,
    window, softcap, save,
):  # fmt: skip
    return _outputs(q, k, bias, sink, phi, shifted, p, unit, save)


@torch.library.custom_op("fused_attention::backward", mutates_args=())
def _backward(
    dout: Tensor, original_q: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None,
    slopes: Tensor | None, key_bias: Tensor | None, out: Tensor, u: Tensor, rows: Tensor,
    inverse: Tensor, phi: str, shifted: bool, p: float, unit: bool, signed: bool,
    window: int | None, softcap: float | None, l1: bool, biased: bool, learnt: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv and, if learnt, the gradients of scale, bias, powers, sink and key_bias.

    Those of the first four are [B, H, Lq], for the sink with a part for each row, and that of
    key_bias is [B, H, Lk].
    dk and dv are [B, H, Lk, d], a part for each head of q. q is q', and k is k / |k| if `unit`. The
    original q is given if the scale is learnt.
    """
    (B, H, Lq, d), Lk = q.shape, k.shape[2]
    dout, k, v = map(_rows_contiguous, (dout, k, v))
    function, head, added = _phi(phi, q.dtype), _head(d), Added(sink, slopes, _strided(key_bias))
    outputs = _gradients_like(q, k, learnt)
    dq, dk, dv, *gradients = outputs
    dscale, dbias, dpowers, dsink, dkey_bias = (x if x.numel() else None for x in gradients)
    atomic = dbias is None and dpowers is None and not torch.are_deterministic_algorithms_enabled()
    summed = _like(q, torch.float32)
    terms, scaled_dout = _numbers(q, 3 if q.dtype == torch.float16 else 2 if p else 1), _like(dout)
    units = dict(ARGUMENT=function.argument, VALUE=function.value)
    functions = dict(PHI=function.function, SLOPE=function.slope, P=_p(p), **units)
    constants = dict(
        **functions, CAP=_cap(softcap, function), SIGNED=signed or function.rectified,
        RECTIFIED=function.rectified, L1=l1, EXACT=not (unit or function.smooth), BIASED=biased,
        PRECISION=_precision(), WINDOW=window, **head,
    )  # fmt: skip
    with _device(q):
        _backward_rows[B * H, triton.cdiv(Lq, 64)](
            dout, out, u, scaled_dout, rows, terms, dsink, dpowers, _strides(dout), H, Lq,
            added, SHIFTED=shifted, M=64, **functions, **head,
        )  # fmt: skip
        if atomic:
            summed.zero_()
        sizes = _strides(k), _strides(v), H, H // k.shape[1], Lq, Lk, added
        shape = block_shape(KEYS, q, phi, p)
        _backward_keys[B * H, triton.cdiv(Lk, shape["BLOCK_N"])](
            q, k, v, scaled_dout, inverse, rows, terms, summed, dk, dv, dkey_bias, *sizes,
            **constants, UNIT=unit, ATOMIC=atomic, **shape,
        )  # fmt: skip
        if not atomic:
            shape = block_shape(QUERIES, q, phi, p)
            _backward_queries[B * H, triton.cdiv(Lq, shape["BLOCK_M"])](
                q, k, v, scaled_dout, rows, terms, summed, dbias, dpowers, *sizes, **constants,
                **shape,
            )  # fmt: skip
        original_q = q if original_q is None else _rows_contiguous(original_q)
        _finish_queries[B * H, triton.cdiv(Lq, 64)](
            summed, q, rows, original_q, dq, dscale, _strides(original_q), H, Lq, UNIT=unit, M=64,
            **units, **head,
        )  # fmt: skip
    return outputs


@_backward.register_fake
def _(
    dout, original_q, q, k, v, sink, slopes, key_bias, out, u, rows, inverse, phi, shifted, p, unit,
    signed, window, softcap, l1, biased, learnt,
):  # fmt: skip
    return _gradients_like(q, k, learnt)


def _gradients_like(
    q: Tensor, k: Tensor, learnt: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (B, H, Lq, d), Lk = q.shape, k.shape[2]
    dscale, dbias, dpowers, dsink, dkey_bias = (
        q.new_empty((B, H, L) if learns else (0,), dtype=torch.float32)
        for learns, L in zip(learnt, (Lq, Lq, Lq, Lq, Lk), strict=True)
    )
    dk, dv = (k.new_empty(B, Lk, H, d).transpose(1, 2) for _ in range(2))
    return _like(q), dk, dv, dscale, dbias, dpowers, dsink, dkey_bias


def _save_for_backward(ctx, inputs, output):
    q, k, v, _, bias, norm, _, sink, slopes, key_bias, *constants, _ = inputs
    phi, shifted, p, unit, signed, window, softcap = constants
    out, u, scaled_q, unit_k, rows, inverse = output
    original_q = q if ctx.needs_input_grad[3] else None
    k = unit_k if unit else k
    given = scaled_q, k, v, sink, slopes, key_bias
    ctx.save_for_backward(original_q, *given, out, u, rows, inverse)
    biased = bias is not None or shifted
    ctx.constants = phi, shifted, p, unit, signed, window, softcap, norm is None, biased
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _call_backward(ctx, dout, *_):
    learnt = [ctx.needs_input_grad[i] for i in (3, 4, 6, 7, 9)]
    dq, dk, dv, *gradients = _backward(dout, *ctx.saved_tensors, *ctx.constants, learnt)
    heads = ctx.saved_tensors[3].shape[1]
    if heads < dk.shape[1]:
        dk, dv = (x.unflatten(1, (heads, -1)).sum(2) for x in (dk, dv))
    dscale, dbias, dpowers, dsink, dkey_bias = (x if x.numel() else None for x in gradients)
    dsink = None if dsink is None else dsink.sum((0, 2))
    return dq, dk, dv, dscale, dbias, None, dpowers, dsink, None, dkey_bias, *(None,) * 8


_forward.register_autograd(_call_backward, setup_context=_save_for_backward)


@torch.library.custom_op("fused_attention::decode", mutates_args=())
def _decode(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, bias: Tensor | None, norm: Tensor | None,
    powers: Tensor | None, sink: Tensor | None, slopes: Tensor | None, key_bias: Tensor | None,
    filled: Tensor | None, phi: str, shifted: bool, p: float, unit: bool, softcap: float | None,
) -> Tensor:  # fmt: skip
    """The output for one query row, with the cache split over enough programs to fill the GPU."""
    (B, H, _, d), Lk, group = q.shape, k.shape[2], q.shape[1] // k.shape[1]
    q, k, v = map(_rows_contiguous, (q, k, v))
    function, head, added = _phi(phi, q.dtype), _head(d), Added(sink, slopes, _strided(key_bias))
    block_n = 16 if INTERPRETED else 64
    programs = 4 * _processors(q.device)
    wanted = max(1, min(triton.cdiv(programs, B * H), triton.cdiv(Lk, 2 * block_n), 256))
    chunk = triton.cdiv(triton.cdiv(Lk, wanted), block_n) * block_n
    splits = triton.cdiv(Lk, chunk)
    y = q.new_empty(B, H, Lk, dtype=torch.float32)
    parts = q.new_empty(B, H, splits, 3, dtype=torch.float32)
    sums = q.new_empty(B, H, splits, head["BLOCK_D"] + 1, dtype=torch.float32)
    out = _like(q)
    shift = function.shift if shifted else None
    constants = dict(
        PHI=function.function, SHIFT=shift, RECTIFIED=function.rectified,
        ARGUMENT=function.argument, BLOCK_N=block_n, **head,
    )  # fmt: skip
    reduced = dict(SPLITS=triton.next_power_of_2(splits))
    scales, biases, norms, power = (_one_row(x, q) for x in (scale, bias, norm, powers))
    with _device(q):
        _decode_scores[B * H, splits](
            q, k, scales, biases, y, parts, _strides(q), _strides(k), H, group, Lk, chunk, added,
            filled, CAP=_cap(softcap, function), SCALES=isinstance(scales, Tensor),
            BIASES=isinstance(biases, Tensor), UNIT=unit, **constants,
        )  # fmt: skip
        _decode_values[B * H, splits](
            v, y, parts, norms, power, sums, _strides(v), H, group, Lk, chunk, added, filled,
            VALUE=function.value, NORMS=isinstance(norms, Tensor),
            POWERS=isinstance(power, Tensor), P=_p(p), L1=norm is None, **constants, **reduced,
        )  # fmt: skip
        _decode_sum[(B * H,)](sums, out, splits, P=_p(p), **head, **reduced)
    return out


@_decode.register_fake
def _(
    q, k, v, scale, bias, norm, powers, sink, slopes, key_bias, filled, phi, shifted, p, unit,
    softcap,
):  # fmt: skip
    return _like(q)


def _one_row(x: Tensor | None, q: Tensor) -> Tensor | float:
    """[B, H] of x [B or 1, H, 1], or a number where x is on the CPU and has one for all of them."""
    if x is None:
        return 0.0
    if x.is_cpu and all(n == 1 or step == 0 for n, step in zip(x.shape, x.stride(), strict=True)):
        return x[0, 0, 0].item()
    return x[:, :, 0].expand(q.shape[:2]).to(q.device).contiguous()


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, bias: Tensor | None, norm: Tensor | None, *,
    phi: str, shifted: bool, p: float | None, unit: bool, signed: bool, window: int | None,
    sink: Tensor | None = None, slopes: Tensor | None = None, key_bias: Tensor | None = None,
    softcap: float | None = None, powers: Tensor | None = None, filled: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention [B, H, Lq, d] of q [B, H, Lq, d] over k, v [B, Hk, Lk, d], Lq <= Lk.

    Each head of k and v serves H / Hk consecutive heads of q. The queries are the last Lq
    positions. scale, bias, norm and powers are float32 [B or 1, H, Lq] of any strides; without norm
    it is l1. phi is a key of PHIS; `shifted` applies its shift; p is the power of stage 2, or None,
    and powers has one for each row instead; `unit` normalises q and k to unit length; `signed`
    means that phi may be negative; `window` is the number of keys that each row sees, or None. A
    single query sees all k or, given `filled`, int64 [1], that many of the first; no gradient then
    flows. Its scale, bias, norm and powers may be on the CPU, one for all sequences and heads.

    sink [H] has each head's logit of one more key, whose value is 0 and whose score is the logit,
    without scale and bias; n does not count it. It needs l1 and a phi that is never 0. slopes [H],
    at least 0, are ALiBi's: each score less its head's slope times the distance of its key.
    key_bias, float32 [B or 1, H, Lk], is added to each key's scores. softcap c makes a scaled
    product z into c tanh(z / c), before anything is added to it.

    Gradients flow to q, k, v, scale, bias, powers, sink and key_bias. A learnt bias or power takes
    the backward pass of 7 products. Where phi is exp, in one stage without a sink, the gradient of
    a bias is 0: detach it.
    """
    shifted = shifted or PHIS[phi].rectified
    p = float(p or 0) if powers is None else float(PER_ROW.value)
    if key_bias is not None:
        key_bias = key_bias.expand(q.shape[0], q.shape[1], k.shape[2])
    sink, slopes = (x if x is None else x.contiguous() for x in (sink, slopes))
    added = sink, slopes, key_bias
    rows = scale, bias, norm, powers
    save = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, *rows, *added)
    )
    if q.shape[2] == 1 and not save:
        return _decode(q, k, v, *rows, *added, filled, phi, shifted, p, unit, softcap)
    assert filled is None
    shaped = (x if x is None else x.to(q.device).expand(q.shape[:3]) for x in rows)
    constants = phi, shifted, p, unit, signed, window, softcap
    return _forward(q, k, v, *shaped, *added, *constants, save)[0]
