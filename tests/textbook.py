"""The formula of every row as the papers print it, in torch, and inputs to evaluate it on.

Computed whole and in any dtype, to measure rounding against. tests/test_attention.py has another
reference, in Python's float64 and one query at a time. Each was written from the papers without the
other, so that a mistake in one of them is found.
"""

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_paths.reference import PLAIN, Context
from layers.heads import build_attention
from tests.helpers import small_config

BLOCK_SIZE = 64  # the training length: L is it, smaller, and larger

# ---- the formulas, in whatever dtype q and k have ----


@dataclass
class Textbook:
    q: Tensor
    k: Tensor
    s: Tensor | None = None  # [H, 1, 1], of the dtype of q
    b: Tensor | None = None
    p_n: Tensor | None = None  # [Lq, 1]
    sink: Tensor | None = None  # [H, 1, 1]
    window: int | None = None

    @property
    def seen(self):
        """[Lq, Lk]: the queries are the last positions."""
        ones = torch.ones(self.q.shape[2], self.k.shape[2], dtype=torch.bool)
        past = self.k.shape[2] - self.q.shape[2]
        seen = ones.tril(past)
        return seen if self.window is None else seen.triu(past - self.window + 1)

    @property
    def n(self):
        return self.seen.sum(-1, keepdim=True).to(self.q.dtype)

    @property
    def log_n(self):
        return self.seen.sum(-1, keepdim=True).double().log().to(self.q.dtype)

    def z(self, factor=1.0):
        return factor * (self.q @ self.k.mT) / math.sqrt(self.q.shape[-1])

    def softmax(self, factor=1.0):
        return self.softmax_of(self.z(factor))

    def softmax_of(self, z):
        return torch.softmax(z.masked_fill(~self.seen, -math.inf), -1)

    def softmax_with(self, sink):
        """With one more key, whose score is sink."""
        z = self.z().masked_fill(~self.seen, -math.inf)
        return torch.softmax(torch.cat((z, sink.expand(*z.shape[:3], 1)), -1), -1)[..., :-1]

    @property
    def distance(self):
        keys = torch.arange(self.k.shape[2], dtype=self.q.dtype)
        return keys[-self.q.shape[2] :, None] - keys

    def alibi_z(self):
        H = self.q.shape[1]
        slopes = 2.0 ** (-8 * torch.arange(1, H + 1, dtype=self.q.dtype) / H)
        return self.z() - slopes[:, None, None] * self.distance

    def softpick(self):
        a = self.phi(torch.expm1)
        return torch.relu(a) / a.abs().sum(-1, keepdim=True)

    def phi(self, function, bias=0.0):
        return function(self.z() + bias) * self.seen

    def lssa_z(self):
        cosines = F.normalize(self.q, dim=-1) @ F.normalize(self.k, dim=-1).mT
        return math.log(self.q.shape[-1]) * self.log_n * cosines

    def lssa(self):
        return l1(F.softplus(self.lssa_z()) * self.seen)

    def softmax_cosine(self):
        return torch.softmax(self.lssa_z().masked_fill(~self.seen, -math.inf), -1)

    def thresholded(self, A):
        return l1(torch.where((self.n > 3) & (self.n * A <= 1), 0, A))

    def reweighted(self, A, p):
        x = self.n * A
        return l1(torch.relu(torch.where(self.n > 3, x - 1, x)) ** p)

    def recentred(self, A):
        return torch.where(self.n > 3, A - self.seen / self.n, A)


def l1(A):
    return A / A.abs().sum(-1, keepdim=True)


def relu2(z):
    return torch.relu(z) ** 2


def sigmoid_logn_l1(t):
    return l1(t.phi(torch.sigmoid, -t.log_n))


TEXTBOOK = {
    "softmax.py": lambda t: t.softmax(),
    "sigmoid.py": lambda t: t.phi(torch.sigmoid, -math.log(BLOCK_SIZE)),
    "sigmoid_logn.py": lambda t: t.phi(torch.sigmoid, -t.log_n),
    "sigmoid_logn_l1.py": sigmoid_logn_l1,
    "sigmoid_l1.py": lambda t: l1(t.phi(torch.sigmoid)),
    "relu_wortsman.py": lambda t: t.phi(torch.relu) / BLOCK_SIZE,
    "relu_li.py": lambda t: l1(t.phi(torch.relu)),
    "relu_shen.py": lambda t: t.phi(torch.relu) / (t.n / 2).sqrt(),
    "lssa.py": lambda t: t.lssa(),
    "lssar_p3.py": lambda t: t.reweighted(t.lssa(), 3),
    "lssar_p15.py": lambda t: t.reweighted(t.lssa(), 15),
    "softmax_p3.py": lambda t: t.reweighted(t.softmax(), 3),
    "softmax_p15.py": lambda t: t.reweighted(t.softmax(), 15),
    "sigmoid_logn_l1_p3.py": lambda t: t.reweighted(sigmoid_logn_l1(t), 3),
    "sigmoid_logn_l1_p15.py": lambda t: t.reweighted(sigmoid_logn_l1(t), 15),
    "ssmax.py": lambda t: t.softmax(t.s * t.log_n),
    "ssmax_fixed.py": lambda t: t.softmax(t.log_n),
    "ssmax_bias.py": lambda t: t.softmax(t.s * t.log_n + t.b),
    "softmax_logn.py": lambda t: t.softmax(t.log_n / math.log(BLOCK_SIZE)),
    "softmax_alibi.py": lambda t: t.softmax_of(t.alibi_z()),
    "softmax_off_by_one.py": lambda t: t.softmax_with(torch.zeros((), dtype=t.q.dtype)),
    "softmax_sink.py": lambda t: t.softmax_with(t.sink),
    "softcap.py": lambda t: t.softmax_of(50 * torch.tanh(t.z() / 50)),
    "softpick.py": lambda t: t.softpick(),
    "ablations/softmax_inverse.py": lambda t: -t.softmax(),
    "ablations/softmax_recentred.py": lambda t: t.recentred(t.softmax()),
    "ablations/softmax_recentred_l1.py": lambda t: l1(t.recentred(t.softmax())),
    "ablations/linear.py": lambda t: t.phi(lambda z: z),
    "ablations/exp.py": lambda t: t.phi(torch.exp),
    "ablations/linear_l1.py": lambda t: l1(t.phi(lambda z: z)),
    "ablations/phi_relu2.py": lambda t: l1(t.phi(relu2)),
    "ablations/phi_relu6.py": lambda t: l1(t.phi(F.relu6)),
    "ablations/phi_gelu.py": lambda t: l1(t.phi(F.gelu)),
    "ablations/phi_softplus.py": lambda t: l1(t.phi(F.softplus)),
    "ablations/phi_mish.py": lambda t: l1(t.phi(F.mish)),
    "ablations/ssmax_probe.py": lambda t: t.softmax(t.s * t.p_n + t.b),
    "ablations/softmax_cosine.py": lambda t: t.softmax_cosine(),
    "ablations/softplus_logn.py": lambda t: l1(F.softplus(t.z(t.log_n)) * t.seen),
    "ablations/lssa_threshold.py": lambda t: t.thresholded(t.lssa()),
}


def textbook(q, k, v, learnable, formula, window=None):
    """The output of a formula, given the layer's parameters as {name: parameter}."""
    parameters = {name: x.to(q.dtype) for name, x in learnable.items()}
    if "p_n" in parameters:
        n = Textbook(q, k, window=window).n.long().flatten()
        parameters["p_n"] = parameters["p_n"][(n - 1).clamp_max(BLOCK_SIZE - 1), None]
    for name in {"s", "b", "sink"} & parameters.keys():
        parameters[name] = parameters[name][:, None, None]
    return formula(Textbook(q, k, **parameters, window=window)) @ v


# ---- the arguments of attention_paths.launch.attend, in combinations that no config has ----

# log phi(z), so that a row is a softmax and nothing under- or overflows.
LOG_PHI = {
    "exp": lambda z: z,
    "sigmoid": F.logsigmoid,
    "softplus": lambda z: torch.where(z < -30, z, F.softplus(z.clamp_min(-30)).log()),
}
PHI = {"exp": torch.exp, "sigmoid": torch.sigmoid, "relu": torch.relu, "gelu": F.gelu}


def attended(
    q, k, v, scale, bias=None, norm=None, sink=None, slopes=None, key_bias=None, powers=None, *,
    phi, p=None, unit=False, window=None, softcap=None, shifted=None, signed=None,
):  # fmt: skip
    """What launch.attend computes, a whole matrix at a time; shifted and signed change nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if unit:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    z = scale[..., None] * (q @ k.mT)
    t = Textbook(z, k, window=window)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if bias is not None:
        z = z + bias[..., None]
    if slopes is not None:
        keys = torch.arange(k.shape[2])
        z = z - slopes[:, None, None] * (keys[-q.shape[2] :, None] - keys)
    if key_bias is not None:
        z = z + key_bias[:, :, None]
    z = z.masked_fill(~t.seen, 0)
    if norm is not None:
        A = PHI[phi](z) * t.seen / norm[..., None]
    elif phi == "softpick":
        a = torch.expm1(z) * t.seen
        A = torch.relu(a) / a.abs().sum(-1, keepdim=True)
    elif phi in LOG_PHI:
        log_phi = LOG_PHI[phi](z).masked_fill(~t.seen, -math.inf)
        if sink is not None:
            sinks = LOG_PHI[phi](sink)[:, None, None].expand(*z.shape[:3], 1)
            log_phi = torch.cat((log_phi, sinks), dim=-1)
        A = torch.softmax(log_phi, -1)
    else:
        A = l1(PHI[phi](z) * t.seen)
    if p is not None or powers is not None:
        x = t.n * A
        top = x.amax(-1, keepdim=True)
        x = torch.relu(x - ((t.n > 3) & (top > 1 + 1e-5)).to(x.dtype))
        A = l1(
            (x / x.detach().amax(-1, keepdim=True)) ** (p if powers is None else powers[..., None])
        )
    return A[..., : k.shape[2]].to(v.dtype) @ v


# ---- inputs ----


def build(case, d, *more):
    sizes = [f"--n_embd={2 * d}", f"--block_size={BLOCK_SIZE}", f"--total_batch_size={BLOCK_SIZE}"]
    attn = build_attention(small_config(case, *sizes, *more))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter.add_(0.3 * torch.rand(parameter.shape, generator=g))
    return attn


def draw(Lq, Lk, d, dtype, B=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(B, 2, L, d) for L in (Lq, Lk, Lk, Lq)]
    q, k, v, gradient = (torch.randn(*shape, generator=g).to(dtype) for shape in shapes)
    # Each query's score with its own key is made 1 or more, so that no row's l1 norm is 0, or so
    # small that rounding decides, as in the first row of a relu.
    own, exact = k[:, :, -Lq:], q.double()
    sign = torch.where((exact * own).sum(-1, keepdim=True) < 0, -1, 1)
    own.copy_(sign * own + exact * (math.sqrt(d) / exact.square().sum(-1, keepdim=True)))
    return q, k, v, gradient


def draw_off_kinks(Lq, Lk, d, dtype, B, first=0, window=None):
    """The first draw in which rounding to float32 moves no number across a kink.

    The slope jumps at score 0 for relu and for |phi| in a signed l1, and at A = 1 / n for the
    recentred l1: one element on the wrong side is an error of 1e-3, however exact the code is.
    Stage 2 has no kink: relu(x)^p is smooth for the p of the configs.
    """
    for seed in itertools.count(first):
        tensors = draw(Lq, Lk, d, dtype, B, seed)
        t = Textbook(*(x.double() for x in tensors[:2]), window=window)
        z, over_mean = t.z(), t.n * t.softmax() - 1
        from_kinks = torch.cat(
            (z[..., t.seen], z[..., t.seen] - 6, over_mean[..., t.seen & (t.n > 3)]), -1
        )
        if from_kinks.abs().min() > 1e-6:
            return tensors


def call(attn, q, k, v, log_forget=None):
    return attn(q, k, v, PLAIN if log_forget is None else Context(log_forget=log_forget))


def evaluate(attn, tensors, formula=None):
    """out, dq, dk, dv and the gradient of every learnable parameter, each flat and in float64, of
    the layer or of a formula with the layer's parameters. Forget gates may follow v."""
    *inputs, gradient = tensors
    inputs = [x.clone().requires_grad_() for x in inputs]
    learnable = dict(attn.named_parameters())
    if formula is None:
        out = call(attn, *inputs)
    else:
        out = textbook(*inputs, learnable, formula, attn.window)
    found = torch.autograd.grad(out, [*inputs, *learnable.values()], gradient)
    names = ["out", "dq", "dk", "dv", "dlog_forget"][: len(tensors)]
    names += ["d" + name for name in learnable]
    found = [x.detach().double().flatten() for x in (out, *found)]
    return dict(zip(names, found, strict=True))


def without_overflow(reference, tensors, formula, truth):
    """What a formula that overflows in float16 gives in bfloat16, with an error in proportion."""
    if tensors[0].dtype is not torch.float16:
        return evaluate(reference, tensors)
    found = evaluate(reference, [x.to(torch.bfloat16) for x in tensors], formula)
    smaller = torch.finfo(torch.float16).eps / torch.finfo(torch.bfloat16).eps
    return {name: exact + smaller * (found[name] - exact) for name, exact in truth.items()}
