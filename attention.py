"""The attention family: a table of variants, and four paths that compute them.

Every variant in the papers comes from three choices. For one head of size d, with a row (query) i
that sees n_i keys, its own the last, and s_ij = q_i . k_j:

    scores      z_ij = scale_i s_ij + bias_i                   the argument of phi
    normalise   A_ij = phi(z_ij) / norm_i, i - n_i < j <= i    stage 1: the l1 norm or a fixed one
    re-weight   A_ij <- relu(n_i A_ij - o_i)^p, then l1        stage 2, if p is set (or another)

o_i is 0 for n_i <= 3 and 1 beyond (LSSAR, Algorithm 1). n_i is i or, with a window of W keys,
min(i, W). The papers have no windows: every n in a formula is this n_i, that in n > 3 and the index
of SSMax's p_n included, recentring subtracts the mean of the keys seen, and L stays a length of
text, whatever the window.

The papers are LSSAR ("Softplus Attention with Re-weighting Boosts Length Extrapolation in Large
Language Models", Gao et al. 2026) and SSMax ("Scalable-Softmax Is Superior for Attention",
Nakanishi 2025). To add a variant, add a row to `VARIANTS`, and a `Phi` if its function is new; no
code outside this table refers to a variant by name.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

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
# keep their scores within BLOCK_SCORES or, on a CPU, within its cache.
BLOCK_QUERIES = 256
BLOCK_SCORES = 2**25
BLOCK_SCORES_CPU = 2**20
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

    def expand(self) -> Tensor:
        """x, [B, H, Lk, d]."""
        return torch.einsum("brlh,brld->bhld", self.a, self.b)

    def dot(self, q: Tensor) -> Tensor:
        """The products [B, H, 1, Lk] of a single query of each head, [B, H, 1, d], with its x."""
        a, b = self.a.to(q.dtype), self.b.to(q.dtype)
        return (a * (b @ q.transpose(1, 2).mT)).sum(1).mT[:, :, None]

    def squared_norms(self, dtype: torch.dtype) -> Tensor:
        """|x|^2, [B, H, 1, Lk]: sum over r and s of a_r a_s b_r . b_s."""
        a, b = self.a.to(dtype), self.b.to(dtype)
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


@dataclass
class RowContext:
    """The quantities that a variant's formulas may use, for the rows (queries) of one call."""

    n: Tensor  # [Lq, 1] keys that each row sees
    last: Tensor  # [Lq, 1] the last of them, counted from 0
    window: int | None
    d: int  # head size
    L: int  # the training length, or the current one (setting `attention_length`)
    gamma: float
    # set only for a variant that names them in `learnable`
    s: Tensor = field(init=False)  # [H, 1, 1]
    b: Tensor = field(init=False)  # [H, 1, 1]
    p_n: Tensor = field(init=False)  # [Lq, 1]

    def sees(self, keys: int) -> Tensor:
        """Whether each row sees each of this many keys, [Lq, keys]."""
        key = torch.arange(keys, device=self.last.device)
        seen = key <= self.last
        return seen if self.window is None else seen & (key > self.last - self.window)


def relu_power(A: Tensor, rows: RowContext, p: float | None) -> Tensor:
    """Stage 2, LSSAR Eq. 5: relu(n A - o)^p, then l1; nothing if p is None.

    A is [.., Lq, Lk], its row sums 1 or 0. The power is of x / max x, which l1 cancels, so that
    nothing overflows at any p or n. A tied row gets no offset, as if n were at most 3, and stays
    uniform.
    """
    if p is None:
        return A
    x = rows.n * A
    x = (x - ((rows.n > 3) & ~tied(x)).to(x.dtype)).relu()
    top = x.detach().amax(-1, keepdim=True)
    return l1_normalise((x * top.masked_fill(top == 0, math.inf).reciprocal()).pow(p))


@dataclass(frozen=True)
class Variant:
    """One row of the table. `scale`, `bias` and `norm` broadcast against [B, H, Lq, 1]."""

    phi: Phi
    scale: Callable[[RowContext], Tensor | float] = lambda rows: rows.d**-0.5
    bias: Callable[[RowContext], Tensor | float] | None = None
    norm: Callable[[RowContext], Tensor | float] | None = None  # None: l1
    l2_normalise: bool = False  # q and k are scaled to unit length first
    bounded: bool = False  # scores never get so low that phi underflows for a whole row
    learnable: tuple[str, ...] = ()  # any of s and b (one per head) and p_n (shared by all layers)
    # stage 2, from the normalised weights, their rows and p to the weights
    reweight: Callable[[Tensor, RowContext, float | None], Tensor] = relu_power
    needs_p: bool = False

    @property
    def shift(self) -> Callable[[Tensor], Tensor] | None:
        """phi.shift where rows need it: phi may underflow, and l1 cancels the shift."""
        return self.phi.shift if self.norm is None and not self.bounded else None

    @property
    def takes_p(self) -> bool:
        """relu_power needs rows that are distributions: l1, and a phi that is never negative."""
        if self.reweight is not relu_power:
            return self.needs_p
        return self.norm is None and not self.phi.signed

    def is_softmax(self, p: float | None) -> bool:
        """Whether it is softmax at some scale, which torch's own fused attention computes."""
        row = self.phi is EXP and self.norm is None and self.bias is None
        return row and self.reweight is relu_power and p is None


def unnormalised(rows: RowContext) -> float:
    return 1.0


def log_d_log_n(rows: RowContext) -> Tensor:
    return math.log(rows.d) * rows.n.log()


def inverse(A: Tensor, rows: RowContext, p: float | None) -> Tensor:
    return -A


def recentre(A: Tensor, rows: RowContext, p: float | None) -> Tensor:
    """A minus the mean of its row, except where n <= 3 (the footnote of LSSAR Table A4)."""
    return A - (rows.sees(A.shape[-1]) & (rows.n > 3)) / rows.n


def recentre_l1(A: Tensor, rows: RowContext, p: float | None) -> Tensor:
    """Recentred, then l1. A tied row, which recentring would make 0, is left as it is too."""
    return l1_normalise(torch.where(tied(rows.n * A), A, recentre(A, rows, p)), signed=True)


def threshold(A: Tensor, rows: RowContext, p: float | None) -> Tensor:
    """The weights above their row's mean, then l1: what relu_power keeps, without the power.

    Rows with n <= 3 and tied ones are left as they are.
    """
    x = rows.n * A
    return l1_normalise(A * ((x > 1) | (rows.n <= 3) | tied(x)))


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
    with torch.device("cpu"):  # transformers builds models on the meta device
        check_phi(name, variant.phi)
        check_causality(name, variant)


def check_phi(name: str, phi: Phi) -> None:
    """Raise UserError where phi is not 0 at `zero`, not finite, or negative without `signed`."""
    zero = phi.function(torch.tensor(phi.zero, dtype=torch.float64)).item()
    if zero != 0:
        raise UserError(
            f"{name}: phi({phi.zero:g}) = {zero:.3g}, but hidden keys get this score and must get "
            "no weight: set Phi(zero=...) to a z with phi(z) = 0. Without such a z, as for a "
            "clamped exp, phi cannot be used"
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
    for row, weights in enumerate(all_weights, start=1):
        (gradient,) = torch.autograd.grad(weights.square().sum(), k, retain_graph=True)
        if weights[row:].any() or gradient[0, 0, row:].any():
            raise UserError(
                f"{name}: row {row} depends on keys after it; check that its formulas use the rows "
                "alone, and that `reweight` leaves hidden keys, whose weight is 0, at 0"
            )


class Attention(nn.Module):
    """One layer's attention, for any row of `VARIANTS`.

    Called as `attn(q, k, v)` with q [B, H, Lq, d] and k, v [B, Hk, Lk, d] after RoPE, Lq <= Lk: the
    queries are the last Lq positions, so the first of them sees Lk - Lq + 1 keys, or as many as the
    window has. With Hk < H, each head of keys and values serves H / Hk consecutive heads of
    queries. For a single query k and v may be Factors. Returns [B, H, Lq, d] in v's dtype. Scores
    and weights are computed in float32 (float64 for float64 inputs), with autocast off.
    """

    s: nn.Parameter | None
    b: nn.Parameter | None
    p_n: nn.Parameter | None

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
    ) -> None:
        """The arguments are settings of config.py.

        With `follow_length` L is the current length instead of `trained_length`.
        """
        super().__init__()
        self.variant, self.p, self.impl = variant, p, impl
        self.head_size, self.gamma, self.window = head_size, gamma, window
        self.trained_length, self.follow_length = trained_length, follow_length
        initial = {
            "s": torch.full((n_head,), s_init),
            "b": torch.full((n_head,), b_init),
            "p_n": torch.ones(trained_length),
        }
        for name, value in initial.items():
            learnable = name in variant.learnable
            self.register_parameter(name, nn.Parameter(value) if learnable else None)

    def forward(
        self,
        q: Tensor,
        k: Tensor | Factors,
        v: Tensor | Factors,
        score_scale: float = 1.0,
        length: int | None = None,
    ) -> Tensor:
        """The output [B, H, Lq, d] in v's dtype, with every score multiplied by `score_scale`.

        That factor is the square of YaRN's attention factor. `length` is the current length if k
        does not have it yet: the final length of a cache.
        """
        if isinstance(k, Factors) and isinstance(v, Factors):
            if self.impl in ("auto", "blocked"):
                return self._factored(q, k, v, score_scale, length)
            k, v = k.expand(), v.expand()
        assert isinstance(k, Tensor) and isinstance(v, Tensor)
        length = self._length(k.shape[2] if length is None else length)
        first = first_key(k.shape[2] - q.shape[2], self.window)  # no query sees the keys before it
        k, v = k[:, :, first:], v[:, :, first:]
        with torch.autocast(q.device.type, enabled=False):
            path = self._path(q, self._cuts(k))
            if path == "triton":
                return self._triton(q, k, v, length, score_scale)
            if path == "sdpa":
                return self._sdpa(q, k, v, length, score_scale)
            q, k, inv_key_norm = self._normalise_qk(q, k)
            if path == "reference":
                return self._reference(q, k, v, inv_key_norm, slice(None), length, score_scale)
            return self._blocked(q, k, v, inv_key_norm, length, score_scale)

    def weights(
        self, q: Tensor, k: Tensor, score_scale: float = 1.0, length: int | None = None
    ) -> Tensor:
        """The attention weights [B, H, Lq, Lk], float32 or float64, 0 for hidden keys."""
        length = self._length(k.shape[2] if length is None else length)
        with torch.autocast(q.device.type, enabled=False):
            return self._weights(*self._normalise_qk(q, k), slice(None), length, score_scale)

    def _cuts(self, k: Tensor) -> bool:
        """Whether the window is shorter than these keys."""
        return self.window is not None and self.window < k.shape[2]

    def _path(self, q: Tensor, windowed: bool = False) -> str:
        """The path to take: 'sdpa', 'triton', 'blocked' or 'reference'.

        It follows from `impl` and from what the variant, q's device and its dtype allow. On a GPU
        softmax takes the kernels if it is windowed, because torch's fused attention has no window.
        Raises UserError where `impl` requires kernels that cannot run.
        """
        if self.impl not in ("auto", "triton"):
            return self.impl
        softmax = self.impl == "auto" and self.variant.is_softmax(self.p)
        if softmax and not (windowed and q.is_cuda):
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

    def _weights(
        self,
        q: Tensor,
        k: Tensor,
        inv_key_norm: Tensor | None,
        heads: slice,
        length: int,
        score_scale: float,
    ) -> Tensor:
        variant, rows = self.variant, self._rows(q, k, heads, length)
        q, k = q.to(rows.n.dtype), k.to(rows.n.dtype)
        z = grouped_product(q * (score_scale * variant.scale(rows)), k.mT)  # [B, H, Lq, Lk]
        if inv_key_norm is not None:
            z = z * inv_key_norm
        return self._weights_of(z, rows)

    def _weights_of(self, z: Tensor, rows: RowContext) -> Tensor:
        """The weights [B, H, Lq, Lk] of scores without the bias."""
        variant = self.variant
        if variant.bias is not None:
            z = z + variant.bias(rows)
        z = z.masked_fill(~rows.sees(z.shape[-1]), variant.phi.zero)
        if variant.shift is not None:
            z = z + variant.shift(z.detach().amax(-1, keepdim=True))
        A = variant.phi.function(z)
        A = l1_normalise(A, variant.phi.signed) if variant.norm is None else A / variant.norm(rows)
        return variant.reweight(A, rows, self.p)

    def _rows(self, q: Tensor, k: Tensor, heads: slice, length: int) -> RowContext:
        Lq, Lk = q.shape[2], k.shape[2]
        last = torch.arange(Lk - Lq, Lk, device=q.device)[:, None]  # [Lq, 1]
        n = (last + 1).clamp_max(Lk if self.window is None else self.window)
        # float32 at least: bfloat16 cannot count past 256
        dtype = torch.promote_types(q.dtype, torch.float32)
        rows = RowContext(
            n.to(dtype), last, self.window, d=self.head_size, L=length, gamma=self.gamma
        )
        if self.s is not None:
            rows.s = self.s[heads, None, None]
        if self.b is not None:
            rows.b = self.b[heads, None, None]
        if self.p_n is not None:  # its last value beyond the training length
            rows.p_n = self.p_n[(n - 1).clamp_max(len(self.p_n) - 1)]
        return rows

    def _length(self, current: int) -> int:
        return current if self.follow_length else self.trained_length

    def _reference(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inv_key_norm: Tensor | None,
        heads: slice,
        length: int,
        score_scale: float,
    ) -> Tensor:
        A = self._weights(q, k, inv_key_norm, heads, length, score_scale)
        return grouped_product(A.to(v.dtype), v)

    def _factored(
        self, q: Tensor, k: Factors, v: Factors, score_scale: float, length: int | None
    ) -> Tensor:
        """A single query's output, from the factors of all keys and values."""
        with torch.autocast(q.device.type, enabled=False):
            length = self._length(k.b.shape[2] if length is None else length)
            rows = self._rows(q, k.b, slice(None), length)
            q = l2_normalise(q) if self.variant.l2_normalise else q.to(rows.n.dtype)
            z = k.dot(q * (score_scale * self.variant.scale(rows)))
            if self.variant.l2_normalise:
                z = z * torch.rsqrt(k.squared_norms(rows.n.dtype) + 1e-12)
            return v.mix(self._weights_of(z, rows))

    def _blocked(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inv_key_norm: Tensor | None,
        length: int,
        score_scale: float,
    ) -> Tensor:
        """The reference in blocks, so that only the weights of one block are in memory.

        A block is some queries of some heads of some sequences. It reads no keys beyond its last
        query, and none before the window of its first.
        """
        (B, H, Lq, _), Lk, group = q.shape, k.shape[2], q.shape[1] // k.shape[1]
        queries = min(Lq, BLOCK_QUERIES)
        most = Lk if self.window is None else min(Lk, self.window + queries - 1)  # keys of a block
        matrices = (BLOCK_SCORES_CPU if q.is_cpu else BLOCK_SCORES) // (queries * most)
        heads, sequences = min(H, max(1, matrices)), max(1, matrices // H)
        # whole groups, or equal parts of one
        heads = heads // group * group or max(n for n in range(1, heads + 1) if group % n == 0)
        recompute = torch.is_grad_enabled() and B * H * Lq * most > KEEP_SCORES

        def block(part: tuple[slice, slice], start: int, end: int) -> Tensor:
            keys = slice(first_key(Lk - Lq + start, self.window), Lk - Lq + end)
            theirs = part[0], slice(part[1].start // group, -(-part[1].stop // group))
            args = (
                q[part][:, :, start:end],
                k[theirs][:, :, keys],
                v[theirs][:, :, keys],
                None if inv_key_norm is None else inv_key_norm[part],
                part[1],
                length,
                score_scale,
            )
            if recompute:
                return checkpoint(self._reference, *args, use_reentrant=False)
            return self._reference(*args)

        out = []
        for b in range(0, B, sequences):
            head_outputs = []
            for h in range(0, H, heads):
                part = slice(b, b + sequences), slice(h, h + heads)
                # the largest block first: the others then fit into the memory that it frees
                ends = range(Lq, 0, -queries)
                blocks = [block(part, max(0, end - queries), end) for end in ends]
                head_outputs.append(torch.cat(blocks[::-1], dim=2))
            out.append(torch.cat(head_outputs, dim=1))
        return torch.cat(out)

    def _triton(self, q: Tensor, k: Tensor, v: Tensor, length: int, score_scale: float) -> Tensor:
        assert kernels is not None
        variant = self.variant
        # The numbers of a single row are computed on the CPU, where no operation is a launch.
        on_cpu = q.shape[2] == 1 and not variant.learnable and not torch.compiler.is_compiling()
        shaped = q.new_empty(q.shape, device="cpu") if on_cpu else q
        rows = self._rows(shaped, k, slice(None), length)

        def per_row(x: Tensor | float) -> Tensor:  # [H, Lq]
            x = x.to(rows.n.dtype) if isinstance(x, Tensor) else rows.n.new_full((), x)
            return x.expand(1, q.shape[1], q.shape[2], 1)[0, :, :, 0]

        return kernels.attend(
            q.to(v.dtype),
            k.to(v.dtype),
            v,
            scale=per_row(score_scale * variant.scale(rows)),
            bias=None if variant.bias is None else per_row(variant.bias(rows)),
            norm=None if variant.norm is None else per_row(variant.norm(rows)),
            phi=variant.phi.kernel,
            shifted=variant.shift is not None,
            p=self.p,
            unit=variant.l2_normalise,
            signed=variant.phi.signed,
            window=self.window if self._cuts(k) else None,
        )

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, length: int, score_scale: float) -> Tensor:
        Lq, Lk = q.shape[2], k.shape[2]
        if self.variant.l2_normalise:
            q, k = l2_normalise(q), l2_normalise(k)
        scale = score_scale * self.variant.scale(self._rows(q, k, slice(None), length))
        if isinstance(scale, Tensor):  # one for each row: torch takes a single number
            q, scale = q * scale, 1.0
        q, k = q.to(v.dtype), k.to(v.dtype)
        if self._cuts(k):
            return self._sdpa_in_blocks(q, k, v, length, scale)
        mask, causal = None, 1 < Lq == Lk
        if 1 < Lq < Lk:
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


def first_key(position: int, window: int | None) -> int:
    """The first key that the query at a position sees."""
    return 0 if window is None else max(0, position + 1 - window)


def grouped_product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y of x [B, H, n, m] and y [B, Hk, m, l], each of its heads serving H / Hk of x's."""
    if x.shape[1] == y.shape[1]:
        return x @ y
    return (x.reshape(len(x), y.shape[1], -1, x.shape[3]) @ y).view(*x.shape[:3], -1)


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


def tied(x: Tensor) -> Tensor:
    """Whether each row of x = n A, whose mean is 1, is tied: [.., Lq, 1]."""
    return x.detach().amax(-1, keepdim=True) - 1 <= TIED


def kernel_obstacle(variant: Variant, head_size: int) -> str | None:
    """Why kernels.py cannot compute a variant at this head size; None if it can."""
    if variant.phi.kernel is None or (kernels and variant.phi.kernel not in kernels.PHIS):
        return "its phi names no entry of kernels.PHIS"
    if variant.reweight is not relu_power:
        return "its re-weighting is not the paper's"
    if head_size > 128:
        return f"head size {head_size} is above 128"
    return None


def share_parameters(layers: list[Attention]) -> None:
    """Make all layers share SSMax's p_n, as in the paper."""
    for layer in layers[1:]:
        layer.p_n = layers[0].p_n
