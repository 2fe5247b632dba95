"""Values that need no run: they are computed from the formulas of attention.py."""

import math
import statistics

import torch
from torch import Tensor

from attention import VARIANTS, Phi, l1_normalise
from attention_paths.reference import ReferenceAttention
from scripts.common.papers import SSMAX
from scripts.reproduce.entries import Entry, config_entry, config_with
from scripts.reproduce.measure import Values

KEYS = 1024  # the LSSAR paper's, as is the head size
HEAD_SIZE = 64
SIZES = tuple(2**i for i in range(4, 14, 3))  # n of SSMax Figs. 1 and 3; the paper names none
SIZE_COLUMNS = tuple(f"n = {n:,}" for n in SIZES)
FADING = SSMAX["figure1"]


# ---- SSMax Figs. 1 and 3: the weight of the highest score ----


def last_weight(variant: str, scores: Tensor, s: float) -> float:
    """Return the weight of the last of n keys, whose scores [n] are q . k / sqrt(d)."""
    attention = ReferenceAttention(VARIANTS[variant], 1, 1, KEYS, s=s).double()
    query = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    weights = attention.weights(query, scores[None, None, :, None])  # [1, 1, 1, n]
    return weights[0, 0, 0, -1].item()


def attention_fading(entry: Entry) -> Values:
    """SSMax Fig. 1: compute the largest of n weights, of a higher score among n - 1 equal ones."""
    largest = {}
    for n in (2**i for i in range(1, 14)):
        scores = torch.full((n,), FADING["others"], dtype=torch.float64)
        scores[-1] = FADING["last"]
        largest[n] = last_weight(entry.config.attention, scores, FADING["s"])
    curve = (list(largest), list(largest.values()))
    return [largest[n] for n in SIZES], {"": curve}


FOCUS = (
    config_entry("softmax"),
    config_with("ssmax", "ssmax (s = 0.43)", s_init=0.43),
    config_with("ssmax", "ssmax (s = 1)", s_init=1),
)
# The paper's rule: z_max is 1 / s above the highest other score, 1.
FOCUS_RULE = {
    "columns": SIZE_COLUMNS,
    "rows": {entry.name: [1 + 1 / entry.config.s_init] * len(SIZES) for entry in FOCUS[1:]},
}


def attention_focus(entry: Entry) -> Values:
    """SSMax Fig. 3: compute the weight of z_max; the columns are z_max at a weight of 1/2."""
    step = 0.05
    z_max = torch.arange(0, 12, step, dtype=torch.float64)
    values = []
    curves = {}
    for n, column in zip(SIZES, SIZE_COLUMNS, strict=True):
        other_scores = torch.arange(n - 1, dtype=torch.float64) / (n - 2)
        weights = []
        for z in z_max:
            scores = torch.cat((other_scores, z[None]))
            weights.append(last_weight(entry.config.attention, scores, entry.config.s_init))
        above = next(i for i, weight in enumerate(weights) if weight > 0.5)
        low, high = weights[above - 1 : above + 1]
        values.append((z_max[above] - step * (high - 0.5) / (high - low)).item())
        curves[column] = (z_max.tolist(), weights)
    return values, curves


# ---- LSSAR Appendix A.6: gradients ----

# The highest score of LSSA: log d log n, of a cosine of 1.
HIGHEST = math.log(HEAD_SIZE) * math.log(KEYS)
# Scores at which a gradient has its asymptotic slope in float64.
FAR = {"exp": 25.0, "softplus": 1e9}


def winner(x: Tensor, phi: Phi, p: float | None) -> Tensor:
    """Return y of LSSAR's (A6), stage 2 without its l1, for a score x [m] among KEYS - 1 zeros."""
    zeros = x.new_zeros(len(x), KEYS - 1)
    scores = torch.cat((x[:, None], zeros), dim=1)
    if phi.shift is not None:
        scores = scores + phi.shift(scores.detach().amax(-1, keepdim=True))
    a = l1_normalise(phi.function(scores))[:, 0]
    if p is None:
        return a
    return (KEYS * a - 1).relu().pow(p)


def gradient_slopes(entry: Entry) -> Values:
    """LSSAR Appendix A.6: compute how the gradient of the winner's weight decays in its score."""
    phi = VARIANTS[entry.config.attention].phi

    def gradient(x: list[float]) -> Tensor:
        scores = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        total = winner(scores, phi, entry.config.p).sum()
        return torch.autograd.grad(total, scores)[0]

    def slope(x: float) -> float:
        """Compute d ln g / d ln x from both sides."""
        step = 1e-4
        low, high = gradient([x * (1 - step), x * (1 + step)]).log().tolist()
        return (high - low) / math.log((1 + step) / (1 - step))

    far = FAR[phi.kernel or ""]
    values = [slope(far) / far, slope(far), slope(HIGHEST)]
    x = torch.logspace(-1, 5, 200, dtype=torch.float64).tolist()
    gradients = gradient(x)
    relative = gradients / gradients.max()
    return values, {"": (x, relative.tolist())}


# ---- LSSAR Sect. 2.1.2: entropy ----

QUERIES = 64
LENGTHS = tuple(2**i for i in range(7, 16, 2))


def random_entropy(entry: Entry) -> Values:
    """LSSAR Sect. 2.1.2: compute the mean entropy of weights over n keys, for normal q and k."""
    config = entry.config
    variant = VARIANTS[config.attention]
    attention = ReferenceAttention(variant, QUERIES, HEAD_SIZE, KEYS, p=config.p).double()
    generator = torch.Generator().manual_seed(config.seed)

    def normal(count: int) -> Tensor:
        return torch.randn(count, HEAD_SIZE, generator=generator, dtype=torch.float64)

    q = normal(QUERIES)
    k = normal(max(LENGTHS))
    means = []
    for n in LENGTHS:
        keys = k[:n].expand(1, QUERIES, n, HEAD_SIZE)
        weights = attention.weights(q[None, :, None], keys)  # [1, QUERIES, 1, n]
        means.append(torch.special.entr(weights).sum(-1).mean().item())
    slope = statistics.linear_regression([math.log(n) for n in LENGTHS], means).slope
    return [*means, slope], {"": (list(LENGTHS), means)}
