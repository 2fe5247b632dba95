"""What a model of orbits knows of Newton's law: LSSAR, section 3.4, Table 3, Figs. 1 and A7.

python -m scripts.physics RUN [RUN ...]

Two probes, each a fine-tuning of all weights under a new head, from the run's weights:

vectors     the force on each planet of the solar system, 10 positions of each orbit labelled
magnitudes  F = G m1 m2 / r^2 of two-body systems, 9 of 10 with all positions labelled, the others
            with two; then symbolic regression of F on r, m1 (planet) and m2 (star)

Both are judged at the positions without a label, after the last step. (The code of Vafa et al. 2025
chooses a checkpoint by a validation set that is the test set, unmasked.) --oracle averages the
nearest labelled states in place of the model. Writes RUN/physics.json, and draws forces.png in the
run's folder, or for several runs forces_RUN_RUN.png in the folder that contains them (or --out).
Nothing is measured twice.

Choices that the publications leave open: a planet of the solar system begins at its perihelion on
the x axis; its time step is a week for the four inner planets and half a year for the others; a
batch has at most as many sequences as there are; F is divided by the root of its mean square over
the labels. An interrupted fine-tuning begins anew.
"""

import copy
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn as nn
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

# for a script that is run as a file: the repository's modules are not beside it
sys.path.insert(0, str(Path(__file__).parents[1]))

from config import Config
from data.loader import epoch_order
from data.orbits import PAIRS, TIME_STEPS, Elements, Floats, G, draw_pair, simulated, tokenise
from optim import build_optimizers, build_scaler
from runtime.checkpoint import Training
from runtime.device import open_device
from scripts.common.options import EvaluationOptions, option
from scripts.common.papers import LSSAR
from scripts.common.runner import Evaluation, Results, Run, as_command, require
from scripts.common.tables import print_table
from train import Batch, is_finite_step, train_step

# Mass in solar masses, semi-major axis in AU, eccentricity.
SOLAR_SYSTEM = LSSAR["solar_system"]["rows"]
INNER = 4
# Labelled positions of a sequence: of a planet, and of one of the last two-body systems.
VECTOR_LABELS, MAGNITUDE_LABELS = 10, 2
# Learning rates over the learning rate of training: the published 2e-4 and 6e-4 over 6e-4.
LEARNING_RATES = {"vectors": 1 / 3, "magnitudes": 1.0}
NEIGHBOURS = {"vectors": 5, "magnitudes": 2}  # of the oracle
ARROWS = 40  # of a planet
# Symbolic regression: draws of SAMPLE of the NEAREST positions, each searched RESTARTS times.
NEAREST, DRAWS, SAMPLE, RESTARTS = 5000, 5, 1000, 3
MAX_NODES, ITERATIONS, NEGLIGIBLE = 20, 100, 1e-8
VARIABLES = ("r", "m1", "m2")
# pyoperon always fits an additive constant. Below this share of F's standard deviation the constant
# is not printed, and a law with it is still a law.
OFFSET = 0.01


@dataclass(frozen=True, kw_only=True)
class PhysicsOptions(EvaluationOptions):
    """What a model of orbits knows of Newton's law: LSSAR, section 3.4, Table 3, Figs. 1 and A7."""

    task = "orbits"

    steps: int = option(10_000, "of each fine-tuning", at_least=1)
    batch: int = option(64, "sequences of a step", at_least=1)
    pairs: int = option(10_000, "two-body systems; one of ten is judged", at_least=10)
    oracle: bool = option(False, "the nearest labels, not the model")


def identify(options: PhysicsOptions, config: Config) -> dict:
    require("physics", "sklearn", "pyoperon")
    return {name: getattr(options, name) for name in ("steps", "batch", "pairs", "oracle")}


def measure(options: PhysicsOptions, run: Run, probe: Callable[..., dict]) -> dict:
    return probe(run, options)


# ---- the labels ----


@dataclass(frozen=True)
class Task:
    """Sequences, and the force at the planets' positions: every other entry from the second on."""

    tokens: NDArray[np.uint16]  # [sequences, entries, 2]
    states: Floats  # [sequences, points, features] that determine the force
    forces: Floats  # [sequences, points, outputs]
    scale: Floats  # of the forces that the model predicts, broadcastable to them
    labelled: NDArray[np.bool_]  # [sequences, points]

    @property
    def targets(self) -> Floats:
        return self.forces / self.scale

    def standardised(self) -> Floats:
        """The states, scaled so that the labelled ones have mean 0 and variance 1."""
        from sklearn.preprocessing import StandardScaler

        scaler = StandardScaler().fit(self.states[self.labelled])
        flat = self.states.reshape(-1, self.states.shape[-1])
        return scaler.transform(flat).reshape(self.states.shape)


def label(
    systems: Sequence[Elements], config: Config, count: int
) -> tuple[NDArray[np.uint16], Floats, Floats, NDArray[np.bool_]]:
    """The tokens of systems of one planet, the vectors from star to planet [systems, points, 2],
    the masses of planet and star [systems, points, 2], and `count` random points of each system as
    labelled.

    The points are the points in time whose planet is within a sequence of block_size entries.
    """
    at = np.concatenate([group for _, group in simulated(systems, config.block_size)])
    points = at.shape[1]
    masses = np.stack([one.masses for one in systems])[:, None].repeat(points, axis=1)
    order = np.tile(np.arange(points), (len(systems), 1))
    labelled = np.random.default_rng(0).permuted(order, axis=1).argsort(axis=1) < count
    tokens = tokenise(systems, config.bins, config.block_size)
    return tokens, at[:, :, 0] - at[:, :, 1], masses, labelled


def vector_task(config: Config) -> Task:
    """The force on each planet of the solar system, each alone with the Sun.

    A planet begins at its perihelion. A sequence's scale is the largest component of its forces.
    """
    systems = [
        Elements(
            masses=np.array([mass, 1.0]), axes=np.array([axis]), eccentricities=np.array([e]),
            tilts=np.zeros(1), phases=np.zeros(1), centre=np.zeros(2),
            time_step=TIME_STEPS[number >= INNER],
        )
        for number, (mass, axis, e) in enumerate(SOLAR_SYSTEM.values())
    ]  # fmt: skip
    tokens, vectors, masses, labelled = label(systems, config, VECTOR_LABELS)
    distance = np.linalg.norm(vectors, axis=-1, keepdims=True)
    forces = -G * masses.prod(-1, keepdims=True) * vectors / distance**3
    scale = np.abs(forces).max(axis=1, keepdims=True)
    return Task(tokens, np.concatenate((vectors, masses), axis=-1), forces, scale, labelled)


def magnitude_task(config: Config, pairs: int) -> Task:
    """The force in two-body systems, all labelled but a tenth; its scale is its root mean square
    over the labels."""
    systems = [draw_pair(PAIRS, index) for index in range(pairs)]
    tokens, vectors, masses, labelled = label(systems, config, MAGNITUDE_LABELS)
    labelled[: pairs - pairs // 10] = True
    distance = np.linalg.norm(vectors, axis=-1, keepdims=True)
    forces = G * masses[..., :1] * masses[..., 1:] / distance**2
    scale = np.sqrt((forces[labelled] ** 2).mean(keepdims=True))
    return Task(tokens, np.concatenate((distance, masses), axis=-1), forces, scale, labelled)


# ---- the probes ----


def predict(run: Run, physics: PhysicsOptions, probe: str, task: Task) -> Floats:
    """The forces [sequences, points, outputs] at all points, by the model or the oracle."""
    if not physics.oracle:
        return finetune(run, physics, probe, task) * task.scale
    from sklearn.neighbors import KNeighborsRegressor

    states, known = task.standardised(), task.labelled
    nearest = KNeighborsRegressor(NEIGHBOURS[probe]).fit(states[known], task.targets[known])
    predicted = nearest.predict(states.reshape(-1, states.shape[-1]))
    return predicted.reshape(task.forces.shape) * task.scale


def finetune(run: Run, physics: PhysicsOptions, probe: str, task: Task) -> Floats:
    """Fine-tune a copy of the run's model on the labels; its outputs at all points, scaled.

    Raises RuntimeError where the loss or the gradient norm is not finite.
    """
    config = run.config.replace(
        learning_rate=LEARNING_RATES[probe] * run.config.learning_rate, min_lr=0.0,
        optimizer="adamw", dtype=str(run.dtype).removeprefix("torch."),
    )  # fmt: skip
    open_device(physics.device)  # with the float32 precision of training
    torch.manual_seed(config.seed)
    model, outputs = copy.deepcopy(run.model), task.forces.shape[-1]
    model.lm_head = nn.Linear(config.n_embd, outputs)
    nn.init.normal_(model.lm_head.weight, std=0.02)
    nn.init.zeros_(model.lm_head.bias)
    model.to(run.device).train()
    optimizers = build_optimizers(model, config)
    training = Training(model, run.dtype, optimizers, build_scaler(run.device, run.dtype))
    labels = np.where(task.labelled[..., None], task.targets, np.nan)
    x = torch.from_numpy(task.tokens).long().to(run.device)
    y = torch.from_numpy(labels).float().to(run.device)

    def squared_error(x: Tensor, y: Tensor) -> Tensor:
        return (model(x)[:, 1::2].float() - y)[~y.isnan()].square().sum()

    for step in tqdm(range(physics.steps), "fine-tuning", leave=False, disable=None):
        sequences = min(physics.batch, len(x))
        places = torch.from_numpy(epoch_order(step * sequences, sequences, len(x), config.seed))
        parts = [part[places].split(config.batch_size) for part in (x, y)]
        batch = Batch([*zip(*parts, strict=True)], int(task.labelled[places].sum()) * outputs, 0)
        loss, norm = train_step(training, squared_error, batch, config.grad_clip)
        if not is_finite_step(loss, norm, training.scaler):
            at = f"{run.path}: {probe} diverged at step {step + 1}"
            raise RuntimeError(f"{at}: loss {loss}, gradient {norm}")
    model.eval()
    with torch.no_grad(), run.autocast():
        predicted = [model(part)[:, 1::2].float().cpu() for part in x.split(config.batch_size)]
    return torch.cat(predicted).double().numpy()


def probe_vectors(run: Run, physics: PhysicsOptions) -> dict:
    """Cosine and relative error of each planet's forces without a label, and some arrows."""
    task = vector_task(run.config)
    predicted = predict(run, physics, "vectors", task)
    planets = {}
    for i, name in enumerate(SOLAR_SYSTEM):
        judged = ~task.labelled[i]
        a, b, at = predicted[i, judged], task.forces[i, judged], task.states[i, judged, :2]
        length, true_length, error = (np.linalg.norm(x, axis=-1) for x in (a, b, a - b))
        cosines = (a * b).sum(-1) / np.maximum(length * true_length, 1e-300)
        arrows = slice(None, None, -(-len(at) // ARROWS))
        planets[name] = {
            "cosine": float(cosines.mean()),
            "relative_error": float((error / true_length).mean()),
            "at": at[arrows].tolist(),
            "true": b[arrows].tolist(),
            "predicted": a[arrows].tolist(),
        }
    names = ("cosine", "relative_error")
    means = {name: float(np.mean([one[name] for one in planets.values()])) for name in names}
    return means | {"planets": planets}


def probe_magnitudes(run: Run, physics: PhysicsOptions) -> dict:
    """How the predicted F at positions without a label depends on r, m1 and m2."""
    from scipy.stats import spearmanr
    from sklearn.neighbors import NearestNeighbors

    task = magnitude_task(run.config, physics.pairs)
    judged = ~task.labelled
    predicted = predict(run, physics, "magnitudes", task)
    forces, true, states = predicted[judged, 0], task.forces[judged, 0], task.states[judged]
    positive = forces > 0
    design = np.column_stack((np.ones(positive.sum()), np.log(states[positive])))
    fit, *_ = np.linalg.lstsq(design, np.log(forces[positive]), rcond=None)
    scaled = task.standardised()
    distance, _ = NearestNeighbors(n_neighbors=1).fit(scaled[~judged]).kneighbors(scaled[judged])
    nearest = np.argsort(distance[:, 0], kind="stable")[:NEAREST]
    return {
        "rank_correlation": float(spearmanr(forces, true).statistic),
        "median_relative_error": float(np.median(np.abs(forces - true) / true)),
        "exponents": dict(zip(VARIABLES, fit[1:].tolist(), strict=True)),
        "positive": float(positive.mean()),
        "positions": len(forces),
        "engine": f"pyoperon {importlib.metadata.version('pyoperon')}",
        "laws": find_laws(states[nearest], forces[nearest], run.config.seed),
    }


# ---- symbolic regression ----


class Equation(NamedTuple):
    """A candidate: its nodes, its mean loss, and the formula as sympy reads it."""

    nodes: int
    loss: float
    formula: str


def find_laws(states: Floats, forces: Floats, seed: int) -> list[dict]:
    """The equation of best score for F, in each draw from these states [positions, (r, m1, m2)]."""
    rng, laws = np.random.default_rng(seed), []
    for _ in tqdm(range(DRAWS), desc="symbolic regression", unit="draw"):
        sample = rng.choice(len(forces), min(SAMPLE, len(forces)), replace=False)
        x, y = states[sample], forces[sample]
        seeds = rng.integers(2**31, size=RESTARTS).tolist()
        best = best_score([one for seed in seeds for one in search(x, y, seed)])
        laws.append({"nodes": best.nodes, "loss": best.loss} | law(best.formula, y.std()))
    return laws


def loss(predicted: Floats, true: Floats) -> float:
    """The published loss: the mean absolute error, where errors up to 1e-8 count as 0."""
    return float((np.maximum(NEGLIGIBLE, np.abs(predicted - true)) - NEGLIGIBLE).mean())


def best_score(candidates: Sequence[Equation]) -> Equation:
    """The equation with the largest drop of log loss per node, on the Pareto front."""
    front: list[Equation] = []
    for one in sorted(candidates, key=lambda one: (one.nodes, one.loss)):
        if not front or one.loss < front[-1].loss:
            front.append(one)
    if len(front) == 1:
        return front[0]
    drops = -np.diff(np.log([max(one.loss, 1e-300) for one in front]))
    return front[1 + int(np.argmax(drops / np.diff([one.nodes for one in front])))]


def search(x: Floats, y: Floats, seed: int) -> list[Equation]:
    """The Pareto front of a search; 1/x is a quotient, and the factor of a variable is no node."""
    from pyoperon.sklearn import SymbolicRegressor

    scale, middle = float(y.std()), float(np.median(y))
    found = SymbolicRegressor(
        allowed_symbols="add,mul,div,sin,cos,exp,constant,variable",
        objectives=["mae", "length"], max_length=MAX_NODES, generations=ITERATIONS,
        population_size=1000, max_evaluations=10**9, random_state=seed,
    ).fit(x, y / scale)  # fmt: skip
    front = []
    for one in found.pareto_front_:
        predicted = found.evaluate_model(one["tree"], x) * scale
        if one["variables"] and np.isfinite(predicted).all():
            text = found.get_model_string(one["tree"], 12, list(VARIABLES))
            front.append(Equation(one["length"], loss(predicted, y), f"{scale!r}*({text})"))
        elif not one["variables"]:
            front.append(Equation(1, loss(np.full_like(y, middle), y), f"{middle!r}"))
    return front


def law(formula: str, deviation: float) -> dict[str, Any]:
    """The equation as text, and the powers and the factor of a product of powers, else None."""
    import sympy

    expression = sympy.sympify(formula)
    constant, rest = expression.as_coeff_Add()
    if rest.free_symbols and abs(float(constant)) < OFFSET * deviation:
        expression = rest
    factor, product = expression.as_coeff_Mul()
    powers, symbols = product.as_powers_dict(), sympy.symbols(VARIABLES)
    is_product = all(base in symbols and power.is_number for base, power in powers.items())
    short = {number: sympy.Float(number, 4) for number in expression.atoms(sympy.Float)}
    return {
        "equation": str(expression.xreplace(short)).replace("**", "^"),
        "powers": [float(powers[symbol]) for symbol in symbols] if is_product else None,
        "factor": float(factor) if is_product else None,
    }


PROBES = {"vectors": probe_vectors, "magnitudes": probe_magnitudes}


# ---- the numbers and the picture ----


def show(physics: PhysicsOptions, results: Results) -> dict[str, Figure]:
    """Print the numbers of every run, and draw the forces of all."""
    columns = ("cosine", "relative_error", "rank_correlation", "median_relative_error", "positive")
    table = [["", *(column.replace("_", " ") for column in columns), *VARIABLES]]
    for name, measured in results.items():
        numbers = measured["parts"]["vectors"] | measured["parts"]["magnitudes"]
        values = (*map(numbers.get, columns), *numbers["exponents"].values())
        table.append([name, *(f"{value:.3f}" for value in values)])
        for found in numbers["laws"]:
            print(f"{name}, law by {numbers['engine']}: F = {found['equation']}")
    print_table(table)
    return {"oracle" if physics.oracle else "forces": plot_forces(results)}


def plot_forces(results: Results) -> Figure:
    """Figs. 1 and A7: a line for each planet, with the true forces and each run's."""
    runs = {name: measured["parts"]["vectors"]["planets"] for name, measured in results.items()}
    truths = next(iter(runs.values()))
    lines, columns = len(truths), 1 + len(runs)
    figure = Figure(figsize=(2.2 * columns + 0.4, 2.2 * lines + 0.4), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for line, (planet, truth) in zip(axes, truths.items(), strict=True):
        at = np.array(truth["at"])
        size, length = np.abs(at).max(), np.linalg.norm(truth["true"], axis=-1).max()
        every = [truth["true"], *(one[planet]["predicted"] for one in runs.values())]
        for axis, forces in zip(line, every, strict=True):
            axis.quiver(
                *at.T, *np.array(forces).T, angles="xy", scale_units="xy",
                scale=length / (0.6 * size), width=0.008, color="C0" if axis is line[0] else "C1",
            )  # fmt: skip
            axis.plot(0, 0, "o", color="goldenrod", markersize=5)
            limits = (-1.25 * size, 1.25 * size)
            axis.set(xlim=limits, ylim=limits, aspect="equal", xticks=[], yticks=[])
        line[0].set_ylabel(planet)
    for axis, name in zip(axes[0], ("true", *runs), strict=True):
        axis.set_title(name, fontsize="medium")
    return figure


PHYSICS = Evaluation(
    name="physics",
    options=PhysicsOptions,
    identify=identify,
    chunks=lambda options, config: PROBES,
    measure=measure,
    show=show,
)
main = as_command(PHYSICS)

if __name__ == "__main__":
    main()
