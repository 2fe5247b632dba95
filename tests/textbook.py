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
    v = for_each_query(q, v)
    A = weights(layer, q, k, context)
    return A.to(v.dtype) @ v


def weights(layer, q, k, context=NO_CONTEXT):
    """The weights [B, H, Lq, Lk] of a layer; the queries are the last Lq of Lk positions."""
    names = {id(variant): name for name, variant in VARIANTS.items()}
    name = names[id(layer.variant)]
    t = Textbook(layer, q, for_each_query(q, k), context)
    assert name in FORMULAS, f"write the formula of {name} into FORMULAS of tests/textbook.py"
    A = FORMULAS[name](t)
    if layer.p is not None:
        A = t.reweighted(A, layer.p)
    return A[..., : k.shape[2]]  # without the sink


def for_each_query(q, shared):
    """Keys or values with as many heads as q: groups of query heads share one."""
    group_size = q.shape[1] // shared.shape[1]
    return shared.repeat_interleave(group_size, dim=1)


class Textbook:
    """One call of a layer: n, d, L, the scores z, and the steps that several formulas share."""

    def __init__(self, layer, q, k, context):
        self.layer = layer
        self.q = q
        self.k = k
        self.context = context
        self.d = q.shape[-1]
        self.L = layer.trained_length
        Lq = q.shape[2]
        Lk = k.shape[2]
        position = torch.arange(Lk, device=q.device)
        position_of_queries = position[Lk - Lq :]
        self.distance = (position_of_queries[:, None] - position).double()  # [Lq, Lk]
        is_in_window = self.distance < (layer.window or Lk)
        self.visible = (self.distance >= 0) & is_in_window
        positions = context.document_positions
        if positions is not None:
            is_in_document = self.distance <= positions[:, None, :, None]  # [B, 1, Lq, Lk]
            self.visible = self.visible & is_in_document
        count = self.visible.sum(-1, keepdim=True)  # [.., Lq, 1]
        self.n = count.to(q.dtype)
        self.log_n = count.double().log().to(q.dtype)
        self.s = by_head(layer.s, q)
        self.b = by_head(layer.b, q)
        self.sink = by_head(layer.sink, q)
        if layer.has_sink and self.sink is None:
            self.sink = q.new_zeros(q.shape[1], 1, 1)
        if layer.p_n is not None:
            index = count.clamp_max(self.L) - 1
            self.p_n = layer.p_n.to(q.dtype)[index]
        zero = q.new_zeros(q.shape[:3])
        self.u = context.row_inputs.get("u", zero)[..., None]  # [B, H, Lq, 1]
        self.w = context.row_inputs.get("w", zero)[..., None]

    def z(self, factor=1.0, bias=0.0):
        """factor q . k / sqrt(d) + bias, and what the settings of the layer add."""
        products = self.q @ self.k.mT
        return self.with_settings(factor * products / math.sqrt(self.d), bias)

    def cosines(self):
        """LSSA's scores, log d log n cos(q, k)."""
        unit_q = F.normalize(self.q, dim=-1)
        unit_k = F.normalize(self.k, dim=-1)
        cosines = unit_q @ unit_k.mT
        return self.with_settings(math.log(self.d) * self.log_n * cosines, 0.0)

    def with_settings(self, z, bias):
        z = self.context.score_scale * z
        c = self.layer.softcap
        if c is not None:  # Gemma 2
            z = c * torch.tanh(z / c)
        z = z + bias
        if self.layer.alibi_heads:
            z = z - self.slopes(z) * self.distance
        if self.context.log_forget is not None:
            z = z + self.log_remembered(z)
        return z

    def slopes(self, z):
        """ALiBi's 2^(-8 h / H) of the last H heads (Press et al. 2021), [heads, 1, 1]."""
        H = self.layer.alibi_heads
        h = torch.arange(1, H + 1, dtype=z.dtype, device=z.device)
        slopes = 2 ** (-8 * h / H)
        no_slopes = z.new_zeros(z.shape[1] - H)
        return torch.cat((no_slopes, slopes))[:, None, None]

    def log_remembered(self, z):
        """FoX's log f_(j+1) + .. + log f_i, for query i and key j."""
        total = self.context.log_forget.to(z.dtype).cumsum(-1)
        total_of_queries = total[..., -z.shape[2] :]
        return total_of_queries[..., None] - total[..., None, :]

    def phi(self, function, z):
        """phi(z), 0 for masked keys."""
        z = z.masked_fill(~self.visible, 0)
        return function(z) * self.visible

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
            is_low = scores.amax(-1, keepdim=True) < -40
            softmax = torch.softmax(scores, -1)
            shares = l1(a.masked_fill(is_low, 1))
            return torch.where(is_low, softmax, shares)
        return l1(a)

    def softmax(self, z):
        return self.l1(torch.exp, z)

    def tied(self, A):
        top = A.detach().amax(-1, keepdim=True)
        return self.n * top <= 1 + TIED

    def reweighted(self, A, p):
        """relu(n A - o)^p, then l1 (LSSAR Eq. 5; o from Algorithm 1)."""
        is_recentred = (self.n > 3) & ~self.tied(A)
        o = is_recentred.to(A.dtype)
        x = torch.relu(self.n * A - o)
        top = x.detach().amax(-1, keepdim=True)
        top = torch.where(top > 0, top, 1)  # cancelled by l1
        return l1((x / top) ** p)

    def recentred(self, A):
        mean = self.visible / self.n
        return torch.where(self.n > 3, A - mean, A)

    def recentred_l1(self, A):
        recentred = self.recentred(A)
        return l1(torch.where(self.tied(A), A, recentred))

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
            A = torch.relu(z.detach() - tau).pow(power)
            is_above_1 = A.sum(-1, keepdim=True) > 1
            low = torch.where(is_above_1, tau, low)
            high = torch.where(is_above_1, high, tau)
        support = z > high
        k = support.sum(-1, keepdim=True).to(z.dtype)
        z = z.masked_fill(~support, 0)
        mean = z.sum(-1, keepdim=True) / k
        if power == 1:
            tau = mean - 1 / k
        else:
            squares = (z - mean).square().masked_fill(~support, 0)
            total = squares.sum(-1, keepdim=True)
            tau = mean - ((1 - total) / k).sqrt()
        A = (z - tau).pow(power)
        return A.masked_fill(~support, 0)

    def asentmax(self):
        beta = softplus(self.u)
        gamma = 2 * torch.tanh(self.w)
        scale = 1 + beta * (self.n + 1).log() ** gamma
        return self.entmax(self.z(scale), 2)

    def stick_breaking(self, z):
        """The last key before the row's own takes sigmoid(z) of the stick, the next of the rest."""
        rest = torch.ones_like(z[..., 0])
        columns = []
        for j in reversed(range(z.shape[-1])):
            is_earlier = self.distance[:, j] > 0
            visible = self.visible[..., j] & is_earlier
            taken = torch.sigmoid(z[..., j])
            left = torch.sigmoid(-z[..., j])
            columns.append(rest * taken * visible)
            rest = rest * torch.where(visible, left, 1)
        return torch.stack(columns[::-1], -1)

    def adaptive_temperature(self, z):
        A = self.softmax(z)
        log_A = A.masked_fill(A == 0, 1).log()
        x = -(A * log_A).sum(-1, keepdim=True)  # the entropy
        polynomial = -0.037 * x**4 + 0.481 * x**3 - 2.3 * x**2 + 4.917 * x - 1.791
        beta = torch.where(x > 0.5, polynomial.clamp_min(1), 1)
        return self.softmax(z * beta)

    def scale_invariant(self, z):
        """a_t z + m_t with alpha and beta for which a_0 = 1 and m_0 = 0 (Anson et al. 2025)."""
        alpha = math.exp(0.5)
        beta = alpha
        tau = 10
        t = self.distance.clamp_min(0)
        log_growth = (t / tau + 1).log() - math.log(alpha)
        a = (2 * (log_growth + beta / alpha)).sqrt()
        m = -(a**2) + beta / alpha
        return self.softmax(a * z + m)


def by_head(scalars, q):
    """A layer's learned scalars as [H, 1, 1]; None where it has none."""
    if scalars is None:
        return None
    return scalars.to(q.dtype)[:, None, None]


def l1(A):
    total = A.abs().sum(-1, keepdim=True)
    total = torch.where(total > DEAD, total, math.inf)
    return A / total


def softplus(z):
    return torch.logaddexp(z, torch.zeros_like(z))


def relu2(z):
    return torch.relu(z) ** 2


def gelu(z):
    # F.gelu and ndtr lose digits from about -5 on and are 0 below -8.5
    return z / 2 * torch.erfc(-z / math.sqrt(2))


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
    "relu_shen": lambda t: t.phi(torch.relu, t.z()) / (t.n / 2).sqrt(),
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
