"""Figures that take no evaluation: from the formulas alone, or from the files of finished runs."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from attention import VARIANTS, Attention, Phi, l1_normalise
from config import Config, load_config
from errors import UserError
from runtime import checkpoint
from runtime.device import environment
from runtime.files import read_json
from scripts.common.papers import LSSAR, SSMAX
from scripts.common.plots import length_axis, one_panel, panels, row_style
from scripts.curves import read_metrics
from scripts.physics import plot_forces
from scripts.reproduce.report import first_seed, first_seeds, with_seed
from scripts.reproduce.training import PlannedRun, Work, find_row
from scripts.sparsity import plot_positive

# A curve's x and y, by name.
Curves = dict[str, tuple[list[float], list[float]]]


@dataclass(frozen=True)
class Formula:
    """Numbers that follow from the formulas of attention.py: nothing is trained."""

    keys: tuple[str, ...]
    compute: Callable[[str], tuple[list[float], Curves]]  # of a row: its columns, its curves
    better: str | None = None
    digits: int = 4

    trained, compare = False, "difference"

    def check(self, work: Work) -> None:
        pass

    def columns(self, config: Config) -> tuple:
        return self.keys

    def notes(self, config: Config) -> tuple[str, ...]:
        return ()

    def plan(self, work: Work) -> str:
        return "to compute: seconds"

    def measure(self, work: Work) -> list[str]:
        return []

    def results(self, work: Work, row: str) -> list[dict]:
        values, curves = self.compute(row)
        here = environment()
        evaluation = {"dtype": "float64", "environment": here, "curves": curves}
        return [{"seed": None, "values": values, "environment": here, "evaluation": evaluation}]


@dataclass(frozen=True)
class RunFiles:
    """Numbers that the files of a finished run have, such as metrics.jsonl."""

    keys: tuple[str, ...]
    # of a run, and of the same seed's softmax: its columns and its curves
    read: Callable[[PlannedRun, PlannedRun], tuple[list[float], Curves]]
    better: str | None = None
    digits: int = 4
    against_softmax: bool = False  # a row needs softmax's run of the same seed

    trained, compare = True, "difference"

    def check(self, work: Work) -> None:
        """Raise UserError for rows that have no softmax run to be compared with."""
        if not self.against_softmax or "softmax" in work.rows:
            return
        for seed in work.seeds:
            if not (softmax := work.scale.run("softmax", seed)).finished:
                raise UserError(
                    f"--only {','.join(work.rows)}: rows are compared with softmax, and "
                    f"{softmax.folder} is not finished: add softmax"
                )

    def columns(self, config: Config) -> tuple:
        return self.keys

    def notes(self, config: Config) -> tuple[str, ...]:
        return ()

    def plan(self, work: Work) -> str:
        return "to evaluate: nothing, the runs' own files have it"

    def measure(self, work: Work) -> list[str]:
        return []

    def results(self, work: Work, row: str) -> list[dict]:
        results = []
        for seed in work.seeds:
            run, softmax = work.scale.run(row, seed), work.scale.run("softmax", seed)
            needed = [run, softmax] if self.against_softmax else [run]
            if all(one.finished and not one.disagreement() for one in needed):
                values, curves = self.read(run, softmax)
                made = read_json(run.folder / "environment.json")
                results.append(run.entry(values, {"environment": made, "curves": curves}))
        return results


# ---- from the formulas ----


def last_row(variant: str, scores: Tensor, p: float | None = None, s: float = 1.0) -> Tensor:
    """The weights of a row of attention over keys of these scores q . k / sqrt(d): [n]."""
    attention = Attention(
        VARIANTS[variant], p=p, n_head=1, head_size=1, trained_length=1024, follow_length=False,
        impl="reference", s_init=s, b_init=0.0, gamma=1.0,
    ).to(scores.dtype)  # fmt: skip
    query = torch.ones(1, 1, 1, 1, dtype=scores.dtype)
    return attention.weights(query, scores[None, None, :, None])[0, 0, 0].detach()


SIZES = tuple(2**i for i in range(4, 14, 3))  # of input vectors; the paper names none
FADING = SSMAX["figure1"]


def attention_fading(row: str) -> tuple[list[float], Curves]:
    """SSMax Fig. 1: the largest of n weights, of one higher score among n - 1 equal ones."""
    largest = {}
    for n in (2**i for i in range(1, 14)):
        scores = torch.full((n,), FADING["others"], dtype=torch.float64)
        scores[-1] = FADING["last"]
        largest[n] = last_row(row, scores, s=FADING["s"])[-1].item()
    return [largest[n] for n in SIZES], {"": (list(largest), list(largest.values()))}


FOCUS = {"softmax": ("softmax", 1.0), "ssmax (s = 0.43)": ("ssmax", 0.43)} | {
    "ssmax (s = 1)": ("ssmax", 1.0)
}

# The paper's rule: 1 / s above the others, of which the highest is 1.
FOCUS_RULE = {
    "columns": [f"n = {n:,}" for n in SIZES],
    "rows": {
        row: [1 + 1 / s] * len(SIZES) for row, (variant, s) in FOCUS.items() if variant == "ssmax"
    },
}


def attention_focus(row: str) -> tuple[list[float], Curves]:
    """SSMax Fig. 3: the weight of z_max, over z_max; the columns are z_max at a weight of 1/2."""
    variant, s = FOCUS[row]
    tops = torch.arange(0, 12, 0.05, dtype=torch.float64)
    values, curves = [], {}
    for n in SIZES:
        others = torch.arange(n - 1, dtype=torch.float64) / (n - 2)
        weights = [last_row(variant, torch.cat((others, top[None])), s=s)[-1] for top in tops]
        above = next(i for i, weight in enumerate(weights) if weight > 0.5)
        low, high = weights[above - 1 : above + 1]
        values.append((tops[above] - 0.05 * (high - 0.5) / (high - low)).item())
        curves[f"n = {n:,}"] = (tops.tolist(), [weight.item() for weight in weights])
    return values, curves


KEYS, HEAD_SIZE = 1024, 64  # the LSSAR paper's
# The highest score that LSSA can have there: log d log n, of a cosine of 1.
HIGHEST = math.log(HEAD_SIZE) * math.log(KEYS)
# Where a gradient has its asymptotic slope, as far as float64 has it.
FAR = {"exp": 25.0, "softplus": 1e9}


def winner(x: Tensor, phi: Phi, p: float | None) -> Tensor:
    """y of LSSAR's (A6), for a score x [m] among KEYS - 1 scores of 0: stage 2 without its l1."""
    scores = torch.cat((x[:, None], x.new_zeros(len(x), KEYS - 1)), dim=1)
    if phi.shift is not None:
        scores = scores + phi.shift(scores.detach().amax(-1, keepdim=True))
    a = l1_normalise(phi.function(scores))[:, 0]
    return a if p is None else (KEYS * a - 1).relu().pow(p)


def gradient_slopes(row: str) -> tuple[list[float], Curves]:
    """LSSAR Appendix A.6: how the gradient of the winner's weight decays in its score."""
    config = load_config([str(find_row(row).file)])
    phi, p = VARIANTS[config.attention].phi, config.p

    def gradient(x: list[float]) -> Tensor:
        scores = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(winner(scores, phi, p).sum(), scores)[0]

    def slope(x: float) -> float:
        """d ln g / d ln x, from both sides."""
        step = 1e-4
        low, high = gradient([x * (1 - step), x * (1 + step)]).log().tolist()
        return (high - low) / math.log((1 + step) / (1 - step))

    far = FAR[phi.kernel or ""]
    xs = torch.logspace(-1, 5, 200, dtype=torch.float64).tolist()
    return [slope(far) / far, slope(far), slope(HIGHEST)], {"": (xs, gradient(xs).tolist())}


QUERIES, LENGTHS = 64, tuple(2**i for i in range(7, 16, 2))


def random_entropy(row: str) -> tuple[list[float], Curves]:
    """The entropy of a row's weights over n keys, where q and k are normal: means over queries."""
    config = load_config([str(find_row(row).file)])
    attention = Attention(
        VARIANTS[config.attention], p=config.p, n_head=QUERIES, head_size=HEAD_SIZE,
        trained_length=KEYS, follow_length=False, impl="reference", s_init=1.0, b_init=0.0,
        gamma=1.0,
    ).double()  # fmt: skip
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


def entropies(measured: dict) -> tuple[list[int], list[float]]:
    """Of scripts.attention_maps: keys of each group of rows, and their entropy, mean over heads."""
    columns = zip(*measured["groups"]["entropy"], strict=True)
    known = [[value for value in column if value is not None] for column in columns]
    return measured["keys"], [statistics.mean(column) for column in known]


# ---- from the files of runs ----


def learned_p(run: PlannedRun, softmax: PlannedRun) -> tuple[list[float], Curves]:
    """SSMax Fig. 2: p_n after training, and a_1 log n + a_2 by least squares.

    n = 1 is left out: a row of one key has weight 1 whatever p_1 is, so that p_1 is not trained.
    """
    weights = checkpoint.newest(run.folder)
    assert weights is not None
    model = checkpoint.load(weights.path, checkpoint.Weights).model
    p_n = next(value for name, value in model.items() if name.endswith(".p_n"))[1:].tolist()
    sizes = [float(n) for n in range(2, len(p_n) + 2)]
    logs = [math.log(n) for n in sizes]
    a_1, a_2 = statistics.linear_regression(logs, p_n)
    fit = [a_1 * log + a_2 for log in logs]
    explained = 1 - statistics.variance(
        [p - f for p, f in zip(p_n, fit, strict=True)]
    ) / statistics.variance(p_n)
    return [a_1, a_2, explained], {"p_n": (sizes, p_n), "fit": (sizes, fit)}


def read_metric(folder: Path, key: str) -> dict[int, float]:
    """The values of a key of metrics.jsonl, by step. Raises UserError where there are none."""
    values = {int(step["step"]): step[key] for step in read_metrics(folder) if key in step}
    if not values:
        raise UserError(f"{folder}: its metrics.jsonl has no {key} of any step")
    return values


LAST = 10  # a curve's end is the mean over the last tenth of its steps
BINS = 100  # points of a curve


def binned(
    values: dict[int, float], summary: Callable[[list[float]], float] = statistics.mean
) -> tuple[list[float], list[float]]:
    """At most BINS points: in each bin of steps, the last step and the values' summary."""
    steps = sorted(values)
    size = -(-len(steps) // BINS)
    bins = [steps[i : i + size] for i in range(0, len(steps), size)]
    return [float(part[-1]) for part in bins], [
        summary([values[step] for step in part]) for part in bins
    ]


def learning_curve(run: PlannedRun, softmax: PlannedRun) -> tuple[list[float], Curves]:
    """SSMax Fig. 4: the training loss, and what it is above softmax's on the same batches."""
    losses, baseline = (read_metric(one.folder, "loss") for one in (run, softmax))
    differences = {step: losses[step] - baseline[step] for step in losses.keys() & baseline.keys()}
    steps = sorted(differences)
    last = steps[-max(1, len(steps) // LAST) :]
    values = [statistics.mean(source[step] for step in last) for source in (losses, differences)]
    return values, {"loss": binned(losses), "difference": binned(differences)}


def gradient_norms(run: PlannedRun, softmax: PlannedRun) -> tuple[list[float], Curves]:
    """LSSAR Appendix B.1.4: the gradient norm after the warm-up, before it is clipped."""
    norms = read_metric(run.folder, "grad_norm")
    after = [norm for step, norm in norms.items() if step > run.config.warmup_iters]
    after = after or list(norms.values())
    clipped = sum(norm > run.config.grad_clip > 0 for norm in after) / len(after)
    values = [statistics.median(after), max(after), clipped]
    return values, {"median": binned(norms, statistics.median), "highest": binned(norms, max)}


# ---- pictures ----


def curves_of(table: dict) -> dict[str, Curves]:
    """Row -> the curves of its first seed."""
    return {name: evaluation["curves"] for name, evaluation in first_seeds(table).items()}


def line(i: int) -> dict:
    return row_style(i) | {"marker": ""}


def legend(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def draw_fading(table: dict) -> dict[str, Figure]:
    figure, axes = one_panel()
    for i, (name, curves) in enumerate(curves_of(table).items()):
        axes.plot(*curves[""], label=name, **row_style(i))
    axes.set_xscale("log", base=2)
    axes.set_ylim(-0.03, 1.03)
    axes.set_xlabel("size n of the input vector")
    axes.set_ylabel("largest weight")
    legend(axes)
    return {f"{table['name']}.png": figure}


def draw_focus(table: dict) -> dict[str, Figure]:
    figure, axes = one_panel()
    for i, (name, curves) in enumerate(curves_of(table).items()):
        for (size, points), style in zip(curves.items(), ("-", "--", "-.", ":"), strict=False):
            axes.plot(*points, color=f"C{i}", linestyle=style, label=f"{name}, {size}")
    axes.set_xlabel("z_max; the other n - 1 scores are spread evenly from 0 to 1")
    axes.set_ylabel("weight of z_max")
    axes.grid(alpha=0.3)
    figure.set_figwidth(9)
    figure.legend(loc="outside right center", fontsize="small")
    return {f"{table['name']}.png": figure}


def draw_gradients(table: dict) -> dict[str, Figure]:
    figure, axes = one_panel()
    for i, (name, curves) in enumerate(curves_of(table).items()):
        xs, ys = curves[""]
        top = max(ys)
        axes.plot(xs, [y / top for y in ys], label=name, **line(i))
    axes.axvline(HIGHEST, color="0.6", linestyle=":", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(1e-9, 3)
    axes.set_xlabel("score x of the winner (dotted: the highest of LSSA, log d log n)")
    axes.set_ylabel("gradient dy / dx over its highest value")
    legend(axes)
    return {f"{table['name']}.png": figure}


def draw_random_entropy(table: dict) -> dict[str, Figure]:
    figure, axes = one_panel()
    for i, (name, curves) in enumerate(curves_of(table).items()):
        axes.plot(*curves[""], label=name, **row_style(i))
    equal = [math.log(n) for n in LENGTHS]
    axes.plot(LENGTHS, equal, color="0.3", linestyle="--", label="equal weights")
    axes.set_xscale("log", base=2)
    axes.set_xticks(LENGTHS, [f"{n:,}" for n in LENGTHS])
    axes.minorticks_off()
    axes.set_xlabel("keys n of a row")
    axes.set_ylabel("entropy of the weights (nats)")
    legend(axes)
    return {f"{table['name']}.png": figure}


def draw_entropies(table: dict) -> dict[str, Figure]:
    figure, axes = one_panel()
    rows = first_seeds(table)
    for i, (name, measured) in enumerate(rows.items()):
        axes.plot(*entropies(measured), label=name, **row_style(i))
    keys = measured["keys"]
    equal = [math.log(n) for n in keys]
    axes.plot(keys, equal, color="0.3", linestyle="--", label="equal weights, n keys")
    length_axis(axes, "keys n of a row, up to", [measured["trained_length"]])
    axes.set_ylabel("entropy of the weights (nats)")
    axes.set_title(f"seed {first_seed(table)}, {table['scale']}", fontsize="medium")
    legend(axes)
    return {f"{table['name']}.png": figure}


def draw_sparsity(table: dict) -> dict[str, Figure]:
    rows = first_seeds(table)
    figure = plot_positive(list(rows), list(rows.values()))
    return {f"{table['name']}.png": with_seed(figure, table)}


def draw_p(table: dict) -> dict[str, Figure]:
    figure, axes = one_panel()
    for name, row in table["rows"].items():
        a_1, a_2, explained = row["runs"][0]["values"]
        curves = curves_of(table)[name]
        axes.plot(*curves["p_n"], "o", color="C3", markersize=2, label="p_n after training")
        fit = f"{a_1:.4f} log n {'+' if a_2 >= 0 else '-'} {abs(a_2):.4f}, R² = {explained:.3f}"
        axes.plot(*curves["fit"], color="C0", label=fit)
    axes.set_xlabel("input vector size n")
    axes.set_ylabel("p_n")
    axes.set_title(f"seed {row['runs'][0]['seed']}, {table['scale']}", fontsize="medium")
    legend(axes)
    return {f"{table['name']}.png": figure}


def draw_learning_curves(table: dict) -> dict[str, Figure]:
    figure, (losses, differences) = panels(2)
    for i, (name, curves) in enumerate(curves_of(table).items()):
        losses.plot(*curves["loss"], label=name, **line(i))
        if name != "softmax":
            differences.plot(*curves["difference"], label=name, **line(i))
    ((_, reduction),) = SSMAX["figure4"]["rows"].values()
    differences.axhline(
        reduction, color="0.4", linestyle="--", label=f"the paper's ssmax: {reduction}"
    )
    differences.axhline(0, color="0.6", linewidth=1)
    losses.set_ylabel("training loss (nats per token)")
    differences.set_ylabel("training loss minus softmax's, same batches")
    for axes in (losses, differences):
        axes.set_xlabel("step")
        legend(axes)
    figure.suptitle(f"seed {first_seed(table)}, {table['scale']}", fontsize="medium")
    return {f"{table['name']}.png": figure}


def draw_gradient_norms(table: dict) -> dict[str, Figure]:
    figure, axes = one_panel()
    for i, (name, curves) in enumerate(curves_of(table).items()):
        steps, highest = curves["highest"]
        axes.plot(*curves["median"], label=name, **line(i))
        axes.fill_between(steps, curves["median"][1], highest, color=f"C{i}", alpha=0.15)
    axes.set_yscale("log")
    axes.set_xlabel("step (shaded: up to the highest of the steps between two points)")
    axes.set_ylabel("gradient norm before clipping")
    axes.set_title(f"seed {first_seed(table)}, {table['scale']}", fontsize="medium")
    legend(axes)
    return {f"{table['name']}.png": figure}


# ---- Newton's law ----

# The columns of Table 3: what is better, and the truth.
PHYSICS: dict[str, tuple[str | None, float | None]] = {
    "cosine": ("higher", 1), "error": ("lower", 0), "rank correlation": ("higher", 1),
    "median error": ("lower", 0), "above 0": ("higher", 1), "exponent of r": (None, -2),
    "of m1": (None, 1), "of m2": (None, 1), "m1 m2 / r^2 found": ("higher", 5),
    "m1 / r^2 found": (None, None),
}  # fmt: skip
LAWS = {"m1 m2 / r^2": [-2.0, 1.0, 1.0], "m1 / r^2": [-2.0, 1.0, 0.0]}  # powers of r, m1 and m2


def draw_physics(table: dict) -> dict[str, Figure]:
    """A panel for each column: every seed of every row; dashed: the truth."""
    names, columns = list(table["rows"]), table["columns"]
    figure = Figure(figsize=(13, 2 * (1.2 + 0.3 * len(names))), layout="constrained")
    axes = figure.subplots(2, -(-len(columns) // 2), sharey=True)
    for i, (column, ax) in enumerate(zip(columns, axes.flat, strict=False)):
        for y, row in enumerate(table["rows"].values()):
            values = [run["values"][i] for run in row["runs"]]
            ax.plot(values, [y] * len(values), "o", color="C0", alpha=0.6)
        if (truth := PHYSICS[column][1]) is not None:
            ax.axvline(truth, color="C2", linestyle="--", linewidth=1)
        if column.endswith("found"):
            ax.set_xlim(-0.4, 5.4)  # of five draws
        ax.set_xlabel(column, fontsize="small")
        ax.grid(alpha=0.3)
    for ax in axes.flat[len(columns) :]:
        ax.axis("off")
    axes[0, 0].set_yticks(range(len(names)), names)
    axes[0, 0].set_ylim(len(names) - 0.5, -0.5)
    figure.suptitle(f"{table['title']}, scale {table['scale']}; a dot for each seed", fontsize=11)
    return {f"{table['name']}.png": figure}


def draw_forces(table: dict) -> dict[str, Figure]:
    """Figs. 1 and A7: the Earth, and the other planets."""
    rows = {n: one["parts"]["vectors"]["planets"] for n, one in first_seeds(table).items()}
    earth = {name: {"Earth": planets["Earth"]} for name, planets in rows.items()}
    others = {
        name: {planet: one for planet, one in planets.items() if planet != "Earth"}
        for name, planets in rows.items()
    }
    return {"earth.png": plot_forces(earth), "planets.png": plot_forces(others)}


def what_was_found(table: dict) -> list[str]:
    """The paper's laws, the validation loss of each run, and every draw's equation."""
    paper = {name: law for name, (law, *_) in LSSAR["table3"]["rows"].items()}
    constants = {name: row[1] for name, row in LSSAR["table3"]["rows"].items()}
    printed = (
        f"{name} {'' if constants[name] is None else f'{constants[name]:g} '}{law}"
        for name, law in paper.items()
    )
    losses, equations = [], []
    for name, row in table["rows"].items():
        evaluated = [run["evaluation"] for run in row["runs"]]
        for run, parts in zip(row["runs"], (one["parts"] for one in evaluated), strict=True):
            laws = parts["laws"]
            found = "; ".join(f"`{draw['equation']}`" for draw in laws["draws"])
            equations.append(f"`{name}`, seed {run['seed']}, by {laws['engine']}: {found}.")
        if not evaluated[0]["oracle"]:
            read = (read_metric(Path(run["run"]), "val_loss") for run in row["runs"])
            losses.append(f"`{name}` " + ", ".join(f"{loss[max(loss)]:.3f}" for loss in read))
    return [
        f"The paper's Table 3: {'; '.join(printed)}.",
        "Validation loss before fine-tuning (nats per coordinate), by seed: "
        f"{'; '.join(losses) or 'no model'}.",
        *equations,
    ]
