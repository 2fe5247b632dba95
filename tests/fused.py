"""Inputs for the fused kernels, and what they compute, a whole matrix at a time."""

import itertools
import math

import torch
import torch.nn.functional as F

from attention_paths.reference import PLAIN, Context
from layers.heads import build_attention
from tests.helpers import small_config

TRITON, REFERENCE = "--attention_impl=triton", "--attention_impl=reference"
BLOCK_SIZE = 64  # the training length: the tests' lengths are smaller, equal and larger

# log phi(z): l1 of phi is then a softmax, in which nothing under- or overflows
LOG_PHI = {
    "exp": lambda z: z,
    "sigmoid": F.logsigmoid,
    "softplus": lambda z: torch.where(z < -30, z, F.softplus(z.clamp_min(-30)).log()),
}
PHI = {
    "exp": torch.exp, "sigmoid": torch.sigmoid, "relu": torch.relu, "gelu": F.gelu,
    "relu2": lambda z: torch.relu(z) ** 2, "relu6": F.relu6, "mish": F.mish,
    "identity": lambda z: z,
}  # fmt: skip


def attended(
    q, k, v, scale, bias=None, norm=None, sink=None, key_bias=None, *, phi, p=None, unit=False,
    window=None, softcap=None, shifted=None, signed=None,
):  # fmt: skip
    """What launch.attend computes; `shifted` and `signed` change nothing."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if unit:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    z = scale[..., None] * (q @ k.mT)
    past = z.shape[3] - z.shape[2]
    seen = torch.ones_like(z[0, 0], dtype=torch.bool).tril(past)
    seen = seen if window is None else seen.triu(past - window + 1)
    n = seen.sum(-1, keepdim=True)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if bias is not None:
        z = z + bias[..., None]
    if key_bias is not None:
        z = z + key_bias[:, :, None]
    z = z.masked_fill(~seen, 0)
    if norm is not None:
        A = PHI[phi](z) * seen / norm[..., None]
    elif phi == "softpick":
        a = torch.expm1(z) * seen
        A = torch.relu(a) / a.abs().sum(-1, keepdim=True)
    elif phi in LOG_PHI:
        log_phi = LOG_PHI[phi](z).masked_fill(~seen, -math.inf)
        if sink is not None:
            sinks = LOG_PHI[phi](sink)[:, None, None].expand(*z.shape[:3], 1)
            log_phi = torch.cat((log_phi, sinks), dim=-1)
        A = torch.softmax(log_phi, -1)
    else:
        A = F.normalize(PHI[phi](z) * seen, p=1, dim=-1)
    if p is not None:
        x = n * A
        top = x.amax(-1, keepdim=True)
        x = torch.relu(x - ((n > 3) & (top > 1 + 1e-5)).to(x.dtype))
        A = F.normalize((x / x.detach().amax(-1, keepdim=True)) ** p, p=1, dim=-1)
    return A[..., : k.shape[2]].to(v.dtype) @ v


def build(case, d, *more):
    """The attention of a config file, with settings behind it if any, and scalars of its own."""
    sizes = [f"--n_embd={2 * d}", f"--block_size={BLOCK_SIZE}", f"--total_batch_size={BLOCK_SIZE}"]
    layer = build_attention(small_config(case, *sizes, *more))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.rand(parameter.shape, generator=g))
    return layer


def draw(Lq, Lk, d, dtype, B=1, seed=0):
    """q, k, v and the output's gradient, [B, 2, L, d]."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(B, 2, L, d) for L in (Lq, Lk, Lk, Lq)]
    q, k, v, gradient = (torch.randn(*shape, generator=g).to(dtype) for shape in shapes)
    # Each query's score with its own key is made 1 or more, so that no row's l1 norm is 0, or so
    # small that rounding decides, as in the first row of a relu.
    own, exact = k[:, :, -Lq:], q.double()
    sign = torch.where((exact * own).sum(-1, keepdim=True) < 0, -1, 1)
    own.copy_(sign * own + exact * (math.sqrt(d) / exact.square().sum(-1, keepdim=True)))
    return q, k, v, gradient


def draw_off_kinks(Lq, Lk, d, dtype, B=1, seed=0, window=None):
    """The first draw, from this seed on, in which rounding to float32 moves no number over a kink.

    The slope jumps at score 0 for relu and for |phi| in a signed l1, at 6 for relu6, and at
    A = 1 / n for the recentred l1: one element on the wrong side is an error of 1e-3.
    """
    position = torch.arange(Lk)
    distance = position[Lk - Lq :, None] - position
    seen = (distance >= 0) & (distance < (window or Lk))
    n = seen.sum(-1, keepdim=True)
    for draw_seed in itertools.count(seed):
        tensors = draw(Lq, Lk, d, dtype, B, draw_seed)
        z = tensors[0].double() @ tensors[1].double().mT / math.sqrt(d)
        over_mean = n * z.masked_fill(~seen, -math.inf).softmax(-1) - 1
        scores, over_mean = z[..., seen], over_mean[..., seen & (n > 3)]
        if torch.cat((scores, scores - 6, over_mean), -1).abs().min() > 1e-6:
            return tensors


def call(layer, q, k, v, log_forget=None):
    return layer(q, k, v, PLAIN if log_forget is None else Context(log_forget=log_forget))


def evaluate(layer, tensors, formula=call):
    """The output and the gradients by q, k, v and every parameter, by name, flat, in float64.

    Of the layer, or of formula(layer, q, k, v). Forget gates may follow v; the output's gradient is
    last.
    """
    *inputs, gradient = tensors
    inputs = [x.clone().requires_grad_() for x in inputs]
    learnt = dict(layer.named_parameters())
    out = formula(layer, *inputs)
    found = torch.autograd.grad(out, [*inputs, *learnt.values()], gradient)
    names = ["out", "dq", "dk", "dv", "dlog_forget"][: len(tensors)] + [f"d{n}" for n in learnt]
    values = [x.detach().double().flatten() for x in (out, *found)]
    return dict(zip(names, values, strict=True))
