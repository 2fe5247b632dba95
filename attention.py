"""The attention family: a table of variants, and four paths that compute them.

Every variant in the papers comes from three choices. For one head of size d, with a row (query) i
that sees n_i keys, its own the last, and s_ij = q_i . k_j:

    scores      z_ij = scale_i s_ij + bias_i                   the argument of phi
    normalise   A_ij = phi(z_ij) / norm_i, i - n_i < j <= i    stage 1: the l1 norm or a fixed one
    re-weight   A_ij <- relu(n_i A_ij - o_i)^p, then l1        stage 2: with p, or a `reweight`

o_i is 0 for n_i <= 3 and 1 beyond (LSSAR, Algorithm 1). n_i is i or, with a window of W keys,
min(i, W). The papers have no windows: every n in a formula is this n_i, that in n > 3 and the index
of SSMax's p_n included, recentring subtracts the mean of the keys seen, and L stays a length of
text, whatever the window.

Settings of a layer combine with any variant, in this order:

    softcap     scale_i s_ij becomes c tanh(scale_i s_ij / c)                          (Gemma 2)
    ALiBi       z_ij gets -slope_h (i - j), slope_h = 2^(-8 h / H), h from 1           (Press 2021)
    forget      z_ij gets log f_(j+1) + .. + log f_i, gates from the layer's input     (FoX)
    sink        one more key, whose value is 0 and whose score is 0 or a learned logit of the head:
                softmax's denominator gets 1 (off by one) or e^logit (gpt-oss)

The papers are LSSAR ("Softplus Attention with Re-weighting Boosts Length Extrapolation in Large
Language Models", Gao et al. 2026) and SSMax ("Scalable-Softmax Is Superior for Attention",
Nakanishi 2025); the entries of others name theirs.

The formulas are `Variant`, `VARIANTS` and `Attention._weights`; the rest computes them fast. To add
a variant, add an entry to `VARIANTS`, and a `Phi` if its function is new. What does not fit an
entry (scores mixed across heads, the two maps of differential attention) is a module that
model.build_attention returns, with `forward` and `weights` as `Attention` has them and the
attributes `n_head`, `window`, `ordered` and `p_n`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from errors import UserError

kernels: ModuleType | None
try:
    import kernels
except ImportError:  # Triton is for Linux and comes with torch's CUDA builds
    kernels = None

# A row is dead if its normaliser, the sum of |phi|, is at most this, as when relu is 0 for every
# key: its weights are then all 0 instead of 0 / 0.
DEAD = 1e-30
# A row is tied if its largest n A - 1 is at most this: its weights are equal up to rounding, and
# re-weighting would let rounding errors pick the winner.
TIED = 16 * torch.finfo(torch.float32).eps
# The blocked path takes at most BLOCK_QUERIES queries at a time, and as many heads and sequences as
# keep their scores within BLOCK_SCORES or, on a CPU, BLOCK_SCORES_CPU, which was the fastest there.
BLOCK_QUERIES = 128
BLOCK_SCORES = 2**25
BLOCK_SCORES_CPU = 2**21
# With more scores than this in a layer, the backward pass recomputes them instead of keeping them.
KEEP_SCORES = 2**22


@dataclass(frozen=True)
class Factors:
    """Keys or values x_hj = sum_r a_rjh b_rj of all heads h, with b_rj [d] shared by the heads.

    a is [B, R, Lk, H] and b [B, R, Lk, d]. What follows for a single query is computed from them
    without x [B, H, Lk, d], which takes fewer operations and reads less memory.
    """

    a: Tensor
    b: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """That of x."""
        B, _, Lk, H = self.a.shape
        return B, H, Lk, self.b.shape[3]

    def to(self, dtype: torch.dtype) -> "Factors":
        return Factors(self.a.to(dtype), self.b.to(dtype))

    def expand(self) -> Tensor:
        """x, [B, H, Lk, d]."""
        return torch.einsum("brlh,brld->bhld", self.a, self.b)

    def dot(self, q: Tensor) -> Tensor:
        """The products [B, H, 1, Lk] of a single query of each head, [B, H, 1, d], with its x."""
        return (self.a * (self.b @ q.transpose(1, 2).mT)).sum(1).mT[:, :, None]

    def squared_norms(self) -> Tensor:
        """|x|^2, [B, H, 1, Lk]: the sum over r and s of a_r a_s b_r . b_s."""
        a, b = self.a, self.b
        products = [
            a[:, r] * (a * (b * b[:, r, None]).sum(-1, keepdim=True)).sum(1)
            for r in range(a.shape[1])
        ]
        return sum(products[1:], products[0]).mT[:, :, None]

    def mix(self, weights: Tensor) -> Tensor:
        """The sums [B, H, 1, d] of x with the weights [B, H, 1, Lk] of a single query."""
        a = (weights.transpose(1, 2).mT * self.a).to(self.b.dtype)  # [B, R, Lk, H]
        return (a.mT @ self.b).sum(1)[:, :, None]


@dataclass(frozen=True)
class Phi:
    """The function phi that turns a score into a weight, before normalisation."""

    function: Callable[[Tensor], Tensor]
    # A z with phi(z) = 0, which `check_variant` checks: the causal mask sets the scores of hidden
    # keys to it.
    zero: float = -math.inf
    # phi takes negative values: l1 then sums absolute values, and stage 2 is refused.
    signed: bool = False
    # A shift that l1 cancels, computed from a row's largest score and added to all of its scores so
    # that phi neither overflows nor underflows.
    shift: Callable[[Tensor], Tensor] | None = None
    # Its entry in kernels.PHIS; None: no fused kernel.
    kernel: str | None = None


def shift_out_of_tail(top: Tensor) -> Tensor:
    # Far below 0, sigmoid and softplus are exp(z) (1 + O(exp(z))), and l1 cancels any shift: a row
    # whose scores are all below -40 is lifted to -40, where neither phi nor its sum underflows.
    return (-40 - top).clamp_min(0)


EXP = Phi(torch.exp, shift=torch.neg, kernel="exp")
SIGMOID = Phi(torch.sigmoid, shift=shift_out_of_tail, kernel="sigmoid")
# torch's softplus is linear above its threshold: exact in float64 at 40, but not at its default 20.
SOFTPLUS = Phi(lambda z: F.softplus(z, threshold=40), shift=shift_out_of_tail, kernel="softplus")
RELU = Phi(torch.relu, zero=0.0, kernel="relu")
RELU2 = Phi(lambda z: torch.relu(z).square(), zero=0.0, kernel="relu2")
RELU6 = Phi(F.relu6, zero=0.0, kernel="relu6")
GELU = Phi(F.gelu, zero=0.0, signed=True, kernel="gelu")
MISH = Phi(F.mish, zero=0.0, signed=True, kernel="mish")
IDENTITY = Phi(lambda z: z, zero=0.0, signed=True, kernel="identity")
EXPM1 = Phi(torch.expm1, zero=0.0, signed=True, kernel="softpick")


@dataclass
class RowContext:
    """The quantities that a variant's formulas may use, for the rows (queries) of one call."""

    n: Tensor  # [Lq, 1] keys that each row sees
    # the last of them, [Lq, 1], and all keys, [Lk], counted from the first key of the call: only
    # the distance last - keys is the same however a layer is computed
    last: Tensor
    keys: Tensor
    head: Tensor  # [H, 1, 1] counted from 0
    window: int | None
    d: int  # head size
    L: int  # the training length, or the current one (setting `attention_length`)
    gamma: float
    # set only for a variant that names them in `learnable`
    s: Tensor = field(init=False)  # [H, 1, 1]
    b: Tensor = field(init=False)  # [H, 1, 1]
    p_n: Tensor = field(init=False)  # [Lq, 1]
    # set only for a variant that names them in `from_input`
    u: Tensor = field(init=False)  # [B, H, Lq, 1]
    w: Tensor = field(init=False)  # [B, H, Lq, 1]

    def sees(self, keys: int) -> Tensor:
        """Whether each row sees each of this many keys, [Lq, keys]."""
        key = torch.arange(keys, device=self.last.device)
        seen = key <= self.last
        return seen if self.window is None else seen & (key > self.last - self.window)


@dataclass(frozen=True)
class FromInput:
    """What a layer computes from its input besides q, k and v."""

    rows: dict[str, Tensor] = field(default_factory=dict)  # [B, H, Lq] by name: Variant.from_input
    log_forget: Tensor | None = None  # [B, H, Lk]: the logarithms of the keys' forget gates

    def heads(self, heads: slice) -> "FromInput":
        """That of some heads."""
        return self.part((slice(None), heads), slice(None), slice(None))

    def part(self, part: tuple[slice, slice], queries: slice, keys: slice) -> "FromInput":
        """That of some sequences and heads, queries and keys."""
        rows = {name: x[part][:, :, queries] for name, x in self.rows.items()}
        gates = None if self.log_forget is None else self.log_forget[part][:, :, keys]
        return FromInput(rows, gates)


Power = float | Tensor | None


def relu_power(A: Tensor, rows: RowContext, p: Power) -> Tensor:
    """Stage 2, LSSAR Eq. 5: relu(n A - o)^p, then l1; nothing if p is None.

    A is [.., Lq, Lk] and at least 0; p is a number, or one for each head or row. l1 cancels a
    factor on a row, so its sum need not be 1, and relu(n A - o) becomes relu(A - o mean A). A tied
    row gets no offset, as if n were at most 3, and stays uniform.
    """
    if p is None:
        return A
    total = A.sum(-1, keepdim=True)
    mean, top = total / rows.n, A.detach().amax(-1, keepdim=True)
    offset = mean * ((rows.n > 3) & (top - mean > TIED * mean))
    top = (top - offset.detach()).masked_fill(total <= DEAD, 0)
    return normalised_power(A + offset.neg(), top, p)  # A - offset negates a matrix in backward


@dataclass(frozen=True)
class Variant:
    """One row of the table. `scale`, `bias` and `norm` broadcast against [B, H, Lq, 1]."""

    phi: Phi
    scale: Callable[[RowContext], Tensor | float] = lambda rows: rows.d**-0.5
    bias: Callable[[RowContext], Tensor | float] | None = None
    keyed: bool = False  # its bias differs between the keys of a row: [.., Lk]
    norm: Callable[[RowContext], Tensor | float] | None = None  # None: l1
    l2_normalise: bool = False  # q and k are scaled to unit length first
    bounded: bool = False  # scores never get so low that phi underflows for a whole row
    learnable: tuple[str, ...] = ()  # any of s and b (one per head) and p_n (shared by all layers)
    # numbers of each row and head, u and w, that are linear functions of the layer's input
    from_input: tuple[str, ...] = ()
    # in place of phi and l1, where a weight depends on the whole row: from scores [.., Lq, Lk],
    # -inf for hidden keys, to weights
    row_weights: Callable[[Tensor, RowContext], Tensor] | None = None
    # stage 2, from the normalised weights, their rows and p to the weights
    reweight: Callable[[Tensor, RowContext, Power], Tensor] = relu_power
    needs_p: bool = False

    @property
    def takes_p(self) -> bool:
        """relu_power needs l1, which it computes itself, and a phi that is never negative."""
        if self.reweight is not relu_power:
            return self.needs_p
        return self.norm is None and not self.phi.signed and self.row_weights is None

    @property
    def takes_sink(self) -> bool:
        """A sink needs l1, and weight at its first score, 0: relu's gradient would be 0 there."""
        row = self.norm is None and self.row_weights is None and self.reweight is relu_power
        return row and not self.phi.signed and bool(self.phi.function(torch.zeros(())) > 0)

    @property
    def is_softmax(self) -> bool:
        """Whether it is softmax at some scale, which torch's own fused attention computes."""
        row = self.phi is EXP and self.norm is None and self.bias is None
        return row and self.row_weights is None and self.reweight is relu_power


def unnormalised(rows: RowContext) -> float:
    return 1.0


def log_d_log_n(rows: RowContext) -> Tensor:
    return math.log(rows.d) * rows.n.log()


def inverse(A: Tensor, rows: RowContext, p: Power) -> Tensor:
    return -A


def recentre(A: Tensor, rows: RowContext, p: Power) -> Tensor:
    """A minus the mean of its row, except where n <= 3 (the footnote of LSSAR Table A4)."""
    return A - (rows.sees(A.shape[-1]) & (rows.n > 3)) / rows.n


def recentre_l1(A: Tensor, rows: RowContext, p: Power) -> Tensor:
    """Recentred, then l1. A tied row, which recentring would make 0, is left as it is too."""
    return l1_normalise(torch.where(tied(rows.n * A), A, recentre(A, rows, p)), signed=True)


def threshold(A: Tensor, rows: RowContext, p: Power) -> Tensor:
    """The weights above their row's mean, then l1: what relu_power keeps, without the power.

    Rows with n <= 3 and tied ones are left as they are.
    """
    x = rows.n * A
    return l1_normalise(A * ((x > 1) | (rows.n <= 3) | tied(x)))


def softpick(z: Tensor, rows: RowContext) -> Tensor:
    """relu(e^z - 1) over the sum of |e^z - 1|: rows sum to at most 1, and may be 0."""
    top = z.detach().amax(-1, keepdim=True)
    x = torch.where(z == -math.inf, 0, torch.exp(z - top) - torch.exp(-top))
    norm = x.abs().sum(-1, keepdim=True)
    return x.relu() * norm.masked_fill(norm <= DEAD, math.inf).reciprocal()


def entmax(z: Tensor, power: int) -> Tensor:
    """relu(z / power - tau)^power, with the tau of each row for which it sums to 1.

    A power of 1 is sparsemax, 2 is 1.5-entmax. tau comes from the sorted scores, of which the
    largest k are above it, and one step of Newton's method gives it its gradient.
    """
    z = z / power
    z = (z - z.detach().amax(-1, keepdim=True)).clamp_min(-2)  # tau is within -1 to 0
    with torch.no_grad():
        largest = z.sort(-1, descending=True).values
        k = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)
        mean = largest.cumsum(-1) / k
        if power == 1:
            tau = mean - 1 / k
        else:
            variance = largest.square().cumsum(-1) / k - mean.square()
            tau = mean - (1 / k - variance).clamp_min(0).sqrt()
        above = (tau < largest).sum(-1, keepdim=True)
        tau = tau.gather(-1, above - 1)
        slope = power * (z - tau).relu().pow(power - 1).where(z > tau, 0).sum(-1, keepdim=True)
    excess = (z - tau).relu().pow(power).sum(-1, keepdim=True) - 1
    return (z - (tau + excess / slope)).relu().pow(power)


def sparsemax(z: Tensor, rows: RowContext) -> Tensor:
    return entmax(z, 1)


def entmax15(z: Tensor, rows: RowContext) -> Tensor:
    return entmax(z, 2)


def stick_breaking(z: Tensor, rows: RowContext) -> Tensor:
    """sigmoid(z_ij) times the product of 1 - sigmoid(z_ik) over j < k < i; row i does not see i."""
    hidden = (z == -math.inf) | (rows.keys == rows.last)
    left = F.logsigmoid(-z).masked_fill(hidden, 0)  # the logarithm of what key k leaves
    after = left.flip(-1).cumsum(-1).flip(-1) - left  # of what the keys between j and i leave
    return (F.logsigmoid(z) + after).exp().masked_fill(hidden, 0)


def adaptive_temperature(z: Tensor, rows: RowContext) -> Tensor:
    """softmax(beta z), beta a polynomial in the entropy of softmax(z), at least 1."""
    hidden = z == -math.inf
    log_A = z.log_softmax(-1).masked_fill(hidden, 0)
    entropy = -(log_A.exp() * log_A).sum(-1, keepdim=True)
    beta = torch.zeros_like(entropy)
    for coefficient in (-0.037, 0.481, -2.3, 4.917, -1.791):
        beta = beta * entropy + coefficient
    z = z.masked_fill(hidden, 0) * torch.where(entropy > 0.5, beta.clamp_min(1), 1)
    return z.masked_fill(hidden, -math.inf).softmax(-1)


VARIANTS: dict[str, Variant] = {
    # LSSAR Table 1.
    "softmax": Variant(EXP),
    # The paper's Sigmoid(x - b) with b = -log L must mean sigmoid(z - log L): taken literally, it
    # adds log L. L stays the training length at other lengths: a row must not depend on the text
    # after it, and Ramapuram et al.'s published kernel takes the bias as a fixed number.
    "sigmoid": Variant(SIGMOID, bias=lambda rows: -math.log(rows.L), norm=unnormalised),
    "sigmoid_logn": Variant(SIGMOID, bias=lambda rows: -rows.n.log(), norm=unnormalised),
    "sigmoid_logn_l1": Variant(SIGMOID, bias=lambda rows: -rows.n.log()),
    "sigmoid_l1": Variant(SIGMOID),
    "relu_wortsman": Variant(RELU, norm=lambda rows: rows.L),  # L as for sigmoid
    "relu_li": Variant(RELU),
    # The paper gives no gamma. With 1, normal scores and values of unit variance give an output of
    # unit variance: relu(z)^2 is 1/2 on average.
    "relu_shen": Variant(RELU, norm=lambda rows: rows.gamma * (rows.n / 2).sqrt()),
    # Bounded: scores of unit vectors are within +-log d log n, above -41 at d = 64, n = 16,384.
    "lssa": Variant(SOFTPLUS, scale=log_d_log_n, l2_normalise=True, bounded=True),
    "lssar": Variant(SOFTPLUS, scale=log_d_log_n, l2_normalise=True, bounded=True, needs_p=True),
    # LSSAR Table A4
    "softmax_inverse": Variant(EXP, reweight=inverse),
    "softmax_recentred": Variant(EXP, reweight=recentre),
    "softmax_recentred_l1": Variant(EXP, reweight=recentre_l1),
    # LSSAR Table A5, scenarios I to III (IV is softmax)
    "linear": Variant(IDENTITY, norm=unnormalised),
    "exp": Variant(EXP, norm=unnormalised),
    "linear_l1": Variant(IDENTITY),
    # LSSAR Table A6 (its relu, sigmoid and exp are relu_li, sigmoid_l1 and softmax)
    "phi_relu2": Variant(RELU2),
    "phi_relu6": Variant(RELU6),
    "phi_gelu": Variant(GELU),
    "phi_softplus": Variant(SOFTPLUS),
    "phi_mish": Variant(MISH),
    # SSMax (b), (c), (d) and the probe of its Eq. 3. The paper gives no initial s for (b) and (d):
    # by default it is 1, as in the probe, and as (c) has it throughout.
    "ssmax": Variant(
        EXP, scale=lambda rows: rows.s * rows.n.log() * rows.d**-0.5, learnable=("s",)
    ),
    "ssmax_fixed": Variant(EXP, scale=lambda rows: rows.n.log() * rows.d**-0.5),
    "ssmax_bias": Variant(
        EXP,
        scale=lambda rows: (rows.s * rows.n.log() + rows.b) * rows.d**-0.5,
        learnable=("s", "b"),
    ),
    "ssmax_probe": Variant(
        EXP,
        scale=lambda rows: (rows.s * rows.p_n + rows.b) * rows.d**-0.5,
        learnable=("s", "b", "p_n"),
    ),
    # What users pick instead. Su 2021 ("Entropy invariance of attention", kexue.fm/archives/8823).
    "softmax_logn": Variant(
        EXP, scale=lambda rows: rows.n.log() / math.log(max(rows.L, 2)) * rows.d**-0.5
    ),
    # Zuhri et al. 2025 (arXiv 2504.20966)
    "softpick": Variant(EXPM1, row_weights=softpick),
    # Martins and Astudillo 2016; Peters et al. 2019
    "sparsemax": Variant(EXP, row_weights=sparsemax),
    "entmax15": Variant(EXP, row_weights=entmax15),
    # ASEntmax (Vasylenko et al. 2025, arXiv 2506.16640): the scale 1 + beta (log n)^gamma comes
    # from the row's input. n + 1 and the range of gamma, 2, are the authors' code's.
    "asentmax": Variant(
        EXP,
        scale=lambda rows: (
            (1 + F.softplus(rows.u) * (rows.n + 1).log() ** (2 * rows.w.tanh())) * rows.d**-0.5
        ),
        from_input=("u", "w"),
        row_weights=entmax15,
    ),
    # Tan et al. 2024 (arXiv 2410.17980); without the remainder, as in their kernel's output
    "stick_breaking": Variant(EXP, row_weights=stick_breaking),
    # Velickovic et al. 2024 (arXiv 2410.01104): for the weights of a softmax model, at evaluation
    "adaptive_temperature": Variant(EXP, row_weights=adaptive_temperature),
    # Ours: LSSAR taken apart. It differs from softmax in phi, in the scale and in stage 2; with
    # softmax, ssmax_fixed, phi_softplus and lssa these are all combinations of the first two. The
    # last row keeps what stage 2 keeps, but without the power.
    "softmax_cosine": Variant(EXP, scale=log_d_log_n, l2_normalise=True),
    "softplus_logn": Variant(SOFTPLUS, scale=lambda rows: rows.n.log() * rows.d**-0.5),
    "lssa_threshold": Variant(
        SOFTPLUS, scale=log_d_log_n, l2_normalise=True, bounded=True, reweight=threshold
    ),
}


@functools.cache
def check_variant(variant: Variant) -> None:
    """Raise UserError where a row of the table sees the future, or its phi is not as declared.

    Without this, a phi that is not 0 at `zero` would train with weights on hidden keys.
    """
    name = next((name for name, row in VARIANTS.items() if row is variant), "the variant")
    # transformers builds models on the meta device, and evaluations without gradients
    with torch.device("cpu"), torch.enable_grad():
        check_phi(name, variant.phi)
        check_causality(name, variant)


def check_phi(name: str, phi: Phi) -> None:
    """Raise UserError where phi is not as declared.

    That is not 0 at `zero`, not flat at a `zero` of -inf, not finite, or negative without `signed`.
    """
    hidden = torch.tensor(phi.zero, dtype=torch.float64, requires_grad=True)
    weight = phi.function(hidden.clone())
    if (zero := weight.item()) != 0:
        raise UserError(
            f"{name}: phi({phi.zero:g}) = {zero:.3g}, but hidden keys get this score and must get "
            "no weight: set Phi(zero=...) to a z with phi(z) = 0. Without such a z, as for a "
            "clamped exp, phi cannot be used"
        )
    if phi.zero == -math.inf and weight.requires_grad:
        (slope,) = torch.autograd.grad(weight, hidden)
        if slope != 0:
            raise UserError(
                f"{name}: phi's gradient at -inf, the score of hidden keys, is {slope.item():g}: "
                "set Phi(zero=...) to a finite z with phi(z) = 0"
            )
    grid = torch.linspace(-30, 30, 601, dtype=torch.float64)
    values = phi.function(grid)
    if not values.isfinite().all():
        z = grid[~values.isfinite()][0].item()
        raise UserError(f"{name}: phi({z:g}) is not finite; scores may have any value")
    if (values < 0).any() and not phi.signed:
        z, value = grid[values < 0][0].item(), values[values < 0][0].item()
        raise UserError(
            f"{name}: phi({z:g}) = {value:.3g} is negative: declare Phi(..., signed=True), with "
            "which l1 sums absolute values and p is refused"
        )


def check_causality(name: str, variant: Variant) -> None:
    """Raise UserError where a weight or a gradient reaches a key that its row does not see."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 6, 8, dtype=torch.float64, generator=generator)
    k.requires_grad_()
    attention = Attention(
        variant, p=2.0 if variant.needs_p else None, n_head=1, head_size=8, trained_length=6,
        follow_length=False, impl="reference", s_init=1.0, b_init=0.0, gamma=1.0,
    ).double()  # fmt: skip
    try:
        all_weights = attention.weights(q, k)[0, 0]
    except Exception as error:  # whatever a formula raises
        raise UserError(
            f"{name}: its formulas fail: {type(error).__name__}: {error}. n, s, b and p_n of a "
            "row's context are tensors: rows.n.log(), not math.log(rows.n)"
        ) from error
    if variant.bias is not None and not variant.keyed:
        rows = attention._rows(q, k, slice(None), 6)
        if (torch.as_tensor(variant.bias(rows)) + rows.n.new_zeros(1)).shape[-1] > 1:
            raise UserError(
                f"{name}: its bias differs between keys: declare Variant(..., keyed=True)"
            )
    for row, weights in enumerate(all_weights, start=1):
        (gradient,) = torch.autograd.grad(weights.square().sum(), k, retain_graph=True)
        if weights[row:].any() or gradient[0, 0, row:].any():
            raise UserError(
                f"{name}: row {row} depends on keys after it; check that its formulas use the rows "
                "alone, and that `reweight` leaves hidden keys, whose weight is 0, at 0"
            )


class Attention(nn.Module):
    """One layer's attention, for any entry of `VARIANTS`.

    Called as `attn(q, k, v)` with q [B, H, Lq, d] and k, v [B, Hk, Lk, d] after RoPE, Lq <= Lk: the
    queries are the last Lq positions, so the first of them sees Lk - Lq + 1 keys, or as many as the
    window has. With Hk < H, each head of keys and values serves H / Hk consecutive heads of
    queries. For a single query k and v may be Factors. Returns [B, H, Lq, d] in v's dtype. Scores
    and weights are computed in float32 (float64 for float64 inputs), with autocast off.
    """

    s: nn.Parameter | None
    b: nn.Parameter | None
    p_n: nn.Parameter | None
    sink: nn.Parameter | None
    log_power: nn.Parameter | None

    def __init__(
        self,
        variant: Variant,
        *,
        p: float | None,
        n_head: int,
        head_size: int,
        trained_length: int,
        follow_length: bool,
        impl: str,
        s_init: float,
        b_init: float,
        gamma: float,
        window: int | None = None,
        p_law: str = "constant",
        softcap: float | None = None,
        alibi_heads: int = 0,
        sink: str = "none",
    ) -> None:
        """The arguments are settings of config.py.

        With `follow_length` L is the current length instead of `trained_length`. The last
        `alibi_heads` heads have ALiBi.
        """
        super().__init__()
        self.variant, self.p, self.impl = variant, p, impl
        self.n_head, self.head_size, self.gamma, self.window = n_head, head_size, gamma, window
        self.trained_length, self.follow_length = trained_length, follow_length
        self.p_law, self.softcap, self.alibi_heads = p_law, softcap, alibi_heads
        self.has_sink = sink != "none"
        initial = {
            "s": torch.full((n_head,), s_init),
            "b": torch.full((n_head,), b_init),
            "p_n": torch.ones(trained_length),
            "sink": torch.zeros(n_head),
            "log_power": torch.zeros(n_head),
        }
        learnable = {*variant.learnable}
        learnable |= {"sink"} if sink == "learned" else set()
        learnable |= {"log_power"} if p_law == "learned" else set()
        for name, value in initial.items():
            self.register_parameter(name, nn.Parameter(value) if name in learnable else None)

    @property
    def ordered(self) -> bool:
        """Whether the order of keys matters, not only which of them a row sees."""
        return bool(self.alibi_heads or self.variant.row_weights or self.variant.keyed)

    def forward(
        self,
        q: Tensor,
        k: Tensor | Factors,
        v: Tensor | Factors,
        score_scale: float = 1.0,
        length: int | None = None,
        from_input: FromInput = FromInput(),
        filled: Tensor | None = None,
    ) -> Tensor:
        """The output [B, H, Lq, d] in v's dtype, with every score multiplied by `score_scale`.

        That factor is the square of YaRN's attention factor. `length` is the current length if k
        does not have it yet: the final length of a cache. `filled` [1], for a single query, is how
        many of the keys there are so far; k and v must be finite behind them.
        """
        length = self._length(k.shape[2] if length is None else length)
        if isinstance(k, Factors) and isinstance(v, Factors):
            if self.impl in ("auto", "blocked"):
                return self._factored(q, k, v, length, score_scale, from_input, filled)
            k, v = k.expand(), v.expand()
        assert isinstance(k, Tensor) and isinstance(v, Tensor)
        first = first_key(k.shape[2] - q.shape[2], self.window)  # no query sees the keys before it
        k, v = k[:, :, first:], v[:, :, first:]
        from_input = from_input.part(ALL, slice(None), slice(first, None))
        with torch.autocast(q.device.type, enabled=False):
            path = self._path(q, self._cuts(k) or filled is not None, from_input)
            if path == "triton":
                return self._triton(q, k, v, length, score_scale, from_input, filled)
            if path == "sdpa":
                return self._sdpa(q, k, v, length, score_scale, filled)
            q, k, inv_key_norm = self._normalise_qk(q, k)
            call = Call(inv_key_norm, slice(None), length, score_scale, from_input, filled)
            if path == "reference":
                return self._reference(q, k, v, call)
            return self._blocked(q, k, v, call)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        score_scale: float = 1.0,
        length: int | None = None,
        from_input: FromInput = FromInput(),
    ) -> Tensor:
        """The attention weights [B, H, Lq, Lk], float32 or float64, 0 for hidden keys."""
        length = self._length(k.shape[2] if length is None else length)
        with torch.autocast(q.device.type, enabled=False):
            q, k, inv_key_norm = self._normalise_qk(q, k)
            return self._weights(
                q, k, Call(inv_key_norm, slice(None), length, score_scale, from_input)
            )

    def _cuts(self, k: Tensor) -> bool:
        """Whether the window is shorter than these keys."""
        return self.window is not None and self.window < k.shape[2]

    def _path(self, q: Tensor, masked: bool = False, from_input: FromInput = FromInput()) -> str:
        """The path to take: 'sdpa', 'triton', 'blocked' or 'reference'.

        It follows from `impl` and from what the variant, q's device and its dtype allow. On a GPU
        softmax takes the kernels if it is `masked`, by a window or where a cache is not full,
        because torch's fastest attention takes no mask. Raises UserError where `impl` requires
        kernels that cannot run.
        """
        if self.impl not in ("auto", "triton"):
            return self.impl
        plain = self.p is None and self.softcap is None and not (self.alibi_heads or self.has_sink)
        plain = plain and from_input.log_forget is None
        softmax = self.impl == "auto" and self.variant.is_softmax and plain
        if softmax and not (masked and q.is_cuda):
            return "sdpa"
        obstacle = self._triton_obstacle(q)
        if obstacle is None and (q.is_cuda or self.impl == "triton"):
            return "triton"
        if self.impl == "triton":
            raise UserError(f"attention_impl = 'triton' cannot be used: {obstacle}")
        return "sdpa" if softmax else "blocked"

    def _triton_obstacle(self, q: Tensor) -> str | None:
        """Why the fused kernels cannot take these queries; None if they can."""
        obstacle = kernel_obstacle(self.variant, self.head_size)
        if obstacle is not None:
            return obstacle
        if kernels is None:
            return "Triton is not installed"
        if not (q.is_cuda or kernels.INTERPRETED):
            return f"it needs an NVIDIA GPU, and this is {q.device.type}"
        if q.dtype == torch.float64:
            return "it does not compute in float64"
        return None

    def _normalise_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """q and k at unit length if the variant normalises them, computed once for all blocks.

        For a single query, keys stay as they are and 1 / |k| [B, H, 1, Lk] is returned for its
        scores: that is less work than normalising a whole cache of keys.
        """
        if not self.variant.l2_normalise:
            return q, k, None
        if q.shape[2] > 1:
            return l2_normalise(q), l2_normalise(k), None
        dtype = torch.promote_types(k.dtype, torch.float32)
        squared = torch.linalg.vector_norm(k, dim=-1, dtype=dtype).square()
        inverse = torch.rsqrt(squared + 1e-12).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return l2_normalise(q), k, inverse[:, :, None]

    def _weights(self, q: Tensor, k: Tensor | Factors, call: "Call") -> Tensor:
        variant, phi = self.variant, self.variant.phi
        rows = self._rows(q, k, call.heads, call.length, call.from_input, call.filled)
        q, k = q.to(rows.n.dtype) * (call.score_scale * variant.scale(rows)), k.to(rows.n.dtype)
        z = k.dot(q) if isinstance(k, Factors) else grouped_product(q, k.mT)  # [B, H, Lq, Lk]
        if call.inv_key_norm is not None:
            z = z * call.inv_key_norm
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        if variant.bias is not None:
            z = z + variant.bias(rows)
        if self.alibi_heads:
            z = z - self._slopes(rows) * (rows.last - rows.keys)
        if call.from_input.log_forget is not None:
            decay = call.from_input.log_forget.to(z.dtype).cumsum(-1)
            z = z + (of_queries(decay, rows)[..., None] - decay[:, :, None])
        z = mask_hidden(z, rows, variant)
        if variant.row_weights is not None:
            return variant.row_weights(z, rows)
        if self.has_sink:  # the last column
            z = torch.cat((z, self._sink(rows).expand(*z.shape[:3], 1)), dim=-1)
        if (shift := self._shift(call.from_input)) is not None:
            z = z + shift(z.detach().amax(-1, keepdim=True))
        A, p = phi.function(z), self._power(rows)
        if variant.norm is not None:
            A = A / variant.norm(rows)
        elif p is None or variant.reweight is not relu_power:  # with p, it has an l1 of its own
            A = l1_normalise(A, phi.signed)
        return variant.reweight(A, rows, p)[..., : k.shape[2]]

    def _shift(self, from_input: FromInput) -> Callable[[Tensor], Tensor] | None:
        """phi.shift where rows need it: phi may underflow, and l1 cancels the shift."""
        bounded = self.variant.bounded and not self.alibi_heads and from_input.log_forget is None
        return self.variant.phi.shift if self.variant.norm is None and not bounded else None

    def _slopes(self, rows: RowContext) -> Tensor:
        """ALiBi's slope of each head, [H, 1, 1], 0 for the heads before the last `alibi_heads`."""
        h = (rows.head - (self.n_head - self.alibi_heads) + 1).to(rows.n.dtype)
        return torch.exp2(-8 * h / self.alibi_heads) * (h > 0)

    def _sink(self, rows: RowContext) -> Tensor:
        """The sink's score in each head, [H, 1, 1]."""
        if self.sink is None:
            return rows.n.new_zeros(len(rows.head), 1, 1)
        return self.sink[rows.head].to(rows.n.dtype)

    def _power(self, rows: RowContext) -> Power:
        """p, or by `p_law` one for each head, [H, 1, 1], or row, [Lq, 1]; never below 1."""
        if self.p is None or self.p_law == "constant":
            return self.p
        if self.log_power is not None:
            return (self.p * self.log_power[rows.head].exp()).clamp_min(1)
        return (self.p * rows.n.log() / math.log(max(self.trained_length, 2))).clamp_min(1)

    def _rows(
        self,
        q: Tensor,
        k: Tensor | Factors,
        heads: slice,
        length: int,
        from_input: FromInput = FromInput(),
        filled: Tensor | None = None,
    ) -> RowContext:
        Lq, Lk = q.shape[2], k.shape[2]
        keys = torch.arange(Lk, device=q.device)
        last = keys[Lk - Lq :, None] if filled is None else filled[:, None] - 1  # [Lq, 1]
        n = (last + 1).clamp_max(Lk if self.window is None else self.window)
        # float32 at least: bfloat16 cannot count past 256
        dtype = torch.promote_types(q.dtype, torch.float32)
        head = torch.arange(self.n_head, device=q.device)[heads, None, None]
        rows = RowContext(
            n.to(dtype), last, keys, head, self.window, self.head_size, length, self.gamma
        )  # fmt: skip
        for name in self.variant.from_input:
            numbers = from_input.rows.get(name, n.new_zeros(1, 1, 1))  # 0 without an input
            setattr(rows, name, numbers[..., None].to(dtype))
        if self.s is not None:
            rows.s = self.s[heads, None, None]
        if self.b is not None:
            rows.b = self.b[heads, None, None]
        if self.p_n is not None:  # its last value beyond the training length
            rows.p_n = self.p_n[(n - 1).clamp_max(len(self.p_n) - 1)]
        return rows

    def _length(self, current: int) -> int:
        return current if self.follow_length else self.trained_length

    def _reference(self, q: Tensor, k: Tensor, v: Tensor, call: "Call") -> Tensor:
        return grouped_product(self._weights(q, k, call).to(v.dtype), v)

    def _factored(
        self,
        q: Tensor,
        k: Factors,
        v: Factors,
        length: int,
        score_scale: float,
        from_input: FromInput,
        filled: Tensor | None,
    ) -> Tensor:
        """The reference for a single query, with the factors of keys and values."""
        with torch.autocast(q.device.type, enabled=False):
            k, inverse = k.to(torch.promote_types(q.dtype, torch.float32)), None
            if self.variant.l2_normalise:
                q, inverse = l2_normalise(q), torch.rsqrt(k.squared_norms() + 1e-12)
            call = Call(inverse, slice(None), length, score_scale, from_input, filled)
            return v.mix(self._weights(q, k, call))

    def _blocked(self, q: Tensor, k: Tensor, v: Tensor, call: "Call") -> Tensor:
        """The reference in blocks, so that only the weights of one block are in memory.

        A block is some queries of some heads of some sequences. It reads no keys beyond its last
        query, and none before the window of its first.
        """
        (B, H, Lq, _), Lk, group = q.shape, k.shape[2], q.shape[1] // k.shape[1]
        queries = min(Lq, BLOCK_QUERIES)
        most = Lk if self.window is None else min(Lk, self.window + queries - 1)  # keys per block
        matrices = (BLOCK_SCORES_CPU if q.is_cpu else BLOCK_SCORES) // (queries * most)
        heads, sequences = min(H, max(1, matrices)), max(1, matrices // H)
        # whole groups, or equal parts of one
        heads = heads // group * group or max(n for n in range(1, heads + 1) if group % n == 0)
        recompute = torch.is_grad_enabled() and B * H * Lq * most > KEEP_SCORES

        def block(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
            if not recompute:
                return self._reference(q, k, v, call)
            return checkpoint(
                self._reference, q, k, v, call, use_reentrant=False, preserve_rng_state=False
            )

        def part_of(part: tuple[slice, slice]) -> Tensor:
            theirs = part[0], slice(part[1].start // group, -(-part[1].stop // group))
            own, keys, values, end, out = q[part], k[theirs], v[theirs], Lq, []
            # The largest block first: the others then fit into the memory that it frees, and its
            # keys hold theirs, so that their gradients are padded to as many, not to all.
            for some in reversed(own.split(queries, dim=2)):
                start = end - some.shape[2]
                last = Lk - Lq + end
                first = first_key(Lk - Lq + start, self.window)
                keys, values = keys[:, :, :last], values[:, :, :last]
                given = call.part(part, slice(start, end), slice(first, last))
                out.append(block(some, keys[:, :, first:], values[:, :, first:], given))
                end = start
            return torch.cat(out[::-1], dim=2)

        sequences_of = [slice(b, b + sequences) for b in range(0, B, sequences)]
        heads_of = [slice(h, h + heads) for h in range(0, H, heads)]
        return torch.cat([torch.cat([part_of((b, h)) for h in heads_of], 1) for b in sequences_of])

    def _triton(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        length: int,
        score_scale: float,
        from_input: FromInput,
        filled: Tensor | None = None,
    ) -> Tensor:
        assert kernels is not None
        variant = self.variant
        # The numbers of a single row are computed on the CPU, where no operation is a launch.
        learns = next(self.parameters(), None) is not None
        given = from_input.rows or from_input.log_forget is not None or filled is not None
        on_cpu = q.shape[2] == 1 and not (learns or given or torch.compiler.is_compiling())
        shaped = q.new_empty(q.shape, device="cpu") if on_cpu else q
        rows = self._rows(shaped, k, slice(None), length, from_input, filled)

        def per_row(x: Tensor | float) -> Tensor:  # [1 or B, H, Lq]
            x = x.to(rows.n.dtype) if isinstance(x, Tensor) else rows.n.new_full((), x)
            sequences = x.shape[0] if x.ndim == 4 else 1
            return x.expand(sequences, q.shape[1], q.shape[2], 1)[..., 0]

        bias = None if variant.bias is None else per_row(variant.bias(rows))
        key_bias = None
        if from_input.log_forget is not None:
            decay = from_input.log_forget.float().cumsum(-1)
            own, key_bias = of_queries(decay, rows), -decay
            # softmax is the same for all scores of a row shifted alike: no gradient to compute
            shifts = variant.is_softmax and self.p is None and not self.has_sink
            bias = (own.detach() if shifts else own) + (0 if bias is None else bias)
        power = self._power(rows)
        return kernels.attend(
            q.to(v.dtype),
            k.to(v.dtype),
            v,
            scale=per_row(score_scale * variant.scale(rows)),
            bias=bias,
            norm=None if variant.norm is None else per_row(variant.norm(rows)),
            phi=variant.phi.kernel,
            shifted=self._shift(from_input) is not None,
            p=None if isinstance(power, Tensor) else power,
            unit=variant.l2_normalise,
            signed=variant.phi.signed and variant.row_weights is None,
            window=self.window if self._cuts(k) else None,
            sink=self._sink(rows)[:, 0, 0].to(q.device) if self.has_sink else None,
            slopes=self._slopes(rows)[:, 0, 0].to(q.device) if self.alibi_heads else None,
            key_bias=key_bias,
            softcap=self.softcap,
            powers=per_row(power) if isinstance(power, Tensor) else None,
            filled=filled,
        )

    def _sdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        length: int,
        score_scale: float,
        filled: Tensor | None,
    ) -> Tensor:
        Lq, Lk = q.shape[2], k.shape[2]
        if self.variant.l2_normalise:
            q, k = l2_normalise(q), l2_normalise(k)
        rows = self._rows(q, k, slice(None), length, filled=filled)
        scale = score_scale * self.variant.scale(rows)
        if isinstance(scale, Tensor):  # one for each row: torch takes a single number
            q, scale = q * scale, 1.0
        q, k = q.to(v.dtype), k.to(v.dtype)
        if self._cuts(k):
            return self._sdpa_in_blocks(q, k, v, length, scale)
        mask, causal = None, 1 < Lq == Lk
        if filled is not None:
            mask = rows.sees(Lk)
        elif 1 < Lq < Lk:
            # is_causal aligns the first query with the first key, but queries after a cache are
            # the last positions. Imported here because it loads _dynamo, which takes a second.
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(Lq, Lk)
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    def _sdpa_in_blocks(self, q: Tensor, k: Tensor, v: Tensor, length: int, scale: float) -> Tensor:
        """Softmax with a window: each block of queries over its own keys, with a mask of theirs."""
        past = k.shape[2] - q.shape[2]
        out = []
        for start in range(0, q.shape[2], BLOCK_QUERIES):
            queries = q[:, :, start : start + BLOCK_QUERIES]
            end = past + start + queries.shape[2]
            keys = slice(first_key(past + start, self.window), end)
            some = k[:, :, keys]
            mask = self._rows(queries, some, slice(None), length).sees(some.shape[2])
            out.append(
                F.scaled_dot_product_attention(
                    queries, some, v[:, :, keys], mask, scale=scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
            )  # fmt: skip
        return torch.cat(out, dim=2)


ALL = slice(None), slice(None)


@dataclass(frozen=True)
class Call:
    """What the reference needs besides q, k and v, for some heads."""

    inv_key_norm: Tensor | None  # [B, H, 1, Lk], where the keys are not normalised yet
    heads: slice
    length: int
    score_scale: float
    from_input: FromInput
    filled: Tensor | None = None

    def part(self, part: tuple[slice, slice], queries: slice, keys: slice) -> "Call":
        """That of some sequences and heads, queries and keys."""
        inverse = None if self.inv_key_norm is None else self.inv_key_norm[part]
        given = self.from_input.part(part, queries, keys)
        return replace(self, inv_key_norm=inverse, heads=part[1], from_input=given)


def first_key(position: int, window: int | None) -> int:
    """The first key that the query at a position sees."""
    return 0 if window is None else max(0, position + 1 - window)


def grouped_product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y of x [B, H, n, m] and y [B, Hk, m, l], each of its heads serving H / Hk of x's."""
    if x.shape[1] == y.shape[1]:
        return x @ y
    return (x.reshape(len(x), y.shape[1], -1, x.shape[3]) @ y).view(*x.shape[:3], -1)


def of_queries(x: Tensor, rows: RowContext) -> Tensor:
    """Of numbers of all keys, [B, H, Lk], those at the queries' own positions, [B, H, Lq]."""
    return x.index_select(2, rows.last[:, 0])


def mask_hidden(z: Tensor, rows: RowContext, variant: Variant) -> Tensor:
    """The scores z [.., Lq, Lk] with those of hidden keys replaced; z may be overwritten."""
    Lq, Lk = z.shape[-2:]
    hidden = ~rows.sees(Lk)
    value = variant.phi.zero if variant.row_weights is None else -math.inf
    formulas = variant.row_weights is not None or variant.reweight is not relu_power
    if formulas or value > -math.inf:  # whose gradient may be infinite or NaN there
        return torch.where(hidden, value, z)
    # phi is flat at -inf (check_phi), so autograd need not know; and without a window all rows of
    # several see the first keys
    first = Lk - Lq if rows.window is None and Lq > 1 else 0
    with torch.no_grad():
        z[..., first:].masked_fill_(hidden[:, first:], value)
    return z


def l2_normalise(x: Tensor) -> Tensor:
    """x at unit length along the last dimension, in float32 at least.

    The 1e-12 bounds the gradient of a zero vector.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-12)


def l1_normalise(A: Tensor, signed: bool = False) -> Tensor:
    """Divide rows by their sum of absolute values; a dead row becomes 0 and gets no gradient."""
    norm = (A.abs() if signed else A).sum(-1, keepdim=True)
    # times the reciprocal: autograd's division takes three more passes over the matrix
    return A * norm.masked_fill(norm <= DEAD, math.inf).reciprocal()


def normalised_power(x: Tensor, top: Tensor, p: float | Tensor) -> Tensor:
    """relu(x)^p, then l1, of x [.., Lq, Lk]; rows whose `top` is 0 become 0.

    `top` is a row's largest x. Dividing by it, which l1 cancels, prevents overflow at any p.
    """
    top = top.masked_fill(top == 0, math.inf)
    if x.is_cpu and not (isinstance(p, Tensor) or torch.compiler.is_compiling()):
        return NormalisedPower.apply(x, top, p)
    return l1_normalise((x / top).relu().pow(p))


class NormalisedPower(torch.autograd.Function):
    """What normalised_power does, in fewer passes over the matrix, for eager mode on a CPU.

    A row with a single x above 0 has the weight 1 and the gradient 0, both exactly.
    """

    @staticmethod
    def forward(x: Tensor, top: Tensor, p: float) -> Tensor:
        x_p = power((x / top).relu_(), p)
        norm = x_p.sum(-1, keepdim=True)
        return x_p.div_(norm.masked_fill(norm <= DEAD, math.inf))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        x, _, ctx.p = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, A = ctx.saved_tensors
        coupling = gradient - torch.einsum("...k,...k->...", A, gradient)[..., None]
        slope = A / F.threshold(x, 0, math.inf)  # 0 where x is not above 0
        return coupling.mul_(slope).mul_(ctx.p), None, None


def power(x: Tensor, p: float) -> Tensor:
    """x^p of x >= 0, by products where p is an integer: a third of pow's time on a CPU."""
    if not 3 < p < 1000 or p != round(p):
        return x.pow(p)
    y = x
    for digit in f"{round(p):b}"[1:]:  # squared for each binary digit, times x for a 1
        y = x.square() if y is x else y.square_()
        if digit == "1":
            y.mul_(x)
    return y


def tied(x: Tensor) -> Tensor:
    """Whether each row of x = n A, whose mean is 1, is tied: [.., Lq, 1]."""
    return x.detach().amax(-1, keepdim=True) - 1 <= TIED


def kernel_obstacle(variant: Variant, head_size: int) -> str | None:
    """Why kernels.py cannot compute a variant at this head size; None if it can."""
    if variant.row_weights is not None and variant.phi is not EXPM1:
        return "its weights are functions of whole rows"
    if variant.phi.kernel is None or (kernels and variant.phi.kernel not in kernels.PHIS):
        return "its phi names no entry of kernels.PHIS"
    if variant.reweight is not relu_power:
        return "its re-weighting is not the paper's"
    if variant.keyed:
        return "its bias differs between keys"
    if head_size > 128:
        return f"head size {head_size} is above 128"
    return None


def share_parameters(layers: list[Attention]) -> None:
    """Make all layers share SSMax's p_n, as in the paper."""
    for layer in layers[1:]:
        layer.p_n = layers[0].p_n
