"""The functions phi of the fused kernels, their derivatives and their shifts: the table PHIS.

phi takes most of the kernels' instructions (python -m tests.compile_kernels counts them). tl.exp2
and tl.rsqrt are one instruction each; tl.exp takes 5 and a division 9, because they are also exact
for numbers that do not occur here. Functions made of exp therefore take y = log2(e) z, so that
exp(z) is exp2(y).
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))
# With this option max(x, 0) of a NaN is NaN; without it, 0.
NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def exp2_of_minus_abs(y):
    # -tl.abs(y) would compile to 0 - |y|, a subtraction; the sign of a product costs nothing
    return tl.exp2(tl.abs(y) * -1.0)


@triton.jit
def reciprocal(x):
    """1 / x for x between 1e-18 and 1e18."""
    return tl.rsqrt(x * x)


# ---- phi(z) and phi'(z) ----


@triton.jit
def exp(y):
    a = tl.exp2(y)
    return a, a


@triton.jit
def sigmoid(y):
    e = exp2_of_minus_abs(y)
    r = reciprocal(1 + e)
    return tl.where(y >= 0, 1.0, e) * r, e * r * r


# softplus here is log2(1 + exp2(y)), which is softplus(z) / ln 2. With e = exp2(-|y|) it is
# max(y, 0) + log2(1 + e). log2(1 + e) would lose the digits of a small e, so log2(1 + e) / e is a
# polynomial: log2(e) times the Chebyshev interpolation of log1p(e) / e on [0, 1]. The derivative is
# sigmoid(z) = 2^y / (1 + 2^y) = 2^(y - softplus(y)).


@triton.jit
def log2_of_1_plus(e):
    # degree 8, for e from 0 to 1: the largest relative error is 2.3e-7 in float32
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
    a = tl.maximum(y, 0.0) + log2_of_1_plus(exp2_of_minus_abs(y))
    return a, tl.exp2(y - a)


@triton.jit
def softplus16(y):
    # degree 5: the largest relative error is 9.5e-6, which a 15th power keeps below 16-bit rounding
    e = exp2_of_minus_abs(y)
    r = -0.033822046 * e + 0.144471096
    r = r * e - 0.30163801
    r = r * e + 0.468658879
    r = r * e - 0.720358773
    r = r * e + 1.44268147
    a = tl.maximum(y, 0.0) + r * e
    return a, tl.exp2(y - a)


@triton.jit
def product_minus_1(q, r):
    """(1 + q) (1 + r) - 1, without losing the digits of small q and r."""
    return q + r + q * r


@triton.jit
def softplus_total(y):
    """The sum of softplus over each row of a tile of at most 128 keys; masked y are -inf.

    The sum of log2(1 + e) is the logarithm of the product of all 1 + e: one logarithm per row
    instead of one per key. The product is at most 2 to the number of keys, which for 128 keys is
    infinite in float32.
    """
    q = tl.reduce(exp2_of_minus_abs(y), 1, product_minus_1)
    logarithm = tl.where(q <= 1, log2_of_1_plus(q), tl.log2(1 + q))
    logarithm = tl.minimum(logarithm, 1.0 * y.shape[1], propagate_nan=NAN)
    return tl.sum(tl.maximum(y, 0.0), 1) + logarithm


@triton.jit
def relu(y):
    return tl.maximum(y, 0.0, propagate_nan=NAN), tl.where(y > 0, 1.0, 0.0)


@triton.jit
def relu2(y):
    a, _ = relu(y)
    return a * a, 2 * a


@triton.jit
def relu6(y):
    a, _ = relu(y)
    return tl.minimum(a, 6.0, propagate_nan=NAN), tl.where((y > 0) & (y < 6), 1.0, 0.0)


@triton.jit
def gelu(y):
    # The normal distribution's tail as exp2 of a polynomial, with a relative error of 1.2e-7
    # (Numerical Recipes, erfcc, times 1/2): 1 + erf would be 0 below -5.6.
    z = tl.abs(y) * 0.7071067811865476
    t = reciprocal(1 + 0.5 * z)
    r = 0.17087277 * t - 0.82215223
    r = r * t + 1.48851587
    r = r * t - 1.13520398
    r = r * t + 0.27886807
    r = r * t - 0.18628806
    r = r * t + 0.09678418
    r = r * t + 0.37409196
    r = r * t + 1.00002368
    r = r * t - 1.26551223
    tail = 0.5 * t * tl.exp2((r - z * z) * LOG2_E)
    below = tl.where(y < 0, tail, 1 - tail)
    return y * below, below + y * 0.3989422804014327 * tl.exp2(z * z * -LOG2_E)


@triton.jit
def mish(y):
    # tanh(softplus(y)) = m / (m + 2) with m = e (e + 2), which is 1 in float32 from y = 20 on
    e = tl.exp2(tl.minimum(y, 20.0) * LOG2_E)
    m = e * (e + 2)
    r = reciprocal(m + 2)
    return y * m * r, m * r + y * (4 * (m + 1) * r * r) * (e * reciprocal(1 + e))


@triton.jit
def identity(y):
    return y, y * 0 + 1


# ---- shifts, from a row's largest y ----


@triton.jit
def shift_to_top(top):
    return -top


@triton.jit
def shift_to_top_or_zero(top):
    return tl.minimum(-top, 0.0)


@triton.jit
def shift_out_of_tail(top):
    return tl.maximum(-57.70780163555854 - top, 0.0)  # -40 log2(e)


class Function(NamedTuple):
    """A phi as the kernels compute it."""

    # from argument * z to value * phi(z) and phi'(z)
    function: triton.JITFunction
    # Maps a row's largest y to a shift of all its y, which multiplies the function by exp2(shift).
    shift: triton.JITFunction | None = None
    # The sum of the function over each row of a tile, where a faster way exists. The function must
    # be increasing.
    total: triton.JITFunction | None = None
    argument: float = 1.0
    value: float = 1.0
    # Neither phi nor |phi| has a kink, at which the rounding of a scaled q could change the slope.
    smooth: bool = False
    # phi is the function less 1 (less exp2(shift) where shifted). Where phi is negative the weight
    # is 0, but |phi| counts in the l1 norm. The shift always applies; there is no second stage.
    rectified: bool = False


IN_LOG2 = dict(argument=LOG2_E.value, smooth=True)
SOFTPLUS = dict(shift=shift_out_of_tail, total=softplus_total, value=LOG2_E.value, **IN_LOG2)
# Keyed by attention.Phi.kernel. NAME16, if present, is used for 16-bit inputs.
PHIS = {
    "exp": Function(exp, shift_to_top, **IN_LOG2),
    "sigmoid": Function(sigmoid, shift_out_of_tail, **IN_LOG2),
    "softplus": Function(softplus, **SOFTPLUS),
    "softplus16": Function(softplus16, **SOFTPLUS),
    # relu(exp(z) - 1) / sum |exp(z) - 1| (Zuhri et al. 2025). Their code divides by exp of the
    # largest z and adds 1e-6 (their kernel) or 1e-8 to the sum. Here it divides by exp of the
    # largest of z and 0: a row far below 0 does not overflow, and a row of zeros is dead.
    "softpick": Function(exp, shift_to_top_or_zero, argument=LOG2_E.value, rectified=True),
    "relu": Function(relu),
    "relu2": Function(relu2),
    "relu6": Function(relu6),
    "gelu": Function(gelu),
    "mish": Function(mish),
    "identity": Function(identity),
}
