"""The oracle of all tests of attention: the formula of every variant as its paper prints it.

The formulas are written from the papers, without attention.py. They take whole matrices in the
dtype of q: float64 gives the truth, float32 or bfloat16 what the printed formula loses by rounding.
Where a paper's formula is 0 / 0 or overflows, the formula here is the limit: a row without weight
is 0, a tied row is not re-weighted, and a row far below 0 is softmax.
"""

import math

import torch
import torch.nn.functional as F

from attention import VARIANTS
from attention_paths.reference import NO_CONTEXT

# A row is dead where the sum of its weights is at most this.
DEAD = 1e-30
# A row of n equal weights 1 / n is tied; so is a row whose weights differ by float32's rounding.
TIED = 16 * 2.0**-23


def attention(layer, q, k, v, context=NO_CONTEXT):
    """The output [B, H, Lq, d] of a layer, from its settings and parameters alone."""
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return weights(layer, q, k, context).to(v.dtype) @ v


def weights(layer, q, k, context=NO_CONTEXT):
    """The weights [B, H, Lq, Lk] of a layer; the queries are the last Lq of Lk positions."""
    names = {id(variant): name for name, variant in VARIANTS.items()}
    name = names[id(layer.variant)]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    t = Textbook(layer, q, k, context)
    assert name in FORMULAS, f"write the formula of {name} into FORMULAS of tests/textbook.py"
    A = FORMULAS[name](t)
    if layer.p is not None:
        A = t.reweighted(A, layer.p)
    return A[..., : k.shape[2]]  # without the sink


class Textbook:
    """One call of a layer: n, d, L, the scores z, and the steps that several formulas share."""

    def __init__(self, layer, q, k, context):
        self.layer = layer
        self.q = q
        self.k = k
        self.context = context
        self.d = q.shape[-1]
        self.L = layer.trained_length
        self.gamma = layer.gamma
        Lq = q.shape[2]
        Lk = k.shape[2]
        position = torch.arange(Lk, device=q.device)
        self.distance = position[Lk - Lq :, None] - position  # [Lq, Lk]
        self.visible = (self.distance >= 0) & (self.distance < (layer.window or Lk))
        positions = context.document_positions
        if positions is not None:  # [B, 1, Lq, Lk]
            self.visible = self.visible & (self.distance <= positions[:, None, :, None])
        count = self.visible.sum(-1, keepdim=True)  # [.., Lq, 1]
        self.n = count.to(q.dtype)
        self.log_n = count.double().log().to(q.dtype)
        self.s = by_head(layer.s, q)
        self.b = by_head(layer.b, q)
        self.sink = by_head(layer.sink, q)
        if layer.has_sink and self.sink is None:
            self.sink = q.new_zeros(q.shape[1], 1, 1)
        if layer.p_n is not None:
            self.p_n = layer.p_n.to(q.dtype)[count.clamp_max(self.L) - 1]
        zero = q.new_zeros(q.shape[:3])
        self.u = context.row_inputs.get("u", zero)[..., None]  # [B, H, Lq, 1]
        self.w = context.row_inputs.get("w", zero)[..., None]

    def z(self, factor=1.0, bias=0.0):
        """factor q . k / sqrt(d) + bias, and what the settings of the layer add."""
        return self.with_settings(factor * (self.q @ self.k.mT) / math.sqrt(self.d), bias)

    def cosines(self):
        """LSSA's scores, log d log n cos(q, k)."""
        cosines = F.normalize(self.q, dim=-1) @ F.normalize(self.k, dim=-1).mT
        return self.with_settings(math.log(self.d) * self.log_n * cosines, 0.0)

    def with_settings(self, z, bias):
        z = self.context.score_scale * z
        c = self.layer.softcap
        if c is not None:  # Gemma 2
            z = c * torch.tanh(z / c)
        z = z + bias
        H = self.layer.alibi_heads
        if H:  # 2^(-8 h / H) of the last H heads (Press et al. 2021)
            h = torch.arange(1, H + 1, dtype=z.dtype, device=z.device)
            no_slopes = z.new_zeros(z.shape[1] - H)
            slopes = torch.cat((no_slopes, 2 ** (-8 * h / H)))
            z = z - slopes[:, None, None] * self.distance
        if self.context.log_forget is not None:  # FoX: log f_(j+1) + .. + log f_i
            total = self.context.log_forget.to(z.dtype).cumsum(-1)
            total_of_queries = total[..., -z.shape[2] :]
            z = z + (total_of_queries[..., None] - total[..., None, :])
        return z

    def phi(self, function, z):
        """phi(z), 0 for hidden keys."""
        return function(z.masked_fill(~self.visible, 0)) * self.visible

    def l1(self, function, z):
        """phi(z) over its row's sum of |phi|; a sink is one more key, in the last column."""
        a = self.phi(function, z)
        scores = z.masked_fill(~self.visible, -math.inf)
        if self.sink is not None:
            sink = self.sink.expand(*z.shape[:3], 1)
            a = torch.cat((a, function(sink)), -1)
            scores = torch.cat((scores, sink), -1)
        if function is torch.exp:
            return torch.softmax(scores, -1)
        if function in (torch.sigmoid, softplus):  # exp(z) (1 + O(exp(z))) far below 0
            low = scores.amax(-1, keepdim=True) < -40
            return torch.where(low, torch.softmax(scores, -1), l1(a.masked_fill(low, 1)))
        return l1(a)

    def softmax(self, z):
        return self.l1(torch.exp, z)

    def tied(self, A):
        return self.n * A.detach().amax(-1, keepdim=True) <= 1 + TIED

    def reweighted(self, A, p):
        """relu(n A - o)^p, then l1 (LSSAR Eq. 5; o from Algorithm 1)."""
        o = ((self.n > 3) & ~self.tied(A)).to(A.dtype)
        x = torch.relu(self.n * A - o)
        top = x.detach().amax(-1, keepdim=True)  # cancelled by l1
        return l1((x / torch.where(top > 0, top, 1)) ** p)

    def recentred(self, A):
        return torch.where(self.n > 3, A - self.visible / self.n, A)

    def recentred_l1(self, A):
        return l1(torch.where(self.tied(A), A, self.recentred(A)))

    def thresholded(self, A):
        passes = (self.n * A > 1) | (self.n <= 3) | self.tied(A)
        return l1(A * passes)

    def softpick(self, z):
        a = self.phi(torch.expm1, z)
        return torch.relu(l1(a))

    def entmax(self, z, power):
        """relu(z / power - tau)^power that sums to 1: by bisection, which keys are above tau; tau
        of these keys solves a linear (sparsemax) or a quadratic equation."""
        z = z.masked_fill(~self.visible, -math.inf) / power
        high = z.detach().amax(-1, keepdim=True)
        low = high - 1
        for _ in range(100):
            tau = (low + high) / 2
            total = torch.relu(z.detach() - tau).pow(power).sum(-1, keepdim=True)
            low = torch.where(total > 1, tau, low)
            high = torch.where(total > 1, high, tau)
        support = z > high
        k = support.sum(-1, keepdim=True).to(z.dtype)
        z = z.masked_fill(~support, 0)
        mean = z.sum(-1, keepdim=True) / k
        if power == 1:
            tau = mean - 1 / k
        else:
            squares = (z - mean).square().masked_fill(~support, 0).sum(-1, keepdim=True)
            tau = mean - ((1 - squares) / k).sqrt()
        return (z - tau).pow(power).masked_fill(~support, 0)

    def asentmax(self):
        beta = softplus(self.u)
        gamma = 2 * torch.tanh(self.w)
        return self.entmax(self.z(1 + beta * (self.n + 1).log() ** gamma), 2)

    def stick_breaking(self, z):
        """The last key before the row's own takes sigmoid(z) of the stick, the next of the rest."""
        rest = torch.ones_like(z[..., 0])
        columns = []
        for j in reversed(range(z.shape[-1])):
            visible = self.visible[..., j] & (self.distance[:, j] > 0)
            columns.append(rest * torch.sigmoid(z[..., j]) * visible)
            rest = rest * torch.where(visible, torch.sigmoid(-z[..., j]), 1)
        return torch.stack(columns[::-1], -1)

    def adaptive_temperature(self, z):
        A = self.softmax(z)
        log_A = A.masked_fill(A == 0, 1).log()
        x = -(A * log_A).sum(-1, keepdim=True)  # the entropy
        beta = -0.037 * x**4 + 0.481 * x**3 - 2.3 * x**2 + 4.917 * x - 1.791
        return self.softmax(z * torch.where(x > 0.5, beta.clamp_min(1), 1))

    def scale_invariant(self, z):
        """a_t z + m_t with alpha and beta for which a_0 = 1 and m_0 = 0 (Anson et al. 2025)."""
        alpha = beta = math.exp(0.5)
        tau = 10
        t = self.distance.clamp_min(0).to(z.dtype)
        a = (2 * ((t / tau + 1).log() - math.log(alpha) + beta / alpha)).sqrt()
        m = -(a**2) + beta / alpha
        return self.softmax(a * z + m)


def by_head(scalars, q):
    """A layer's learnt scalars as [H, 1, 1]; None where it has none."""
    if scalars is None:
        return None
    return scalars.to(q.dtype)[:, None, None]


def l1(A):
    total = A.abs().sum(-1, keepdim=True)
    return A / torch.where(total > DEAD, total, math.inf)


def softplus(z):
    return torch.logaddexp(z, torch.zeros_like(z))


def relu2(z):
    return torch.relu(z) ** 2


def gelu(z):
    return z * torch.special.ndtr(z)  # exact far below 0, where F.gelu is 0


def identity(z):
    return z


FORMULAS = {
    "softmax": lambda t: t.softmax(t.z()),
    "sigmoid": lambda t: t.phi(torch.sigmoid, t.z(bias=-math.log(t.L))),
    "sigmoid_logn": lambda t: t.phi(torch.sigmoid, t.z(bias=-t.log_n)),
    "sigmoid_logn_l1": lambda t: t.l1(torch.sigmoid, t.z(bias=-t.log_n)),
    "sigmoid_l1": lambda t: t.l1(torch.sigmoid, t.z()),
    "relu_wortsman": lambda t: t.phi(torch.relu, t.z()) / t.L,
    "relu_li": lambda t: t.l1(torch.relu, t.z()),
    "relu_shen": lambda t: t.phi(torch.relu, t.z()) / (t.gamma * (t.n / 2).sqrt()),
    "lssa": lambda t: t.l1(softplus, t.cosines()),
    "lssar": lambda t: t.l1(softplus, t.cosines()),
    "softmax_inverse": lambda t: -t.softmax(t.z()),
    "softmax_recentred": lambda t: t.recentred(t.softmax(t.z())),
    "softmax_recentred_l1": lambda t: t.recentred_l1(t.softmax(t.z())),
    "linear": lambda t: t.phi(identity, t.z()),
    "exp": lambda t: t.phi(torch.exp, t.z()),
    "linear_l1": lambda t: t.l1(identity, t.z()),
    "phi_relu2": lambda t: t.l1(relu2, t.z()),
    "phi_relu6": lambda t: t.l1(F.relu6, t.z()),
    "phi_gelu": lambda t: t.l1(gelu, t.z()),
    "phi_softplus": lambda t: t.l1(softplus, t.z()),
    "phi_mish": lambda t: t.l1(F.mish, t.z()),
    "ssmax": lambda t: t.softmax(t.z(t.s * t.log_n)),
    "ssmax_fixed": lambda t: t.softmax(t.z(t.log_n)),
    "ssmax_bias": lambda t: t.softmax(t.z(t.s * t.log_n + t.b)),
    "ssmax_probe": lambda t: t.softmax(t.z(t.s * t.p_n + t.b)),
    "softmax_logn": lambda t: t.softmax(t.z(t.log_n / math.log(t.L))),
    "softpick": lambda t: t.softpick(t.z()),
    "sparsemax": lambda t: t.entmax(t.z(), 1),
    "entmax15": lambda t: t.entmax(t.z(), 2),
    "asentmax": lambda t: t.asentmax(),
    "stick_breaking": lambda t: t.stick_breaking(t.z()),
    "adaptive_temperature": lambda t: t.adaptive_temperature(t.z()),
    "scale_invariant": lambda t: t.scale_invariant(t.z()),
    "softmax_cosine": lambda t: t.softmax(t.cosines()),
    "softplus_logn": lambda t: t.l1(softplus, t.z(t.log_n)),
    "lssa_threshold": lambda t: t.thresholded(t.l1(softplus, t.cosines())),
}
