"""The attention family: one table of variants, and the paths that compute any row of it.

Three choices make every variant of the papers. For one head, with head size d, row i seeing n_i
keys, and s_ij = q_i . k_j:

    scores      z_ij = scale_i s_ij + bias_i               what enters phi
    normalise   A_ij = phi(z_ij) / norm_i, j <= n_i        stage 1: l1 or a fixed norm
    reweight    A_ij <- relu(n_i A_ij - o_i)^p, then l1    stage 2, if p is set

o_i is 0 in the first three rows and 1 after (LSSAR, Algorithm 1).

The papers are LSSAR ("Softplus Attention with Re-weighting Boosts Length Extrapolation in Large
Language Models", Gao et al. 2026) and SSMax ("Scalable-Softmax Is Superior for Attention",
Nakanishi 2025). A variant of your own is one more row of `VARIANTS`, and one more `Phi` if its
function is new; nothing outside this table knows variants by name.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from errors import UserError

try:
    import kernels
except ImportError:  # Triton is for Linux and comes with torch's CUDA builds
    kernels = None

# A row whose sum of |phi| is not above this has nothing to share out: its weights are 0.
DEAD = 1e-30
# A row whose largest n A - 1 is not above this counts as tied: rounding would pick its winner.
TIED = 16 * torch.finfo(torch.float32).eps
# Queries of a block, and scores computed at once, if that many: on a CPU, what stays in its cache.
BLOCK_QUERIES = 256
BLOCK_SCORES = 2**25
BLOCK_SCORES_CPU = 2**20
# With more scores than this in a layer, the backward pass recomputes them instead of keeping them.
KEEP_SCORES = 2**22


@dataclass(frozen=True)
class Phi:
    """What turns a score into a weight before the norm."""

    function: Callable[[Tensor], Tensor]
    # A z with phi(z) = 0; the causal mask puts it where a row may not look.
    zero: float = -math.inf
    # Takes negative values: l1 is then of absolute values, and stage 2 is refused.
    signed: bool = False
    # From a row's largest score, what may be added to the whole row without changing phi / l1.
    shift: Callable[[Tensor], Tensor] | None = None
    # Its entry in kernels.PHIS; None: no fused kernel.
    kernel: str | None = None


def exp_tail(top: Tensor) -> Tensor:
    # sigmoid and softplus are exp(z) (1 + O(exp(z))) far below 0, where l1 cancels any shift: a row
    # that lies there as a whole is lifted to -40, and neither phi nor its sum can underflow.
    return (-40 - top).clamp_min(0)


EXP = Phi(torch.exp, shift=torch.neg, kernel="exp")
SIGMOID = Phi(torch.sigmoid, shift=exp_tail, kernel="sigmoid")
# torch's softplus is linear above its threshold: exact in float64 at 40, but not at its default 20.
SOFTPLUS = Phi(lambda z: F.softplus(z, threshold=40), shift=exp_tail, kernel="softplus")
RELU = Phi(torch.relu, zero=0.0, kernel="relu")
RELU2 = Phi(lambda z: torch.relu(z).square(), zero=0.0, kernel="relu2")
RELU6 = Phi(F.relu6, zero=0.0, kernel="relu6")
GELU = Phi(F.gelu, zero=0.0, signed=True, kernel="gelu")
MISH = Phi(F.mish, zero=0.0, signed=True, kernel="mish")
IDENTITY = Phi(lambda z: z, zero=0.0, signed=True, kernel="identity")


@dataclass(frozen=True)
class RowContext:
    """What the formulas of a variant may use, for the rows (queries) of one call."""

    n: Tensor  # [Lq, 1] keys that each row sees
    d: int  # head size
    L: int  # the training run's length, or the current one (setting `attention_length`)
    gamma: float
    s: Tensor | None  # [H, 1, 1], learnable
    b: Tensor | None  # [H, 1, 1], learnable
    p_n: Tensor | None  # [Lq, 1], learnable


@dataclass(frozen=True)
class Variant:
    """One row of the table. `scale`, `bias` and `norm` broadcast against [B, H, Lq, 1]."""

    phi: Phi
    scale: Callable[[RowContext], Tensor | float] = lambda rows: rows.d**-0.5
    bias: Callable[[RowContext], Tensor | float] | None = None
    norm: Callable[[RowContext], Tensor | float] | None = None  # None: l1
    l2_normalise: bool = False  # q and k to unit length first
    bounded: bool = False  # no score is so far below 0 that a whole row of phi could underflow
    learnable: tuple[str, ...] = ()  # s and b are per head, p_n one vector for all layers
    needs_p: bool = False
    after: Callable[[Tensor, RowContext], Tensor] | None = None  # a last change to the weights

    @property
    def shifted(self) -> bool:
        """Whether rows are shifted by phi.shift, which only l1 cancels."""
        return self.norm is None and self.phi.shift is not None and not self.bounded

    @property
    def takes_p(self) -> bool:
        """Stage 2 needs rows that are distributions: l1, and a phi that is never negative."""
        return self.norm is None and not self.phi.signed and self.after is None

    def is_softmax(self, p: float | None) -> bool:
        """Softmax of scaled scores, whatever the scale: torch's own fused attention computes it."""
        return self.phi is EXP and self.takes_p and self.bias is None and p is None


def one(rows: RowContext) -> float:
    return 1.0


def log_d_log_n(rows: RowContext) -> Tensor:
    return math.log(rows.d) * rows.n.log()


def recentre(A: Tensor, rows: RowContext) -> Tensor:
    """A minus its row's mean, the first three rows left as they are (Tab. A4's footnote)."""
    keys = torch.arange(A.shape[-1], device=A.device)
    return A - ((keys < rows.n) & (rows.n > 3)) / rows.n


def recentre_l1(A: Tensor, rows: RowContext) -> Tensor:
    """The same, then l1. A tied row, of which nothing would be left, stays as it is too."""
    return l1_normalise(torch.where(tied(rows.n * A), A, recentre(A, rows)), signed=True)


VARIANTS: dict[str, Variant] = {
    # LSSAR Table 1. The text's Sigmoid(x - b), b = -log L, is meant as sigmoid(z - log L).
    "softmax": Variant(EXP),
    "sigmoid": Variant(SIGMOID, bias=lambda rows: -math.log(rows.L), norm=one),
    "sigmoid_logn": Variant(SIGMOID, bias=lambda rows: -rows.n.log(), norm=one),
    "sigmoid_logn_l1": Variant(SIGMOID, bias=lambda rows: -rows.n.log()),
    "sigmoid_l1": Variant(SIGMOID),
    "relu_wortsman": Variant(RELU, norm=lambda rows: rows.L),
    "relu_li": Variant(RELU),
    "relu_shen": Variant(RELU, norm=lambda rows: rows.gamma * (rows.n / 2).sqrt()),
    # scores of unit vectors are within +-log d log n: above -41 at d = 64, n = 16,384
    "lssa": Variant(SOFTPLUS, scale=log_d_log_n, l2_normalise=True, bounded=True),
    "lssar": Variant(SOFTPLUS, scale=log_d_log_n, l2_normalise=True, bounded=True, needs_p=True),
    # LSSAR Table A4
    "softmax_inverse": Variant(EXP, after=lambda A, rows: -A),
    "softmax_recentred": Variant(EXP, after=recentre),
    "softmax_recentred_l1": Variant(EXP, after=recentre_l1),
    # LSSAR Table A5, scenarios I to III (IV is softmax)
    "linear": Variant(IDENTITY, norm=one),
    "exp": Variant(EXP, norm=one),
    "linear_l1": Variant(IDENTITY),
    # LSSAR Table A6 (its relu, sigmoid and exp are relu_li, sigmoid_l1 and softmax)
    "phi_relu2": Variant(RELU2),
    "phi_relu6": Variant(RELU6),
    "phi_gelu": Variant(GELU),
    "phi_softplus": Variant(SOFTPLUS),
    "phi_mish": Variant(MISH),
    # SSMax (b), (c), (d) and the probe of its Eq. 3
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
}


class Attention(nn.Module):
    """One layer's attention, for any row of `VARIANTS`.

    Called as `attn(q, k, v)` with q [B, H, Lq, d], k and v [B, H, Lk, d] after RoPE, Lq <= Lk: the
    queries are the last Lq positions, so that the first of them sees Lk - Lq + 1 keys. Returns
    [B, H, Lq, d] in v's dtype. Scores and weights are computed in float32 (float64 for float64),
    autocast off.
    """

    def __init__(self, config):
        super().__init__()
        self.variant = VARIANTS[config.attention]
        self.p = config.p
        self.impl = config.attention_impl
        self.d = config.n_embd // config.n_head
        self.gamma = config.gamma
        self.trained_length = config.block_size
        self.current_length = config.attention_length == "current"
        first = {
            "s": torch.full((config.n_head,), config.s_init),
            "b": torch.full((config.n_head,), config.b_init),
            "p_n": torch.ones(config.block_size),
        }
        for name in ("s", "b", "p_n"):
            learnable = name in self.variant.learnable
            self.register_parameter(name, nn.Parameter(first[name]) if learnable else None)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, score_scale: float = 1.0, length: int | None = None
    ) -> Tensor:
        """`score_scale` multiplies every score (YaRN's attention factor, squared); `length` is the
        current length where it is not that of k: a cache's final one."""
        length = self._length(k.shape[2] if length is None else length)
        with torch.autocast(q.device.type, enabled=False):
            path = self._path(q)
            if path == "triton":
                return self._fused(q, k, v, length, score_scale)
            if path == "sdpa":
                return self._softmax(q, k, v, length, score_scale)
            q, k, inv_key_norm = self._normalise_qk(q, k)
            if path == "reference":
                return self._product(q, k, v, inv_key_norm, slice(None), length, score_scale)
            return self._blocked(q, k, v, inv_key_norm, length, score_scale)

    def weights(
        self, q: Tensor, k: Tensor, score_scale: float = 1.0, length: int | None = None
    ) -> Tensor:
        """The attention weights [B, H, Lq, Lk], float32 or float64, 0 where a row may not look."""
        length = self._length(k.shape[2] if length is None else length)
        with torch.autocast(q.device.type, enabled=False):
            return self._weights(*self._normalise_qk(q, k), slice(None), length, score_scale)

    def _path(self, q: Tensor) -> str:
        """The one place that picks a path."""
        if self.impl == "auto" and self.variant.is_softmax(self.p):
            return "sdpa"
        if self.impl not in ("auto", "triton"):
            return self.impl
        obstacle = no_kernel(self.variant, self.d)
        if obstacle is None and kernels is None:
            obstacle = "Triton is not installed"
        elif obstacle is None and not (q.is_cuda or kernels.INTERPRETED):
            obstacle = f"it needs an NVIDIA GPU, and this is {q.device.type}"
        elif obstacle is None and q.dtype == torch.float64:
            obstacle = "it does not compute in float64"
        if obstacle is None and (q.is_cuda or self.impl == "triton"):
            return "triton"
        if self.impl == "triton":
            raise UserError(f"attention_impl = 'triton' cannot be used: {obstacle}")
        return "blocked"

    def _normalise_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """q and k as the scores take them, once for all blocks, and what multiplies each key's
        scores. A single query divides its scores by the keys' lengths, not a cache of keys."""
        if not self.variant.l2_normalise:
            return q, k, None
        if q.shape[2] > 1:
            return l2_normalise(q), l2_normalise(k), None
        dtype = torch.promote_types(k.dtype, torch.float32)
        squared = torch.linalg.vector_norm(k, dim=-1, dtype=dtype).square()
        return l2_normalise(q), k, torch.rsqrt(squared + 1e-12)[:, :, None]

    def _weights(self, q, k, inv_key_norm, heads: slice, length: int, score_scale: float) -> Tensor:
        variant, rows = self.variant, self._rows(q, k, heads, length)
        q, k = q.to(rows.n.dtype), k.to(rows.n.dtype)
        z = (q * (score_scale * variant.scale(rows))) @ k.mT  # [B, H, Lq, Lk]
        if inv_key_norm is not None:
            z = z * inv_key_norm
        if variant.bias is not None:
            z = z + variant.bias(rows)
        hidden = torch.arange(k.shape[2], device=k.device) >= rows.n  # [Lq, Lk]
        z = z.masked_fill(hidden, variant.phi.zero)
        if variant.shifted:
            z = z + variant.phi.shift(z.detach().amax(-1, keepdim=True))
        A = variant.phi.function(z)
        A = l1_normalise(A, variant.phi.signed) if variant.norm is None else A / variant.norm(rows)
        if self.p is not None:
            A = reweight(A, rows.n, self.p)
        return A if variant.after is None else variant.after(A, rows)

    def _rows(self, q, k, heads: slice, length: int) -> RowContext:
        Lq, Lk = q.shape[2], k.shape[2]
        seen = torch.arange(Lk - Lq + 1, Lk + 1, device=q.device)[:, None]  # [Lq, 1]
        return RowContext(
            # bfloat16 could not count past 256
            n=seen.to(torch.promote_types(q.dtype, torch.float32)),
            d=self.d,
            L=length,
            gamma=self.gamma,
            s=None if self.s is None else self.s[heads, None, None],
            b=None if self.b is None else self.b[heads, None, None],
            # beyond the training length the last learned value holds
            p_n=None if self.p_n is None else self.p_n[(seen - 1).clamp_max(len(self.p_n) - 1)],
        )

    def _length(self, current: int) -> int:
        return current if self.current_length else self.trained_length

    def _product(
        self, q, k, v, inv_key_norm, heads: slice, length: int, score_scale: float
    ) -> Tensor:
        return self._weights(q, k, inv_key_norm, heads, length, score_scale).to(v.dtype) @ v

    def _blocked(self, q, k, v, inv_key_norm, length: int, score_scale: float) -> Tensor:
        """Some queries of some heads of some sequences at a time, so that no more weights than
        theirs exist at once. A block of queries needs no key after its own last one."""
        (B, H, Lq, _), Lk = q.shape, k.shape[2]
        queries = min(Lq, BLOCK_QUERIES)
        most = (BLOCK_SCORES_CPU if q.is_cpu else BLOCK_SCORES) // (queries * Lk)
        heads, sequences = min(H, max(1, most)), max(1, most // H)
        recompute = torch.is_grad_enabled() and B * H * Lq * Lk > KEEP_SCORES

        def product(part, start: int, end: int) -> Tensor:
            seen = Lk - Lq + end
            block = q[part][:, :, start:end], k[part][:, :, :seen], v[part][:, :, :seen]
            args = (
                *block,
                None if inv_key_norm is None else inv_key_norm[part],
                part[1],
                length,
                score_scale,
            )
            if recompute:
                return checkpoint(self._product, *args, use_reentrant=False)
            return self._product(*args)

        out = []
        for b in range(0, B, sequences):
            across = []
            for h in range(0, H, heads):
                part = slice(b, b + sequences), slice(h, h + heads)
                # the largest block first: the memory that it leaves holds each of the others
                ends = range(Lq, 0, -queries)
                blocks = [product(part, max(0, end - queries), end) for end in ends]
                across.append(torch.cat(blocks[::-1], dim=2))
            out.append(torch.cat(across, dim=1))
        return torch.cat(out)

    def _fused(self, q, k, v, length: int, score_scale: float) -> Tensor:
        variant, rows = self.variant, self._rows(q, k, slice(None), length)

        def vector(x: Tensor | float) -> Tensor:  # [H, Lq]
            x = x.to(rows.n.dtype) if isinstance(x, Tensor) else rows.n.new_full((), x)
            return x.expand(1, q.shape[1], q.shape[2], 1)[0, :, :, 0]

        return kernels.attend(
            q.to(v.dtype),
            k.to(v.dtype),
            v,
            scale=vector(score_scale * variant.scale(rows)),
            bias=None if variant.bias is None else vector(variant.bias(rows)),
            norm=None if variant.norm is None else vector(variant.norm(rows)),
            phi=variant.phi.kernel,
            shifted=variant.shifted,
            p=self.p,
            unit=variant.l2_normalise,
            signed=variant.phi.signed,
        )

    def _softmax(self, q, k, v, length: int, score_scale: float) -> Tensor:
        Lq, Lk = q.shape[2], k.shape[2]
        if self.variant.l2_normalise:
            q, k = l2_normalise(q), l2_normalise(k)
        scale = score_scale * self.variant.scale(self._rows(q, k, slice(None), length))
        if isinstance(scale, Tensor):  # each row has its own: it goes into the queries
            q, scale = q * scale, 1.0
        q, k = q.to(v.dtype), k.to(v.dtype)
        # is_causal would count queries from the first key; with a cache they are the last ones
        mask = causal_lower_right(Lq, Lk) if 1 < Lq < Lk else None
        causal = 1 < Lq == Lk
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)


def l2_normalise(x: Tensor) -> Tensor:
    """Unit length along the last dimension, with a bounded gradient at zero; float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-12)


def l1_normalise(A: Tensor, signed: bool = False) -> Tensor:
    """Rows divided by their sum of absolute values; a dead row becomes 0 and has no gradient."""
    norm = (A.abs() if signed else A).sum(-1, keepdim=True)
    # times the reciprocal: autograd's division takes three more passes over the matrix
    return A * norm.masked_fill(norm <= DEAD, math.inf).reciprocal()


def tied(x: Tensor) -> Tensor:
    """Which rows of x = n A, of mean 1, are equal up to rounding: [.., Lq, 1]."""
    return x.detach().amax(-1, keepdim=True) - 1 <= TIED


def reweight(A: Tensor, n: Tensor, p: float) -> Tensor:
    """Stage 2, LSSAR Eq. 5: relu(n A - o)^p, then l1. A [.., Lq, Lk] of row sums 1 or 0, n [Lq, 1].

    The power is of x / max x, which l1 cancels: nothing overflows at any p or n. A tied row gets no
    offset, as rows 1 to 3 do, and stays uniform.
    """
    x = n * A
    x = (x - ((n > 3) & ~tied(x)).to(x.dtype)).relu()
    top = x.detach().amax(-1, keepdim=True)
    return l1_normalise((x * top.masked_fill(top == 0, math.inf).reciprocal()).pow(p))


def no_kernel(variant: Variant, d: int) -> str | None:
    """Why kernels.py has nothing for a variant at head size d; None if it has."""
    if variant.phi.kernel is None or (kernels and variant.phi.kernel not in kernels.PHIS):
        return "its phi names no entry of kernels.PHIS"
    if variant.after is not None:
        return "no kernel changes the weights after their norm"
    if d > 128:
        return f"head size {d} is above 128"
    return None


def build_attention(config) -> Attention:
    """One layer's attention module for a `config.Config`."""
    return Attention(config)


def share_parameters(layers: list[Attention]) -> None:
    """Make SSMax's p_n one vector for all layers."""
    for layer in layers[1:]:
        layer.p_n = layers[0].p_n
