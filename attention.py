"""The mathematics of attention: a table of variants, and the readable reference for all of them.

A variant has scores, a normalisation and, optionally, a re-weighting, as in the papers. In a head
of size d, query i (counted from 1) sees n_i keys, the last of them at its own position:

    scores      z_ij = scale_i q_i . k_j + bias_i              the argument of phi
    normalise   A_ij = phi(z_ij) / norm_i, i - n_i < j <= i    stage 1
    re-weight   A_ij <- relu(n_i A_ij - o_i)^p, then l1        stage 2, if p is set

q and k are at unit length if the variant says `l2_normalise`. norm_i is the row's l1 norm (the sum
of |phi|), or a function of n_i, T and learned scalars. A variant may have another stage 2, its
`reweight`. Where a weight depends on the whole row, `row_weights` replaces phi, norm and stage 2.

o_i is 0 for n_i <= 3, else 1 (LSSAR, Algorithm 1); ours is also 0 in a row of equal weights. n_i is
i or, with a window of W keys, min(i, W). With `document_mask` i counts from the first token of the
query's document. The papers have no windows and no document masks: every n in their formulas is
read as n_i. T is the training length (block_size), also where a longer text is evaluated; L is the
length of a call, and B its batch size.

Any variant takes these settings of a layer, but a sink needs l1 and a phi that is never negative
and positive at 0. They apply in this order:

    softcap     x = scale_i q_i . k_j becomes c tanh(x / c)                            (Gemma 2)
    ALiBi       z_ij gets -slope_h (i - j), slope_h = 2^(-8 h / H), h = 1 .. H         (Press 2021)
                over the H heads that have ALiBi
    forget      z_ij gets log f_(j+1) + .. + log f_i, gates from the layer's input     (FoX)
    sink        one more key, whose value is 0 and whose score is 0 or a learned logit of the head:
                softmax's denominator gets 1 (off by one) or e^logit (gpt-oss)

The papers are LSSAR ("Softplus Attention with Re-weighting Boosts Length Extrapolation in Large
Language Models", Gao et al. 2026) and SSMax ("Scalable-Softmax Is Superior for Attention",
Nakanishi 2025); an entry from another paper names it.

To add a variant, add an entry to `VARIANTS`, and a `Phi` if its function is new. The package
attention_paths computes the same weights fast. What does not fit an entry (scores mixed across
heads, the two maps of differential attention) is a subclass of attention_paths.module.Attention:
docs/variants.md has an example.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

# A row is dead if its normaliser, the sum of |phi|, is at most this, as when relu is 0 for every
# key: its weights are then all 0 instead of 0 / 0.
DEAD = 1e-30
# A row is tied if its largest n A - 1 is at most this: its weights are equal up to rounding, and
# re-weighting would let rounding errors pick the winner.
TIED = 16 * torch.finfo(torch.float32).eps
# Steps of Newton's method between the first and the last one: this many for sparsemax, half for
# 1.5-entmax. Rows of up to 16,384 keys, drawn from twelve distributions at seven scales, took at
# most 11 and 7.
NEWTON_STEPS = 16
# tau of scale-invariant attention in tokens: the best of 0.01 to 100 in its paper.
LOCAL_TOKENS = 10.0


@dataclass(frozen=True)
class Phi:
    """The function phi that turns a score into a weight, before normalisation."""

    function: Callable[[Tensor], Tensor]
    # The score of masked keys. phi must be 0 there; attention_paths.check verifies it.
    zero: float = -math.inf
    # phi takes negative values: l1 then sums absolute values, and relu_power, so p, is refused.
    signed: bool = False
    # Maps a row's largest score to a shift of all its scores, so that phi neither overflows nor
    # underflows; l1 cancels the shift. With torch.neg the largest score becomes 0.
    shift: Callable[[Tensor], Tensor] | None = None
    # Its entry in attention_paths.kernels.phi.PHIS; None: no fused kernel.
    kernel: str | None = None


def shift_out_of_tail(top: Tensor) -> Tensor:
    # Far below 0, sigmoid and softplus are exp(z) (1 + O(exp(z))), and l1 cancels any shift: a row
    # whose scores are all below -40 is lifted to -40, where neither phi nor its sum underflows.
    return (-40 - top).clamp_min(0)


def softplus(z: Tensor) -> Tensor:
    # torch's is linear above its threshold: exact in float64 at 40, but not at its default 20
    return F.softplus(z, threshold=40)


def relu_squared(z: Tensor) -> Tensor:
    return torch.relu(z).square()


def gelu(z: Tensor) -> Tensor:
    # F.gelu multiplies z by 1 + erf, which is 0 in float32 below -5.6; erfc has digits down to -14
    twice_cdf = torch.erfc(-z / math.sqrt(2))
    return z / 2 * twice_cdf


def identity(z: Tensor) -> Tensor:
    return z


EXP = Phi(torch.exp, shift=torch.neg, kernel="exp")
SIGMOID = Phi(torch.sigmoid, shift=shift_out_of_tail, kernel="sigmoid")
SOFTPLUS = Phi(softplus, shift=shift_out_of_tail, kernel="softplus")
RELU = Phi(torch.relu, zero=0.0, kernel="relu")
RELU2 = Phi(relu_squared, zero=0.0, kernel="relu2")
RELU6 = Phi(F.relu6, zero=0.0, kernel="relu6")
GELU = Phi(gelu, zero=0.0, signed=True, kernel="gelu")
MISH = Phi(F.mish, zero=0.0, signed=True, kernel="mish")
IDENTITY = Phi(identity, zero=0.0, signed=True, kernel="identity")
EXPM1 = Phi(torch.expm1, zero=0.0, signed=True, kernel="softpick")


@dataclass
class Rows:
    """What the formulas may use: the rows (queries) of one call, and the settings of their layer.

    Tensors, but for `cumulative_log_forget`, broadcast against the scores [B, H, Lq, Lk]. n has
    the dtype in which the weights are computed.
    """

    n: Tensor  # [Lq, 1] keys that each row sees; [B, 1, Lq, 1] with document_positions
    q_idx: Tensor  # [Lq, 1] each query's own index among the keys: the last key that it sees
    kv_idx: Tensor  # [Lk] 0 .. Lk - 1
    head: Tensor  # [H, 1, 1] counted from 0, in a hybrid among heads with the same attention
    window: int | None
    d: int  # head size
    T: int  # the training length
    p: float | None
    # normalised_power or, on a CPU, a faster equivalent (attention_paths.power)
    power_then_l1: Callable[[Tensor, Tensor, float], Tensor]
    document_positions: Tensor | None = None  # [B, 1, Lq, 1] of each row within its document
    score_scale: float | Tensor = 1.0  # multiplies scores, as YaRN and --log_base do
    softcap: float | None = None
    slopes: Tensor | None = None  # [H, 1, 1] of ALiBi
    # [B, H, Lk] log f_1 + .. + log f_j, f the forget gates
    cumulative_log_forget: Tensor | None = None
    sink: Tensor | None = None  # [H, 1, 1] the sink's score
    # set only for a variant that names them in `learnable`
    s: Tensor = field(init=False)  # [H, 1, 1]
    b: Tensor = field(init=False)  # [H, 1, 1]
    p_n: Tensor = field(init=False)  # like n
    # set only for a variant that names them in `from_input`
    u: Tensor = field(init=False)  # [B, H, Lq, 1]
    w: Tensor = field(init=False)  # [B, H, Lq, 1]

    def distance(self) -> Tensor:
        """Return [Lq, Lk], how far each key is before its row; 0 for masked keys after it."""
        return (self.q_idx - self.kv_idx).to(self.n.dtype).clamp_min(0)

    def visible_mask(self) -> Tensor:
        """Return [Lq, Lk], or [B, 1, Lq, Lk] with documents, True where a row sees a key."""
        visible = self.kv_idx <= self.q_idx
        if self.window is not None:
            visible = visible & (self.kv_idx > self.q_idx - self.window)
        if self.document_positions is not None:
            visible = visible & (self.kv_idx >= self.q_idx - self.document_positions)
        return visible


# A scale, bias or norm of rows, and a function that maps scores or weights [.., Lq, Lk] to weights.
RowTerm = Callable[[Rows], Tensor | float]
RowFunction = Callable[[Tensor, Rows], Tensor]


def relu_power(A: Tensor, rows: Rows) -> Tensor:
    """Compute stage 2, LSSAR Eq. 5: relu(n A - o)^p, then l1; A itself if rows.p is None.

    A >= 0 is [.., Lq, Lk]. The final l1 cancels any factor of a row, so rows need not sum to 1, and
    relu(n A - o) is computed as relu(A - o mean A). A tied row has no offset, as for n <= 3, and
    stays uniform.
    """
    if rows.p is None:
        return A
    total = A.sum(-1, keepdim=True)
    mean = total / rows.n
    top = row_max(A)
    is_tied = top - mean <= TIED * mean
    offset = mean * ((rows.n > 3) & ~is_tied)
    top = top - offset.detach()
    top = top.masked_fill(total <= DEAD, 0)
    # A - offset would negate a matrix in the backward pass
    return rows.power_then_l1(A + offset.neg(), top, rows.p)


def inverse_sqrt_d(rows: Rows) -> float:
    return rows.d**-0.5


@dataclass(frozen=True)
class Variant:
    """One entry of the table.

    `scale`, `bias` and `norm` broadcast against [B, H, Lq, 1], a bias per key against
    [B, H, Lq, Lk].
    """

    phi: Phi
    scale: RowTerm = inverse_sqrt_d
    bias: RowTerm | None = None
    bias_per_key: bool = False  # its bias differs between the keys of a row: no fused kernel has it
    norm: RowTerm | None = None  # None: l1
    l2_normalise: bool = False  # q and k are scaled to unit length first
    bounded: bool = False  # phi neither overflows nor underflows for a whole row: it needs no shift
    learnable: tuple[str, ...] = ()  # any of s and b (one per head) and p_n (shared by all layers)
    # row inputs, any of u and w, which each head computes linearly from the layer's input
    from_input: tuple[str, ...] = ()
    # maps scores [.., Lq, Lk], -inf for masked keys, to weights, in place of phi, norm and stage 2,
    # for weights that depend on the whole row
    row_weights: RowFunction | None = None
    # stage 2, from the normalised weights to the weights; relu_power changes nothing without p
    reweight: RowFunction = relu_power
    needs_p: bool = False

    @property
    def is_l1(self) -> bool:
        """Tell whether the weights are phi, then l1 and, with p, relu_power."""
        if self.norm is not None or self.row_weights is not None:
            return False
        return self.reweight is relu_power

    @property
    def takes_p(self) -> bool:
        """Tell whether it can have a p.

        relu_power does its own l1, and needs a phi that is never negative. Any other `reweight`
        reads p if `needs_p` is set.
        """
        if self.reweight is not relu_power:
            return self.needs_p
        return self.is_l1 and not self.phi.signed

    @property
    def takes_sink(self) -> bool:
        """Tell whether it can have a sink.

        The weights must be l1-normalised. phi must never be negative, and be positive at 0, where
        the sink's score starts: else the sink gets no gradient.
        """
        if not self.is_l1 or self.phi.signed:
            return False
        # on the CPU: a model may be built on the meta device, which has no values to compare
        first_score = torch.zeros((), device="cpu")
        return bool(self.phi.function(first_score) > 0)

    @property
    def is_softmax(self) -> bool:
        """Tell whether it is softmax at any scale, which torch's fused attention computes."""
        return self.is_l1 and self.phi.function is torch.exp and self.bias is None


# ---- scales, biases and norms of rows ----
# Scales include 1 / sqrt(d), except log_d_log_n, which multiplies products of unit vectors.


def log_n(rows: Rows) -> Tensor:
    return rows.n.log() * rows.d**-0.5


def log_n_over_log_T(rows: Rows) -> Tensor:
    log_T = math.log(max(rows.T, 2))
    return rows.n.log() / log_T * rows.d**-0.5


def log_d_log_n(rows: Rows) -> Tensor:
    return math.log(rows.d) * rows.n.log()


def s_log_n(rows: Rows) -> Tensor:
    return rows.s * rows.n.log() * rows.d**-0.5


def s_log_n_plus_b(rows: Rows) -> Tensor:
    factor = rows.s * rows.n.log() + rows.b
    return factor * rows.d**-0.5


def s_p_n_plus_b(rows: Rows) -> Tensor:
    factor = rows.s * rows.p_n + rows.b
    return factor * rows.d**-0.5


def adaptive_log_n(rows: Rows) -> Tensor:
    """Compute (1 + softplus(u) log(n + 1)^(2 tanh w)) / sqrt(d), u and w from the row's input.

    The paper has 1 + beta (log n)^gamma. The authors' code has n + 1, and limits the exponent.
    """
    beta = F.softplus(rows.u)
    exponent = 2 * rows.w.tanh()
    log_n_plus_1 = (rows.n + 1).log()
    factor = 1 + beta * log_n_plus_1**exponent
    return factor * rows.d**-0.5


def minus_log_n(rows: Rows) -> Tensor:
    return -rows.n.log()


def minus_log_T(rows: Rows) -> float:
    return -math.log(rows.T)


def unnormalised(rows: Rows) -> float:
    return 1.0


def training_length(rows: Rows) -> float:
    return rows.T


def sqrt_half_n(rows: Rows) -> Tensor:
    return (rows.n / 2).sqrt()


# ---- stage 2 of other variants, and weights of whole rows ----


def negate(A: Tensor, rows: Rows) -> Tensor:
    """Negate the weights, which LSSAR Table A4 calls the inverse."""
    return -A


def recentre(A: Tensor, rows: Rows) -> Tensor:
    """Subtract the mean of the row, except where n <= 3 (the footnote of LSSAR Table A4)."""
    is_recentred = rows.visible_mask() & (rows.n > 3)
    return A - is_recentred / rows.n


def recentre_l1(A: Tensor, rows: Rows) -> Tensor:
    """Recentre, then l1. A tied row, which recentring would make 0, is left as it is too."""
    recentred = recentre(A, rows)
    A = torch.where(tied(rows.n * A), A, recentred)
    return l1_normalise(A, signed=True)


def threshold(A: Tensor, rows: Rows) -> Tensor:
    """Keep the weights above their row's mean, as relu_power does, but without the power; then l1.

    Rows with n <= 3 and tied rows are left as they are.
    """
    x = rows.n * A
    is_kept = (x > 1) | (rows.n <= 3) | tied(x)
    return l1_normalise(A * is_kept)


def softpick(z: Tensor, rows: Rows) -> Tensor:
    """Compute relu(e^z - 1) over the sum of |e^z - 1|: rows sum to at most 1, and may be 0."""
    top = row_max(z)
    x = torch.exp(z - top) - torch.exp(-top)
    x = torch.where(z == -math.inf, 0, x)
    norm = x.abs().sum(-1, keepdim=True)
    return x.relu() * inverse_of_norm(norm)


def entmax(z: Tensor, power: int) -> Tensor:
    """Compute alpha-entmax, power = 1 / (alpha - 1): sparsemax for 1, 1.5-entmax for 2.

    It is relu(z / power - tau)^power, with the tau of each row for which it sums to 1 (Peters et
    al. 2019). z / power is first shifted to a maximum of 0, where tau is from -1 to 0. The
    power-norm of relu(z / power - tau) falls with tau and is convex: from tau = -1 Newton's
    method approaches, from below, the tau at which the norm is 1. The last step gives tau its
    gradient.
    """
    z = z / power
    z = z - row_max(z)
    z = z.clamp_min(-2)  # removes -inf and changes no weight: tau is within -1 to 0

    def newton_step(z: Tensor, tau: Tensor | float) -> Tensor:
        above = (z - tau).relu()
        total = above.pow(power).sum(-1, keepdim=True)
        norm = total.pow(1 / power)
        if power == 1:
            slopes = above.detach().sign()
        else:
            slopes = above.detach() / norm.detach()
        slope = slopes.sum(-1, keepdim=True)
        return tau + (norm - 1) / slope

    tau = newton_step(z.detach(), -1.0)
    for _ in range(NEWTON_STEPS // power):
        tau = newton_step(z.detach(), tau)
    above = (z - newton_step(z, tau)).relu()
    return above.pow(power)


def sparsemax(z: Tensor, rows: Rows) -> Tensor:
    return entmax(z, 1)


def entmax15(z: Tensor, rows: Rows) -> Tensor:
    return entmax(z, 2)


def stick_breaking(z: Tensor, rows: Rows) -> Tensor:
    """Compute sigmoid(z_ij) times the product of 1 - sigmoid(z_ik) over j < k < i.

    Row i does not see key i.
    """
    masked = (z == -math.inf) | (rows.kv_idx == rows.q_idx)
    log_left = F.logsigmoid(-z).masked_fill(masked, 0)  # what key k leaves
    later = F.pad(log_left[..., 1:], (0, 1))  # what the next key leaves
    reversed_sum = later.flip(-1).cumsum(-1)
    log_left_by_later = reversed_sum.flip(-1)  # by j < k < i together
    weights = (F.logsigmoid(z) + log_left_by_later).exp()
    return weights.masked_fill(masked, 0)


def adaptive_temperature(z: Tensor, rows: Rows) -> Tensor:
    """Compute softmax(beta z).

    beta is 1 where the entropy of softmax(z) is at most 0.5, else a polynomial in the entropy, at
    least 1.
    """
    masked = z == -math.inf
    log_A = z.log_softmax(-1).masked_fill(masked, 0)
    A = log_A.exp()
    entropy = -(A * log_A).sum(-1, keepdim=True)
    beta = torch.zeros_like(entropy)
    for coefficient in (-0.037, 0.481, -2.3, 4.917, -1.791):  # the paper's fit, from entropy^4 down
        beta = beta * entropy + coefficient
    beta = torch.where(entropy > 0.5, beta.clamp_min(1), 1)
    z = z.masked_fill(masked, 0) * beta
    return z.masked_fill(masked, -math.inf).softmax(-1)


def scale_invariant(z: Tensor, rows: Rows) -> Tensor:
    """Compute softmax(a_t z + m_t), t the distance of a key, a_t^2 = 2 log(t / tau + 1) + 1.

    With m_t = 1 - a_t^2, e^(a_t z + m_t) is sqrt(e) / (t / tau + 1) on average where z is normal
    with unit variance: beyond tau, keys from t to 2 t get as much in all as from 2 t to 4 t.
    """
    log_distance = torch.log1p(rows.distance() / LOCAL_TOKENS)
    factor = (2 * log_distance + 1).sqrt()
    return (factor * z - 2 * log_distance).softmax(-1)


VARIANTS: dict[str, Variant] = {
    # LSSAR Table 1.
    "softmax": Variant(EXP),
    # The paper's Sigmoid(x - b) with b = -log L, L the length, must mean sigmoid(z - log L): taken
    # literally, it adds log L. L is read as T at any length: a row must not depend on the text
    # after it, and Ramapuram et al.'s published kernel takes the bias as a fixed number.
    "sigmoid": Variant(SIGMOID, bias=minus_log_T, norm=unnormalised),
    "sigmoid_logn": Variant(SIGMOID, bias=minus_log_n, norm=unnormalised),
    "sigmoid_logn_l1": Variant(SIGMOID, bias=minus_log_n),
    "sigmoid_l1": Variant(SIGMOID),
    "relu_wortsman": Variant(RELU, norm=training_length),  # L is read as T here too
    "relu_li": Variant(RELU),
    # Shen et al. multiply the norm by a gamma, which the LSSAR paper does not give. Without it,
    # normal scores and values of unit variance give an output of unit variance: relu(z)^2 is 1/2
    # on average.
    "relu_shen": Variant(RELU, norm=sqrt_half_n),
    # Bounded: scores of unit vectors are within +-log d log n, above -41 at d = 64, n = 16,384.
    "lssa": Variant(
        SOFTPLUS,
        scale=log_d_log_n,
        l2_normalise=True,
        bounded=True,
    ),
    # lssa with p, and refused without
    "lssar": Variant(
        SOFTPLUS,
        scale=log_d_log_n,
        l2_normalise=True,
        bounded=True,
        needs_p=True,
    ),
    # LSSAR Table A4
    "softmax_inverse": Variant(EXP, reweight=negate),
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
        EXP,
        scale=s_log_n,
        learnable=("s",),
    ),
    "ssmax_fixed": Variant(EXP, scale=log_n),
    "ssmax_bias": Variant(
        EXP,
        scale=s_log_n_plus_b,
        learnable=("s", "b"),
    ),
    "ssmax_probe": Variant(
        EXP,
        scale=s_p_n_plus_b,
        learnable=("s", "b", "p_n"),
    ),
    # Common alternatives
    # Su 2021 ("Entropy invariance of attention", kexue.fm/archives/8823)
    "softmax_logn": Variant(EXP, scale=log_n_over_log_T),
    # Zuhri et al. 2025 (arXiv 2504.20966)
    "softpick": Variant(EXPM1, row_weights=softpick),  # EXPM1 names the kernel; it is not called
    # Martins and Astudillo 2016; Peters et al. 2019. row_weights replaces phi: EXP is not called.
    "sparsemax": Variant(EXP, row_weights=sparsemax),
    "entmax15": Variant(EXP, row_weights=entmax15),
    # ASEntmax (Vasylenko et al. 2025, arXiv 2506.16640)
    "asentmax": Variant(
        EXP,
        scale=adaptive_log_n,
        from_input=("u", "w"),
        row_weights=entmax15,
    ),
    # Tan et al. 2024 (arXiv 2410.17980); without the remainder, as in their kernel's output
    "stick_breaking": Variant(EXP, row_weights=stick_breaking),
    # Velickovic et al. 2024 (arXiv 2410.01104): for the weights of a softmax model, at evaluation
    "adaptive_temperature": Variant(EXP, row_weights=adaptive_temperature),
    # Anson, Wang and Aitchison 2025 (arXiv 2505.17083)
    "scale_invariant": Variant(EXP, row_weights=scale_invariant),
    # Ours: LSSAR taken apart. Its phi is softplus, its scale log d log n on unit vectors, and it
    # has stage 2. The first two entries complete the grid of exp and softplus by the scales 1,
    # log n (both / sqrt d) and log d log n, whose other entries are softmax, ssmax_fixed,
    # phi_softplus and lssa. lssa_threshold keeps the weights that stage 2 keeps, without the power.
    "softmax_cosine": Variant(EXP, scale=log_d_log_n, l2_normalise=True),
    "softplus_logn": Variant(SOFTPLUS, scale=log_n),
    "lssa_threshold": Variant(
        SOFTPLUS,
        scale=log_d_log_n,
        l2_normalise=True,
        bounded=True,
        reweight=threshold,
    ),
}


def attention_weights(
    variant: Variant,
    q: Tensor,
    products: Callable[[Tensor], Tensor],
    rows: Rows,
) -> Tensor:
    """Compute the weights [B, H, Lq, Lk], 0 for masked keys: the readable reference.

    `products` gives the dot products [B, H, Lq, Lk] of queries like q [B, H, Lq, d] with the keys,
    so that the caller may hold the keys in any form. The caller brings q and k to unit length if
    the variant asks for it. All is computed in the dtype of rows.n.
    """
    scale = rows.score_scale * variant.scale(rows)
    z = products(q.to(rows.n.dtype) * scale)
    if rows.softcap is not None:
        z = rows.softcap * torch.tanh(z / rows.softcap)
    if variant.bias is not None:
        z = z + variant.bias(rows)
    if rows.slopes is not None:
        z = z - rows.slopes * rows.distance()
    if rows.cumulative_log_forget is not None:
        to_key = rows.cumulative_log_forget[:, :, None]  # [B, H, 1, Lk]
        to_query = rows.cumulative_log_forget[:, :, -z.shape[2] :, None]  # [B, H, Lq, 1]
        z = z + (to_query - to_key)
    visible = rows.visible_mask()
    if variant.row_weights is not None:
        z = torch.where(visible, z, -math.inf)
        return variant.row_weights(z, rows)
    z = torch.where(visible, z, variant.phi.zero)  # no gradient passes masked scores
    if rows.sink is not None:  # becomes the last column
        sink = rows.sink.expand(*z.shape[:3], 1)
        z = torch.cat((z, sink), dim=-1)
    shift = shift_of(variant, rows)
    if shift is not None:
        z = z + shift(row_max(z))
    A = variant.phi.function(z)
    if variant.norm is not None:
        A = A / variant.norm(rows)
    elif rows.p is None or variant.reweight is not relu_power:  # with p, relu_power does the l1
        A = l1_normalise(A, variant.phi.signed)
    A = variant.reweight(A, rows)
    n_keys = len(rows.kv_idx)
    return A[..., :n_keys]  # without the sink


def shift_of(variant: Variant, rows: Rows) -> Callable[[Tensor], Tensor] | None:
    """Return phi.shift if phi may over- or underflow without it, and l1 cancels it."""
    if variant.norm is not None:
        return None
    has_distance_bias = rows.slopes is not None or rows.cumulative_log_forget is not None
    has_factor = isinstance(rows.score_scale, Tensor) or rows.score_scale > 1
    if variant.bounded and not has_distance_bias and not has_factor:
        return None
    return variant.phi.shift


def row_max(x: Tensor) -> Tensor:
    """Return the largest of each row of x [.., Lq, Lk], as a constant: [.., Lq, 1]."""
    return x.detach().amax(-1, keepdim=True)


def l2_normalise(x: Tensor) -> Tensor:
    """Scale x to unit length along the last dimension, in float32 at least.

    The 1e-12 bounds the gradient of a zero vector.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    squared_norm = x.square().sum(-1, keepdim=True)
    return x * torch.rsqrt(squared_norm + 1e-12)


def l1_normalise(A: Tensor, signed: bool = False) -> Tensor:
    """Divide rows by their sum of absolute values; a dead row becomes 0 and gets no gradient."""
    absolute = A.abs() if signed else A
    norm = absolute.sum(-1, keepdim=True)
    # times the reciprocal: autograd's division takes three more passes over the matrix
    return A * inverse_of_norm(norm)


def inverse_of_norm(norm: Tensor) -> Tensor:
    """Compute 1 / norm, and 0 for dead rows.

    A small norm is multiplied by a power of 2 first, because the reciprocal's gradient, the inverse
    square, overflows float32 below 5e-20.
    """
    factor = torch.where(norm < 2.0**-32, 2.0**64, 1.0)
    is_dead = norm <= DEAD
    scaled = (norm * factor).masked_fill(is_dead, math.inf)
    return scaled.reciprocal() * factor


def normalised_power(x: Tensor, top: Tensor, p: float) -> Tensor:
    """Compute relu(x)^p, then l1, of x [.., Lq, Lk]; rows whose `top` is 0 become 0.

    `top` is a row's largest x. Dividing by it, which l1 cancels, prevents overflow at any p.
    """
    top = top.masked_fill(top == 0, math.inf)
    powers = (x / top).relu().pow(p)
    return l1_normalise(powers)


def tied(x: Tensor) -> Tensor:
    """Tell whether each row of x = n A, whose mean is 1, is tied: [.., Lq, 1]."""
    return row_max(x) - 1 <= TIED
