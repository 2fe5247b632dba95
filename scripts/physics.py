"""What a model of orbits knows of Newton's law: LSSAR, section 3.4, Table 3, Figs. 1 and A7.

python -m scripts.physics RUN [RUN ...]

Two probes fine-tune all weights under a new head, each from the run's weights:

vectors     the force on each planet of the solar system; 10 positions of each orbit are labelled
magnitudes  F = G m1 m2 / r^2 of two-body systems; 9 systems of 10 have labels at all positions, the
            last tenth at two; then symbolic regression of F on r, m1 (planet) and m2 (star)

Both are judged at the positions without a label, after the last step. (The code of Vafa et al. 2025
chooses a checkpoint by a validation set that is the test set, unmasked.) --oracle averages the
nearest labelled states instead of asking the model. Writes physics.json and forces.png, or
oracle.png.

The publications leave some choices open. Here a planet of the solar system begins at its perihelion
on the x axis; its time step is a week for the four inner planets and half a year for the outer
ones; a batch has at most as many sequences as there are; F is divided by the root of its mean
square over the labels. An interrupted fine-tuning begins anew.
"""

import copy
import importlib.metadata
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.nn as nn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from tqdm import trange

from config import Config, PositiveInt
from data.loader import epoch_order
from data.orbits import PAIRS, TIME_STEPS, Elements, Floats, G, draw_pair, positions, tokenise
from errors import UserError
from model import GPT
from optim import build_optimizers, build_scaler
from runtime.checkpoint import Training
from runtime.device import open_device
from scripts.common.command_line import option, require
from scripts.common.papers import LSSAR
from scripts.common.runner import Evaluation, Results, as_command
from scripts.common.runs import Run
from scripts.common.tables import print_table
from train import StepBatch, may_continue, train_step

# Mass in solar masses, semi-major axis in AU, eccentricity.
SOLAR_SYSTEM = LSSAR["solar_system"]["rows"]
INNER_PLANETS = 4
WEEK, HALF_YEAR = TIME_STEPS
# Labelled positions of a planet, and of each two-body system of the last tenth.
VECTOR_LABELS = 10
MAGNITUDE_LABELS = 2
# Learning rates over the learning rate of training: the published 2e-4 and 6e-4 over 6e-4.
LEARNING_RATES = {"vectors": 1 / 3, "magnitudes": 1.0}
NEIGHBOURS = {"vectors": 5, "magnitudes": 2}  # of the oracle
ARROWS = 40  # of a planet
# Symbolic regression: draws of SAMPLE of the NEAREST positions, each searched RESTARTS times.
NEAREST = 5000
DRAWS = 5
SAMPLE = 1000
RESTARTS = 3
NEGLIGIBLE = 1e-8  # an error that counts as 0
SMALLEST = 1e-300  # instead of 0 in a denominator or a logarithm
VARIABLES = ("r", "m1", "m2")
COLUMNS = ("cosine", "relative_error", "rank_correlation", "median_relative_error", "positive")
# pyoperon always fits an additive constant. Below this share of F's standard deviation the constant
# is not printed, and a law with it is still a law.
OFFSET = 0.01


# ---- the labels ----


@dataclass(frozen=True)
class Task:
    """Sequences of one planet, and the force on it at all points in time."""

    tokens: NDArray[np.uint16]  # [sequences, entries, 2]
    states: Floats  # [sequences, points, features] that determine the force
    forces: Floats  # [sequences, points, outputs]
    scale: Floats  # the model's targets are forces / scale
    labelled: NDArray[np.bool_]  # [sequences, points]

    @property
    def targets(self) -> Floats:
        return self.forces / self.scale


def two_body_states(systems: Sequence[Elements], config: Config) -> tuple[Floats, Floats]:
    """Vectors from star to planet, and masses of planet and star: both [systems, points, 2].

    The points are the points in time whose planet is within a sequence of block_size entries.
    """
    points = config.block_size // 2  # half of the entries after the time step, rounded up
    at = np.stack([positions(system, points) for system in systems])
    vectors = at[:, :, 0] - at[:, :, 1]  # [systems, points, 2]
    masses = np.stack([system.masses for system in systems])
    return vectors, masses[:, None].repeat(points, axis=1)


def choose_labelled(states: Floats, count: int) -> NDArray[np.bool_]:
    """Choose `count` random points of each system, [systems, points]."""
    systems, points, _ = states.shape
    rng = np.random.default_rng(0)
    places = np.tile(np.arange(points), (systems, 1))
    order = rng.permuted(places, axis=1)
    return order.argsort(axis=1) < count


def vector_task(config: Config) -> Task:
    """The force on each planet of the solar system, each alone with the Sun.

    A planet begins at its perihelion. A sequence has a scale for each component, its largest.
    """
    systems: list[Elements] = []
    for mass, axis, eccentricity in SOLAR_SYSTEM.values():
        inner = len(systems) < INNER_PLANETS
        planet = Elements(
            masses=np.array([mass, 1.0]),
            axes=np.array([axis]),
            eccentricities=np.array([eccentricity]),
            tilts=np.zeros(1),
            phases=np.zeros(1),
            centre=np.zeros(2),
            time_step=WEEK if inner else HALF_YEAR,
        )
        systems.append(planet)
    vectors, masses = two_body_states(systems, config)
    distance = np.linalg.norm(vectors, axis=-1, keepdims=True)
    forces = -G * masses.prod(-1, keepdims=True) * vectors / distance**3
    return Task(
        tokens=tokenise(systems, config.bins, config.block_size),
        states=np.concatenate((vectors, masses), axis=-1),
        forces=forces,
        scale=np.abs(forces).max(axis=1, keepdims=True),
        labelled=choose_labelled(vectors, VECTOR_LABELS),
    )


def magnitude_task(config: Config, pairs: int) -> Task:
    """The force in two-body systems, whose scale is its root mean square over the labels.

    All positions of nine systems of ten are labelled.
    """
    systems = [draw_pair(PAIRS, index) for index in range(pairs)]
    vectors, masses = two_body_states(systems, config)
    labelled = choose_labelled(vectors, MAGNITUDE_LABELS)
    labelled[: pairs - pairs // 10] = True
    distance = np.linalg.norm(vectors, axis=-1, keepdims=True)
    forces = G * masses[..., :1] * masses[..., 1:] / distance**2
    return Task(
        tokens=tokenise(systems, config.bins, config.block_size),
        states=np.concatenate((distance, masses), axis=-1),
        forces=forces,
        scale=np.sqrt((forces[labelled] ** 2).mean(keepdims=True)),
        labelled=labelled,
    )


# ---- the probes ----


@dataclass(frozen=True, kw_only=True)
class Physics(Evaluation):
    """What a model of orbits knows of Newton's law: LSSAR, section 3.4, Table 3, Figs. 1 and A7."""

    name = "physics"
    task = "orbits"

    steps: PositiveInt = option(10_000, "steps of each fine-tuning")
    batch: PositiveInt = option(64, "sequences in a step")
    pairs: Annotated[int, ("at least", 10)] = option(
        10_000, "two-body systems, a tenth of which is judged"
    )
    oracle: bool = option(False, "average the nearest labels instead of asking the model")

    def identify(self, config: Config) -> dict:
        require("physics", "sklearn", "pyoperon")
        return {
            "steps": self.steps,
            "batch": self.batch,
            "pairs": self.pairs,
            "oracle": self.oracle,
        }

    def chunks(self, config: Config) -> dict[str, Callable[[Run], dict]]:
        """The probes."""
        return {"vectors": self.probe_vectors, "magnitudes": self.probe_magnitudes}

    def measure(self, run: Run, probe: Callable[[Run], dict]) -> dict:
        return probe(run)

    def predict(self, run: Run, probe: str, task: Task) -> Floats:
        """The forces [sequences, points, outputs] at all points, by the model or the oracle."""
        if self.oracle:
            targets = nearest_labels(task, NEIGHBOURS[probe])
        else:
            targets = self.finetune(run, probe, task)
        return targets * task.scale

    def finetune(self, run: Run, probe: str, task: Task) -> Floats:
        """Fine-tune a copy of the run's model on the labels; its outputs at all points, scaled.

        Raises UserError where the loss or the gradient norm is not finite.
        """
        config = run.config.replace(
            learning_rate=LEARNING_RATES[probe] * run.config.learning_rate,
            min_lr=0.0,
            optimizer="adamw",
        )
        open_device(self.device)  # with the float32 precision of training
        torch.manual_seed(config.seed)
        outputs = task.forces.shape[-1]
        model = with_new_head(run.model, outputs).to(run.device).train()
        optimizers = build_optimizers(model, config)
        scaler = build_scaler(run.device, run.dtype)
        training = Training(model, run.dtype, optimizers, scaler)
        x = torch.from_numpy(task.tokens).long().to(run.device)
        labelled = np.where(task.labelled[..., None], task.targets, np.nan)
        y = torch.from_numpy(labelled).float().to(run.device)

        def forces(tokens: Tensor) -> Tensor:
            """The outputs at the planets' positions: every other entry from the second on."""
            return model(tokens)[:, 1::2].float()

        def squared_error(tokens: Tensor, labels: Tensor) -> Tensor:
            errors = forces(tokens) - labels
            return errors[~labels.isnan()].square().sum()

        for step in trange(self.steps, desc="fine-tuning", leave=False, disable=None):
            sequences = min(self.batch, len(x))
            order = epoch_order(step * sequences, sequences, len(x), config.seed)
            indices = torch.from_numpy(order)
            tokens = x[indices]
            labels = y[indices]
            micro_batches = zip(
                tokens.split(config.batch_size), labels.split(config.batch_size), strict=True
            )
            count = int((~labels.isnan()).sum())
            batch = StepBatch(list(micro_batches), divisor=count, tokens=0)
            loss, norm = train_step(training, squared_error, batch, config.grad_clip)
            if not may_continue(loss.item(), norm.item(), scaler):
                raise UserError(
                    f"{run.path}: {probe} diverged at step {step + 1}: loss {loss}, gradient {norm}"
                )
        model.eval()
        with torch.no_grad(), run.autocast():
            predicted = [forces(batch).cpu() for batch in x.split(config.batch_size)]
        return torch.cat(predicted).double().numpy()

    def probe_vectors(self, run: Run) -> dict:
        """Cosine, relative error and up to ARROWS of each planet's unlabelled forces."""
        task = vector_task(run.config)
        predictions = self.predict(run, "vectors", task)
        planets = {}
        for i, name in enumerate(SOLAR_SYSTEM):
            unlabelled = ~task.labelled[i]
            predicted = predictions[i, unlabelled]
            true = task.forces[i, unlabelled]
            places = task.states[i, unlabelled, :2]
            lengths = np.linalg.norm(predicted, axis=-1)
            true_lengths = np.linalg.norm(true, axis=-1)
            errors = np.linalg.norm(predicted - true, axis=-1)
            products = (predicted * true).sum(-1)
            cosines = products / np.maximum(lengths * true_lengths, SMALLEST)
            every = math.ceil(len(places) / ARROWS)
            planets[name] = {
                "cosine": float(cosines.mean()),
                "relative_error": float((errors / true_lengths).mean()),
                "at": places[::every].tolist(),
                "true": true[::every].tolist(),
                "predicted": predicted[::every].tolist(),
            }
        means = {}
        for column in ("cosine", "relative_error"):
            values = [planet[column] for planet in planets.values()]
            means[column] = float(np.mean(values))
        return means | {"planets": planets}

    def probe_magnitudes(self, run: Run) -> dict:
        """How the predicted F at positions without a label depends on r, m1 and m2."""
        from scipy.stats import spearmanr
        from sklearn.neighbors import NearestNeighbors
        from sklearn.preprocessing import StandardScaler

        task = magnitude_task(run.config, self.pairs)
        unlabelled = ~task.labelled
        forces = self.predict(run, "magnitudes", task)[unlabelled, 0]
        true = task.forces[unlabelled, 0]
        errors = np.abs(forces - true) / true
        states = task.states[unlabelled]
        positive = forces > 0
        # log F = constant + sum of exponent * log variable
        log_states = np.log(states[positive])
        design = np.column_stack((np.ones(len(log_states)), log_states))
        log_forces = np.log(forces[positive])
        exponents = [None] * len(VARIABLES)
        if len(log_forces) >= design.shape[1]:
            fit, *_ = np.linalg.lstsq(design, log_forces, rcond=None)
            exponents = fit[1:].tolist()
        # by the distance to the next labelled state, in standard deviations
        scaler = StandardScaler()
        neighbours = NearestNeighbors(n_neighbors=1)
        neighbours.fit(scaler.fit_transform(task.states[task.labelled]))
        distance, _ = neighbours.kneighbors(scaler.transform(states))
        nearest = np.argsort(distance[:, 0], kind="stable")[:NEAREST]
        return {
            "rank_correlation": float(spearmanr(forces, true).statistic),
            "median_relative_error": float(np.median(errors)),
            "exponents": dict(zip(VARIABLES, exponents, strict=True)),
            "positive": float(positive.mean()),
            "positions": len(forces),
            "engine": f"pyoperon {importlib.metadata.version('pyoperon')}",
            "laws": find_laws(states[nearest], forces[nearest], run.config.seed),
        }

    def show(self, results: Results) -> dict[str, Figure]:
        """Print the scores and the laws of every run, and draw the forces of all."""
        headings = [column.replace("_", " ") for column in COLUMNS]
        table = [["", *headings, *VARIABLES]]
        for name, result in results.items():
            scores = result["parts"]["vectors"] | result["parts"]["magnitudes"]
            values = [scores[column] for column in COLUMNS]
            values += scores["exponents"].values()
            table.append([name, *("–" if value is None else f"{value:.3f}" for value in values)])
            for law in scores["laws"]:
                print(f"{name}, law by {scores['engine']}: F = {law['equation']}")
        print_table(table)
        picture = "oracle" if self.oracle else "forces"
        return {picture: plot_forces(results)}


def nearest_labels(task: Task, neighbours: int) -> Floats:
    """The mean target of each point's nearest labelled states."""
    from sklearn.neighbors import KNeighborsRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    regressor = make_pipeline(StandardScaler(), KNeighborsRegressor(neighbours))
    regressor.fit(task.states[task.labelled], task.targets[task.labelled])
    targets = regressor.predict(np.concatenate(task.states))  # of [systems * points, features]
    return targets.reshape(task.forces.shape)


def with_new_head(model: GPT, outputs: int) -> GPT:
    """A copy of the model whose head is a new linear layer, with a bias, of so many outputs."""
    model = copy.deepcopy(model)
    model.lm_head = nn.Linear(model.config.n_embd, outputs)
    nn.init.normal_(model.lm_head.weight, std=0.02)
    nn.init.zeros_(model.lm_head.bias)
    return model


# ---- symbolic regression ----


class Equation(NamedTuple):
    """A candidate: its nodes, its mean loss, and the formula as sympy reads it."""

    nodes: int
    loss: float
    formula: str


def find_laws(states: Floats, forces: Floats, seed: int) -> list[dict]:
    """The equation of best score for F, in each draw from these states [positions, (r, m1, m2)]."""
    rng = np.random.default_rng(seed)
    laws = []
    for _ in trange(DRAWS, desc="symbolic regression", unit="draw"):
        size = min(SAMPLE, len(forces))
        sample = rng.choice(len(forces), size, replace=False)
        x = states[sample]
        y = forces[sample]
        candidates = []
        seeds = rng.integers(2**31, size=RESTARTS)
        for search_seed in seeds.tolist():
            candidates += search(x, y, search_seed)
        best = best_score(candidates)
        score = {"nodes": best.nodes, "loss": best.loss}
        laws.append(score | law(best.formula, y.std()))
    return laws


def loss(predicted: Floats, true: Floats) -> float:
    """The published loss: the mean absolute error, where errors up to 1e-8 count as 0."""
    errors = np.abs(predicted - true)
    return float((np.maximum(NEGLIGIBLE, errors) - NEGLIGIBLE).mean())


def best_score(candidates: Sequence[Equation]) -> Equation:
    """The equation with the largest drop of log loss per node, on the Pareto front."""
    front: list[Equation] = []
    for equation in sorted(candidates, key=lambda equation: (equation.nodes, equation.loss)):
        if not front or equation.loss < front[-1].loss:
            front.append(equation)
    if len(front) == 1:
        return front[0]
    losses = np.array([equation.loss for equation in front])
    nodes = np.array([equation.nodes for equation in front])
    log_losses = np.log(np.maximum(losses, SMALLEST))
    drops = -np.diff(log_losses)
    best = np.argmax(drops / np.diff(nodes))
    return front[1 + int(best)]


def search(x: Floats, y: Floats, seed: int) -> list[Equation]:
    """The Pareto front of a search. 1/x counts as a quotient, a variable's factor not at all."""
    from pyoperon.sklearn import SymbolicRegressor

    scale = float(y.std())
    median = float(np.median(y))
    regressor = SymbolicRegressor(
        allowed_symbols="add,mul,div,sin,cos,exp,constant,variable",
        objectives=["mae", "length"],
        max_length=20,
        generations=100,
        population_size=1000,
        max_evaluations=10**9,
        random_state=seed,
    )
    regressor.fit(x, y / scale)
    front = []
    for candidate in regressor.pareto_front_:
        if not candidate["variables"]:
            constant = np.full_like(y, median)
            front.append(Equation(1, loss(constant, y), repr(median)))
            continue
        tree = candidate["tree"]
        predicted = regressor.evaluate_model(tree, x) * scale
        if np.isfinite(predicted).all():
            text = regressor.get_model_string(tree, 12, list(VARIABLES))
            formula = f"{scale!r}*({text})"
            front.append(Equation(candidate["length"], loss(predicted, y), formula))
    return front


def law(formula: str, deviation: float) -> dict[str, Any]:
    """The equation as text, and the powers and the factor of a product of powers, else None.

    `deviation` is the standard deviation of F.
    """
    import sympy

    expression = sympy.sympify(formula)
    constant, rest = expression.as_coeff_Add()
    if rest.free_symbols and abs(float(constant)) < OFFSET * deviation:
        expression = rest
    rounded = {number: sympy.Float(number, 4) for number in expression.atoms(sympy.Float)}
    equation = str(expression.xreplace(rounded)).replace("**", "^")
    factor, product = expression.as_coeff_Mul()
    powers = product.as_powers_dict()
    symbols = sympy.symbols(VARIABLES)
    result: dict[str, Any] = {"equation": equation, "powers": None, "factor": None}
    if all(base in symbols and power.is_number for base, power in powers.items()):
        result["powers"] = [float(powers[symbol]) for symbol in symbols]
        result["factor"] = float(factor)
    return result


# ---- the table and the picture ----


def plot_forces(results: Results) -> Figure:
    """Figs. 1 and A7: a row of axes for each planet, with the true forces and each run's."""
    runs = {name: result["parts"]["vectors"]["planets"] for name, result in results.items()}
    truths = next(iter(runs.values()))
    rows = len(truths)
    columns = 1 + len(runs)
    width = 2.2 * columns + 0.4
    height = 2.2 * rows + 0.4
    figure = Figure(figsize=(width, height), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False)
    for row, (planet, truth) in zip(all_axes, truths.items(), strict=True):
        row[0].set_ylabel(planet)
        draw_arrows(row[0], truth, truth["true"], "C0")
        for axes, planets in zip(row[1:], runs.values(), strict=True):
            draw_arrows(axes, truth, planets[planet]["predicted"], "C1")
    for axes, name in zip(all_axes[0], ("true", *runs), strict=True):
        axes.set_title(name, fontsize="medium")
    return figure


def draw_arrows(axes: Axes, truth: dict, forces: list, color: str) -> None:
    """Draw forces [n, 2] around the Sun, at the places and in the scale of the true ones."""
    size = np.abs(truth["at"]).max()
    lengths = np.linalg.norm(truth["true"], axis=-1)
    axes.quiver(
        *np.transpose(truth["at"]),
        *np.transpose(forces),
        angles="xy",
        scale_units="xy",
        scale=lengths.max() / (0.6 * size),  # force per length
        width=0.008,
        color=color,
    )
    axes.plot(0, 0, "o", color="goldenrod", markersize=5)
    edge = 1.25 * size
    axes.set(
        xlim=(-edge, edge),
        ylim=(-edge, edge),
        aspect="equal",
        xticks=[],
        yticks=[],
    )


main = as_command(Physics)

if __name__ == "__main__":
    main()
