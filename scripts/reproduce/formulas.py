"""Numbers that take no evaluation: from the formulas of attention.py, or from the files of runs."""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from attention import VARIANTS, Phi, l1_normalise
from attention_paths.reference import ReferenceAttention
from config import load_config
from errors import UserError
from runtime import checkpoint
from runtime.log import read_metrics
from scripts.common.papers import SSMAX
from scripts.common.planned import PlannedRun
from scripts.reproduce.measure import Values
from scripts.reproduce.rows import find_row

# ---- from the formulas ----

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
    "rows": {
        name: [1 + 1 / s] * len(SIZES) for name, (variant, s) in FOCUS.items() if variant == "ssmax"
    },
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


KEYS, HEAD_SIZE = 1024, 64  # the LSSAR paper's
# The highest score of LSSA there: log d log n, of a cosine of 1.
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
    config = load_config([str(find_row(name).file)])
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
    """The entropy of the weights over n keys for normal q and k: means over queries."""
    config = load_config([str(find_row(name).file)])
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
    return [*means, log_slope(LENGTHS, means)], {"": (list(LENGTHS), means)}


def log_slope(lengths: Sequence[float], values: Sequence[float]) -> float:
    """The slope of values over the logarithm of lengths, by least squares."""
    return statistics.linear_regression([math.log(n) for n in lengths], values).slope


def entropies(measured: dict) -> tuple[list[float], list[float]]:
    """Of attention_maps: the keys of each group of queries, and their entropy, mean over heads."""
    columns = zip(*measured["groups"]["entropy"], strict=True)
    known = [[value for value in column if value is not None] for column in columns]
    return measured["keys"], [statistics.mean(column) for column in known]


# ---- from the files of runs ----


def learned_p(run: PlannedRun) -> Values:
    """SSMax Fig. 2: p_n after training, and a_1 log n + a_2 by least squares.

    n = 1 is left out: a single key has weight 1 whatever p_1 is, so that p_1 is not trained.
    """
    model = checkpoint.load(checkpoint.find(run.folder).path).model
    p_n = next(value for name, value in model.items() if name.endswith(".p_n"))[1:].tolist()
    sizes = [float(n) for n in range(2, len(p_n) + 2)]
    logs = [math.log(n) for n in sizes]
    a_1, a_2 = statistics.linear_regression(logs, p_n)
    return [a_1, a_2, statistics.correlation(logs, p_n) ** 2], {"": (sizes, p_n)}


def metric(folder: Path, key: str) -> dict[int, float]:
    """The values of a key of metrics.jsonl, by step."""
    values = {int(line["step"]): line[key] for line in read_metrics(folder) if key in line}
    if not values:
        raise UserError(f"{folder}: its metrics.jsonl has no {key} of any step")
    return values


LAST = 10  # the end of a curve is the mean over the last tenth of its steps
BINS = 100  # points of a curve


def binned(values: dict[int, float], summary: Callable = statistics.mean) -> tuple[list, list]:
    """At most BINS points: in each bin of steps, the last step and a summary of the values."""
    steps = sorted(values)
    size = -(-len(steps) // BINS)
    bins = [steps[i : i + size] for i in range(0, len(steps), size)]
    return [float(part[-1]) for part in bins], [summary([values[s] for s in part]) for part in bins]


def learning_curve(run: PlannedRun, softmax: PlannedRun) -> Values:
    """SSMax Fig. 4: the training loss, and its difference from softmax on the same batches."""
    losses, baseline = (metric(one.folder, "loss") for one in (run, softmax))
    differences = {step: losses[step] - baseline[step] for step in losses.keys() & baseline.keys()}
    steps = sorted(differences)
    last = steps[-max(1, len(steps) // LAST) :]
    values = [statistics.mean(source[step] for step in last) for source in (losses, differences)]
    return values, {"loss": binned(losses), "loss minus softmax's": binned(differences)}


def gradient_norms(run: PlannedRun) -> Values:
    """LSSAR Appendix B.1.4: the gradient norm after the warm-up, before it is clipped."""
    norms = metric(run.folder, "grad_norm")
    after = [norm for step, norm in norms.items() if step > run.config.warmup_iters]
    after = after or list(norms.values())
    clipped = sum(norm > run.config.grad_clip > 0 for norm in after) / len(after)
    values = [statistics.median(after), max(after), clipped]
    return values, {"median": binned(norms, statistics.median), "highest": binned(norms, max)}
