"""Numbers that take no run: from the formulas of attention.py."""

import math
import statistics

import torch
from torch import Tensor

from attention import VARIANTS, Phi, l1_normalise
from attention_paths.reference import ReferenceAttention
from config import load_config
from scripts.common.papers import SSMAX
from scripts.reproduce.entries import find_entry
from scripts.reproduce.measure import Values

KEYS, HEAD_SIZE = 1024, 64  # the LSSAR paper's
SIZES = tuple(2**i for i in range(4, 14, 3))  # n of SSMax Figs. 1 and 3; the paper names none
FADING = SSMAX["figure1"]


def last_row(variant: str, scores: Tensor, s: float = 1.0) -> Tensor:
    """The weights [n] of a query over keys with these scores q . k / sqrt(d)."""
    attention = ReferenceAttention(VARIANTS[variant], 1, 1, KEYS, scalars={"s": s}).double()
    query = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    return attention.weights(query, scores[None, None, :, None])[0, 0, 0].detach()


def attention_fading(name: str) -> Values:
    """SSMax Fig. 1: the largest of n weights, of a higher score among n - 1 equal scores."""
    largest = {}
    for n in (2**i for i in range(1, 14)):
        scores = torch.full((n,), FADING["others"], dtype=torch.float64)
        scores[-1] = FADING["last"]
        largest[n] = last_row(name, scores, FADING["s"])[-1].item()
    return [largest[n] for n in SIZES], {"": (list(largest), list(largest.values()))}


FOCUS = {
    "softmax": ("softmax", 1.0),
    "ssmax (s = 0.43)": ("ssmax", 0.43),
    "ssmax (s = 1)": ("ssmax", 1.0),
}
# The paper's rule: z_max is 1 / s above the highest other score, 1.
FOCUS_RULE = {
    "columns": [f"n = {n:,}" for n in SIZES],
    "rows": {name: [1 + 1 / s] * len(SIZES) for name, (_, s) in FOCUS.items() if name != "softmax"},
}


def attention_focus(name: str) -> Values:
    """SSMax Fig. 3: the weight of z_max over z_max; the columns are z_max at a weight of 1/2."""
    variant, s = FOCUS[name]
    tops = torch.arange(0, 12, 0.05, dtype=torch.float64)
    values, curves = [], {}
    for n in SIZES:
        others = torch.arange(n - 1, dtype=torch.float64) / (n - 2)
        weights = [last_row(variant, torch.cat((others, top[None])), s)[-1] for top in tops]
        above = next(i for i, weight in enumerate(weights) if weight > 0.5)
        low, high = weights[above - 1 : above + 1]
        values.append((tops[above] - 0.05 * (high - 0.5) / (high - low)).item())
        curves[f"n = {n:,}"] = (tops.tolist(), [weight.item() for weight in weights])
    return values, curves


# The highest score of LSSA: log d log n, of a cosine of 1.
HIGHEST = math.log(HEAD_SIZE) * math.log(KEYS)
# Scores at which a gradient has its asymptotic slope in float64.
FAR = {"exp": 25.0, "softplus": 1e9}


def winner(x: Tensor, phi: Phi, p: float | None) -> Tensor:
    """y of LSSAR's (A6), for a score x [m] among KEYS - 1 scores of 0: stage 2 without its l1."""
    scores = torch.cat((x[:, None], x.new_zeros(len(x), KEYS - 1)), dim=1)
    if phi.shift is not None:
        scores = scores + phi.shift(scores.detach().amax(-1, keepdim=True))
    a = l1_normalise(phi.function(scores))[:, 0]
    return a if p is None else (KEYS * a - 1).relu().pow(p)


def gradient_slopes(name: str) -> Values:
    """LSSAR Appendix A.6: how the gradient of the winner's weight decays in its score."""
    config = load_config([str(find_entry(name).file)])
    phi, p = VARIANTS[config.attention].phi, config.p

    def gradient(x: list[float]) -> Tensor:
        scores = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(winner(scores, phi, p).sum(), scores)[0]

    def slope(x: float) -> float:
        """d ln g / d ln x, from both sides."""
        step = 1e-4
        low, high = gradient([x * (1 - step), x * (1 + step)]).log().tolist()
        return (high - low) / math.log((1 + step) / (1 - step))

    far, xs = FAR[phi.kernel or ""], torch.logspace(-1, 5, 200, dtype=torch.float64).tolist()
    gradients = gradient(xs)
    relative = (gradients / gradients.max()).tolist()
    return [slope(far) / far, slope(far), slope(HIGHEST)], {"": (xs, relative)}


QUERIES, LENGTHS = 64, tuple(2**i for i in range(7, 16, 2))


def random_entropy(name: str) -> Values:
    """LSSAR Sect. 2.1.2: the mean entropy of the weights over n keys, for normal q and k."""
    config = load_config([str(find_entry(name).file)])
    variant = VARIANTS[config.attention]
    attention = ReferenceAttention(variant, QUERIES, HEAD_SIZE, KEYS, p=config.p).double()
    generator = torch.Generator().manual_seed(config.seed)
    q, k = (
        torch.randn(shape, HEAD_SIZE, generator=generator, dtype=torch.float64)
        for shape in (QUERIES, max(LENGTHS))
    )
    means = []
    for n in LENGTHS:
        keys = k[:n].expand(1, QUERIES, n, HEAD_SIZE)
        weights = attention.weights(q[None, :, None], keys)
        means.append(torch.special.entr(weights).sum(-1).mean().item())
    slope = statistics.linear_regression([math.log(n) for n in LENGTHS], means).slope
    return [*means, slope], {"": (list(LENGTHS), means)}
