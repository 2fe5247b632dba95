"""Rounding: in float32 and bfloat16, no row is less exact than its formula as the papers print it.

The formula is evaluated twice by the plain code below: in the dtype under test, every number of it
rounded to that dtype, and in float64 on the same inputs, which is the truth. Attention has to be
within twice the error of the first, in value and in every gradient, up to the floors below.
"""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention import build_attention
from tests.helpers import ROWS, small_config

BLOCK_SIZE = 64  # the training length: L is it, smaller, and larger
FLOAT32, BFLOAT16, FLOAT64 = torch.float32, torch.bfloat16, torch.float64

# ---- the formulas, in whatever dtype q and k have ----


@dataclass
class Textbook:
    q: Tensor
    k: Tensor
    s: Tensor | None = None  # [H, 1, 1], of the dtype of q
    b: Tensor | None = None
    p_n: Tensor | None = None  # [Lq, 1]

    @property
    def seen(self):
        """[Lq, Lk]: the queries are the last positions."""
        ones = torch.ones(self.q.shape[2], self.k.shape[2], dtype=torch.bool)
        return ones.tril(self.k.shape[2] - self.q.shape[2])

    @property
    def n(self):
        return self.seen.sum(-1, keepdim=True).to(self.q.dtype)

    @property
    def log_n(self):
        return self.seen.sum(-1, keepdim=True).double().log().to(self.q.dtype)

    def z(self, factor=1.0):
        return factor * (self.q @ self.k.mT) / math.sqrt(self.q.shape[-1])

    def softmax(self, factor=1.0):
        return torch.softmax(self.z(factor).masked_fill(~self.seen, -math.inf), -1)

    def phi(self, function, bias=0.0):
        return function(self.z() + bias) * self.seen

    def lssa(self):
        cosines = F.normalize(self.q, dim=-1) @ F.normalize(self.k, dim=-1).mT
        return l1(F.softplus(math.log(self.q.shape[-1]) * self.log_n * cosines) * self.seen)

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
}


def textbook(q, k, v, learnable, case):
    """Its output, given what the layer learns as {name: parameter}."""
    parameters = {name: x.to(q.dtype) for name, x in learnable.items()}
    if "p_n" in parameters:
        seen = torch.arange(k.shape[2] - q.shape[2], k.shape[2])
        parameters["p_n"] = parameters["p_n"][seen.clamp_max(BLOCK_SIZE - 1), None]
    for name in {"s", "b"} & parameters.keys():
        parameters[name] = parameters[name][:, None, None]
    return TEXTBOOK[case](Textbook(q, k, **parameters)) @ v


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
    # Each query's score with its own key is 1 or more: no row's l1 norm is 0, or so near that it is
    # rounding that decides, as in the first row of a relu.
    own, wide = k[:, :, -Lq:], q.double()
    sign = torch.where((wide * own).sum(-1, keepdim=True) < 0, -1, 1)
    nearer = sign * own + wide * (math.sqrt(d) / wide.square().sum(-1, keepdim=True))
    own.copy_(nearer)
    return q, k, v, gradient


def draw_off_kinks(Lq, Lk, d, dtype, B, first=0):
    """The first draw in which rounding to float32 cannot move a number across a kink.

    At score 0 the slope of relu jumps, as does that of |phi| in a signed l1; at A = 1 / n that of
    the recentred l1. There one flipped element is an error of 1e-3 whatever the code's precision.
    Stage 2 has no such place: relu(x)^p is smooth for the p of the configs.
    """
    for seed in itertools.count(first):
        tensors = draw(Lq, Lk, d, dtype, B, seed)
        t = Textbook(*(x.double() for x in tensors[:2]))
        z, over_mean = t.z(), t.n * t.softmax() - 1
        places = torch.cat(
            (z[..., t.seen], z[..., t.seen] - 6, over_mean[..., t.seen & (t.n > 3)]), -1
        )
        if places.abs().min() > 1e-6:
            return tensors


def evaluate(attn, tensors, case=None):
    """out, dq, dk, dv and the gradient of every learnable parameter, each flat and in float64.

    Of the layer, or with a case, of its formula.
    """
    *inputs, gradient = tensors
    inputs = [x.clone().requires_grad_() for x in inputs]
    learnable = dict(attn.named_parameters())
    out = attn(*inputs) if case is None else textbook(*inputs, learnable, case)
    found = torch.autograd.grad(out, [*inputs, *learnable.values()], gradient)
    names = ["out", "dq", "dk", "dv", *("d" + name for name in learnable)]
    found = [x.detach().double().flatten() for x in (out, *found)]
    return dict(zip(names, found, strict=True))


# ---- rounding ----

LENGTHS = [1, 2, 3, 4, 5, 63, 64, 65, 1000]
LEARNABLE = ("ds", "db", "dp_n")


def floor(name, L, dtype):
    """What is allowed beyond twice the textbook's relative error.

    The ratio of two errors means little where few numbers make them: up to 5 keys the textbook's
    can be 0. A learnable parameter's gradient is one sum of terms that cancel, through what torch's
    fused attention recomputes from logsumexp: its float32 is 2 to 5 times coarser than the print.
    """
    eps = torch.finfo(dtype).eps
    if name in LEARNABLE:
        return (48 if dtype is FLOAT32 else 1) * eps
    if dtype is FLOAT32:
        return (16 if L <= 5 else 4) * eps
    return eps / 2  # the result itself is rounded


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("case", ROWS)
def test_at_most_twice_the_error_of_the_formula_in_the_same_dtype(case, dtype):
    for i, L in enumerate(LENGTHS):
        d = (16, 64, 128)[(i + ROWS.index(case)) % 3]  # each pair of L and d in a third of the rows
        attn, exactly = build(case, d), build(case, d).double()
        # of 1,000 positions the last 64; a parameter's gradient is few numbers, so of 8 draws
        draws, B = (8, 1) if list(attn.parameters()) else (1, max(1, 64 // L))
        ours, printed, exact, size = [], [], [], 0.0
        for seed in range(draws):
            tensors = draw_off_kinks(min(L, 64), L, d, dtype, B, 100 * seed)
            ours.append(evaluate(attn, tensors))
            printed.append(evaluate(attn, tensors, case))
            exact.append(evaluate(exactly, [x.double() for x in tensors], case))
            size += tensors[-1].double().square().sum()
        for name in exact[0]:
            truth, mine, theirs = (
                torch.cat([result[name] for result in results])
                for results in (exact, ours, printed)
            )
            # with one key most gradients are 0, so relative to the incoming one
            scale = max(truth.norm(), 1e-9 * size**0.5) if L > 1 else size**0.5
            error, bar = (mine - truth).norm() / scale, (theirs - truth).norm() / scale
            assert bar.isfinite()
            assert error <= 2 * bar + floor(name, L, dtype), (L, d, name, error, bar)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_where_the_formula_overflows(dtype):
    """(n A)^15 is above float32's and bfloat16's largest number where A is 1 and n is 1,000."""
    case = "softmax_p15.py"
    attn, exactly = build(case, 64), build(case, 64).double()
    q, k, v, gradient = draw(2, 1000, 64, dtype)
    q[:, :, 1] = 20 * k[:, :, 100] / k[:, :, 100].norm(dim=-1, keepdim=True)
    tensors = (q, k, v, gradient)
    assert not evaluate(attn, tensors, case)["out"].isfinite().all()
    exact = evaluate(exactly, [x.double() for x in tensors], case)
    ours = evaluate(attn, tensors)
    atol = 1e-4 if dtype is FLOAT32 else 0.05
    for name, truth in exact.items():
        torch.testing.assert_close(ours[name], truth, rtol=0, atol=atol)


# ---- 16,384 keys ----

BEFORE_STAGE_2 = {
    "lssar_p15.py": lambda t: t.lssa(),
    "softmax_p15.py": lambda t: t.softmax(),
    "sigmoid_logn_l1_p15.py": sigmoid_logn_l1,
}


@pytest.mark.parametrize("case", BEFORE_STAGE_2)
def test_p_of_100_at_16384_keys_in_bfloat16(case):
    """The queries are the last four positions; one of them has a winner far ahead."""
    q, k, v, gradient = draw(4, 16384, 64, BFLOAT16)
    q[:, :, 2] = 2 * k[:, :, 100]
    attn = build(case, 64, "--p=100")
    ours = evaluate(attn, (q, k, v, gradient))
    assert all(x.isfinite().all() for x in ours.values())
    A = attn.weights(q, k)
    torch.testing.assert_close(A.sum(-1), torch.ones_like(A[..., 0]), rtol=1e-5, atol=0)
    assert (A[:, :, 2, 100] > 0.99).all()
    # softmax's (n A)^100 of the winner is beyond float64: its row is not compared with the formula
    t = Textbook(q.double(), k.double())
    rows = [0, 1, 3]
    exact = (t.reweighted(BEFORE_STAGE_2[case](t), 100) @ v.double())[:, :, rows]
    out = ours["out"].view(q.shape)[:, :, rows]
    assert (out - exact).norm() < 0.01 * exact.norm()


def test_growing_p_tends_to_the_value_of_the_largest_score_at_16384_keys():
    q, k, v, _ = draw(4, 16384, 64, BFLOAT16)
    seen = Textbook(q, k).seen
    cosines = F.normalize(q.double(), dim=-1) @ F.normalize(k.double(), dim=-1).mT
    first, second = cosines.masked_fill(~seen, -math.inf).topk(2).values.unbind(-1)
    assert (first - second).min() > 1e-5  # there is one largest
    winner = cosines.masked_fill(~seen, -math.inf).argmax(-1, keepdim=True)
    largest = v.gather(2, winner.expand(-1, -1, -1, 64))
    attn = build("lssar_p15.py", 64, "--p=1e7")
    assert torch.equal(attn(q, k, v), largest)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_ssmax_with_s_of_one_over_log_n_is_softmax_at_16384_keys(dtype):
    attn = build("ssmax.py", 64)
    attn.s.data.fill_(1 / math.log(16384))
    q, k, v, _ = draw(1, 16384, 64, dtype)
    softmax = build("softmax.py", 64)(q, k, v)
    error = (attn(q, k, v) - softmax).norm() / softmax.norm()
    assert error < 8 * torch.finfo(dtype).eps
