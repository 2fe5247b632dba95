"""The papers' tables and figures: their rows, their numbers and their pictures.

A new table is a new entry of EXPERIMENTS.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from config import Config
from data.tokenizer import get_tokenizer
from layers.cache import KVCache
from layers.rope import Rope
from model import GPT
from runtime.device import autocast, pick_device, pick_dtype
from scripts import passkey
from scripts.attention_maps import (
    DRAWN,
    AttentionMaps,
    mean_over_heads,
    mean_shares,
    positive_curve,
)
from scripts.common.papers import LSSAR, SSMAX, TRAINED_LENGTH
from scripts.downstream import Downstream
from scripts.eval_length import LossByLength, gain_from_context, smoothed
from scripts.passkey import Passkeys
from scripts.physics import ARROWS, SOLAR_SYSTEM, Physics
from scripts.reproduce import formulas, pictures
from scripts.reproduce.measure import Costs, Measurement, at
from scripts.reproduce.pictures import SLIDING, grouped, lines, losses_at


@dataclass(frozen=True)
class Experiment:
    """A table or figure: its rows (see rows.find_row), its measurement and its pictures."""

    title: str
    unit: str
    rows: tuple[str, ...]
    measurement: Measurement
    draw: Callable[[dict], pictures.Pictures] = lambda table: {}  # of the table
    paper: dict | None = None  # the section of papers.json with values for these rows
    paper_scale: str = "124m"  # where the section names no scales
    notes: tuple[str, ...] = ()
    task: str = "language"  # of its runs
    remarks: Callable[[dict], Sequence[str]] = lambda table: ()  # sentences on its rows


TRIALS = 100  # passkeys of each length
TRIAL_SEED = 1337  # of passkeys, needles, haystacks and random sequences


def options(config: Config, rope: str = "dynamic_ntk", theta: float | None = None) -> dict:
    """How to open the runs of a scale."""
    return {"rope": rope, "rope_theta": theta, "device": config.device, "dtype": config.dtype}


def loss(*multiples: float, costs: Costs | None = None) -> Measurement:
    """Loss by length over the same tokens, and what the longest context is worth."""

    def lengths(config: Config) -> tuple[int, ...]:
        return tuple(at(multiple, config) for multiple in multiples)

    def values(measured: dict, config: Config) -> list[float]:
        losses = losses_at(measured, lengths(config))
        if "control" not in measured:
            return losses
        at_both = (config.block_size, lengths(config)[-1])
        alone, window = losses_at(measured["control"], at_both)
        return [*losses, window, gain_from_context(alone, window, losses[-1])]

    longer = multiples[-1] > 1
    controlled = (f"{multiples[-1]:g}x, {SLIDING}", "gain from context") if longer else ()
    timed = costs.columns if costs else ()
    return Measurement(
        columns=(*multiples, *controlled, *timed), values=values, costs=costs,
        evaluation=lambda config: LossByLength(lengths=lengths(config), **options(config)),
        better=("lower",) * len(multiples) + ("lower", "higher") * longer + (None,) * len(timed),
    )  # fmt: skip


def only_part(measured: dict) -> dict:
    (part,) = measured["parts"].values()
    return part


def loss_by_position(multiple: float, samples: int | None = None, **rope: Any) -> Measurement:
    """Loss at every position of windows of one length; columns are the loss around positions.

    With `samples` the windows are random: so many, or as many as there are.
    """
    shown = (0.5, 1, 2, 4, 8, 16)

    def evaluation(config: Config) -> LossByLength:
        return LossByLength(
            lengths=(at(multiple, config),), samples=samples, sample_seed=TRIAL_SEED,
            per_position=True, **options(config, **rope),
        )  # fmt: skip

    def values(measured: dict, config: Config) -> list[float]:
        curve = smoothed(only_part(measured)["loss_by_position"])
        return [curve[at(position, config) - 1] for position in shown]

    return Measurement(columns=shown, evaluation=evaluation, values=values, better="lower")


def stretched(multiples: tuple, shortest: Callable) -> Callable[[Config], tuple]:
    """The multiples of the training length, or of its smallest multiple that fits a prompt."""

    def at_scale(config: Config) -> tuple:
        factor = -(-shortest(get_tokenizer(config.tokenizer)) // config.block_size)
        return tuple(multiple * factor for multiple in multiples)

    return at_scale


def passkeys(*multiples: float) -> Measurement:
    """LSSAR Figs. 2 and A3: passkeys found, in percent."""
    columns = stretched(multiples, passkey.shortest)

    def evaluation(config: Config) -> Passkeys:
        lengths = tuple(at(multiple, config) for multiple in columns(config))
        return Passkeys(lengths=lengths, trials=TRIALS, seed=TRIAL_SEED, **options(config))

    return Measurement(
        columns=columns, evaluation=evaluation, better="higher", digits=1,
        values=lambda m, config: [100 * part["accuracy"] for part in m["parts"].values()],
    )  # fmt: skip


def downstream(table: str) -> Measurement:
    """LSSAR Tables 2, A1 and A2: tasks of lm-evaluation-harness; accuracies in percent."""
    columns = tuple(LSSAR[table]["columns"])
    pairs = [column.split() for column in columns]
    tasks = tuple(dict.fromkeys(task for task, _ in pairs))

    def values(measured: dict, config: Config) -> list[float]:
        scores = {task: measured["parts"][task]["scores"][task]["metrics"] for task in tasks}
        return [
            scores[task][metric]["value"] * (100 if metric.startswith("acc") else 1)
            for task, metric in pairs
        ]

    return Measurement(
        columns=columns, values=values, digits=2,
        evaluation=lambda config: Downstream(tasks=",".join(tasks), **options(config)),
        better=tuple("lower" if metric == "perplexity" else "higher" for _, metric in pairs),
    )  # fmt: skip


def entropy() -> Measurement:
    """LSSAR Sect. 2.1.2: entropy by the number of keys, and its slope beyond training.

    A query with n keys counts for the smallest power of 2 that is at least n.
    """
    multiples = (0.25, 1.0, 4.0, 16.0)

    def evaluation(config: Config) -> AttentionMaps:
        length = at(16, config)
        return AttentionMaps(text="", lengths=(length,), **options(config))

    def values(measured: dict, config: Config) -> list[float]:
        keys, means = formulas.entropies(only_part(measured))
        shown = [means[(at(m, config) - 1).bit_length() - 1] for m in multiples]
        beyond = [i for i, n in enumerate(keys) if n >= config.block_size]
        slope = formulas.log_slope([keys[i] for i in beyond], [means[i] for i in beyond])
        return [*shown, slope]

    return Measurement(
        columns=(*multiples, "slope"), values=values, evaluation=evaluation,
        curves=lambda measured: {"": formulas.entropies(only_part(measured))},
    )  # fmt: skip


def sparsity() -> Measurement:
    """LSSAR Sect. 2.2.1: positive weights near the diagonal and far from it, and dead ones."""
    columns = ("near", "far", "all", "dead rows", "dead keys")

    return Measurement(
        columns=columns, curves=lambda measured: {"": positive_curve(measured)},
        evaluation=lambda config: AttentionMaps(
            text="", lengths=(), distances=True, **options(config, "none")
        ),
        values=lambda measured, config: [mean_shares(measured)[name] for name in columns],
    )  # fmt: skip


# The columns of Table 3, and what is better.
PHYSICS = {
    "cosine": "higher", "error": "lower", "rank correlation": "higher", "median error": "lower",
    "above 0": "higher", "exponent of r": None, "of m1": None, "of m2": None,
    "m1 m2 / r^2 found": "higher", "m1 / r^2 found": None,
}  # fmt: skip
LAWS = ([-2.0, 1.0, 1.0], [-2.0, 1.0, 0.0])  # powers of r, m1 and m2


def physics(config: Config) -> Physics:
    return Physics(
        # the published numbers, or less for fewer systems
        steps=min(10_000, -(-config.systems // 40)),
        pairs=min(10_000, -(-config.systems // 10)),
        batch=min(64, config.total_batch_size // config.block_size),
        device=config.device, dtype=config.dtype,
    )  # fmt: skip


def newton(measured: dict, config: Config) -> list[float]:
    """LSSAR Table 3."""
    vectors, magnitudes, laws = measured["parts"].values()
    return [
        vectors["cosine"], vectors["relative_error"], magnitudes["rank_correlation"],
        magnitudes["median_relative_error"], magnitudes["positive"],
        *magnitudes["exponents"].values(),
        *(sum(draw["powers"] == powers for draw in laws["draws"]) for powers in LAWS),
    ]  # fmt: skip


def cosines(measured: dict, config: Config) -> list[float]:
    """LSSAR Figs. 1 and A7."""
    return [one["cosine"] for one in measured["parts"]["vectors"]["planets"].values()]


def equations(table: dict) -> list[str]:
    """The validation loss of each run, and the equation of every draw."""
    losses, equations = [], []
    for name, entry in table["rows"].items():
        for run in entry["runs"]:
            laws = run["evaluation"]["parts"]["laws"]
            drawn = "; ".join(f"`{draw['equation']}`" for draw in laws["draws"])
            equations.append(f"`{name}`, seed {run['seed']}, by {laws['engine']}: {drawn}.")
        if name != "oracle":
            read = [formulas.metric(Path(run["run"]), "val_loss") for run in entry["runs"]]
            losses.append(f"`{name}` " + ", ".join(f"{loss[max(loss)]:.3f}" for loss in read))
    before = "Validation loss before fine-tuning (nats per coordinate), by seed: "
    return [before + ("; ".join(losses) or "no model") + ".", *equations]


@functools.cache
@torch.no_grad()
def cache_kb(config: Config) -> float:
    """The kilobytes that all layers cache of a token, from one layer."""
    device = pick_device(config.device)
    model, cache = GPT(config.replace(n_layer=1)).to(device), KVCache(1)
    with autocast(device, pick_dtype(config.dtype, device)):
        model.trunk(torch.zeros(1, 1, config.n_embd, device=device), cache)
    return config.n_layer * cache.nbytes / 1000


@functools.cache
def parameters(config: Config) -> int:
    with torch.device("meta"):
        return GPT(config).count_parameters()


STEPS = Costs(
    columns=("parameters (M)", "time of a step", "memory of a step"),
    values=lambda own, softmax, config: [
        parameters(config) / 1e6,
        own["train_ms"] / softmax["train_ms"], own["train_mb"] / softmax["train_mb"],
    ],
    phase="train", rounds=20,
)  # fmt: skip
DECODING = Costs(
    columns=("cache (kB per token)", "generation (ms per token)"),
    values=lambda own, softmax, config: [cache_kb(config), own["decode_ms_spread"][0]],
    phase="decode", rounds=50,
    changes=lambda config: {
        "block_size": at(16, config), "batch_size": 1, "total_batch_size": at(16, config)
    },
)  # fmt: skip


TABLE1 = LSSAR["table1"]
TWO = ("softmax", "lssar_p15")
LOSS = "validation loss (nats per token)"
AROUND = "validation loss around a position (nats)"
ENTROPY = "entropy of a row's weights (nats)"
LENGTHS = (1, 2, 4, 8, 16)
SSMAX_ROWS = tuple(SSMAX["rows"])
# What users pick instead of LSSAR: a panel of the league's picture for each kind.
LEAGUE = {
    "LSSAR's paper": tuple(TABLE1["rows"]),
    "scales and norms": ("softmax", "softmax_logn", "ssmax", "ssmax_fixed", "qk_norm", "softcap"),
    "positions": (
        "softmax", "softmax_alibi", "softmax_nope", "swa", "swa:plain_rope", "hybrid",
        "hybrid:plain_rope", "hybrid_ssmax", "hybrid_ssmax:plain_rope", "hybrid_lssar_p5",
        "hybrid_lssar_p5:plain_rope",
    ),
    "sinks and gates": (
        "softmax", "softmax_off_by_one", "softmax_sink", "softpick", "gated", "fox",
    ),
    "whole rows": (
        "softmax", "softmax:adaptive_temperature", "sparsemax", "entmax15", "asentmax",
        "stick_breaking",
    ),
}  # fmt: skip
LEAGUE_ROWS = tuple(dict.fromkeys(name for names in LEAGUE.values() for name in names))
POWERS = (1, 2, 3, 5, 10, 15, 20, 30, 50, 100)
# {exp, softplus} x {1 / sqrt d, log n / sqrt d, log d log n cos} x {no stage 2, p = 3, p = 15}
COMPONENTS = (
    *(
        f"{name}{p}"
        for name in ("softmax", "ssmax_fixed", "softmax_cosine", "phi_softplus", "softplus_logn")
        for p in ("", "_p3", "_p15")
    ),
    "lssa", "lssar_p3", "lssar_p15", "lssa_threshold",
)  # fmt: skip
ROPES = (*(name for name in Rope.SCALINGS if name != "ntk"), "ntk16")
SIZES = tuple(f"n = {n:,}" for n in formulas.SIZES)
OF_100 = "Of 100 trials: a value near 50 has a standard error of 5, whatever the seeds."
STRETCHED = (
    "Lengths are multiples of the training length, or of its least multiple that fits a prompt."
)
SWAPS = (
    "(e) is the last weights of softmax with SSMax. (f) trains softmax for seven eighths of the "
    "steps and SSMax for the rest, in the same data order: docs/ssmax_swaps.md."
)
LAWS_OF_THE_PAPER = "; ".join(
    f"{name} {'' if constant is None else f'{constant:g} '}{law}"
    for name, (law, constant) in LSSAR["table3"]["rows"].items()
)


def loss_table(key: str, what: str) -> Experiment:
    """A table of losses at the training length."""
    paper, number = LSSAR[key], key.removeprefix("table_").upper()
    title, rows = f"LSSAR Table {number}, {what}", tuple(paper["rows"])
    return Experiment(title, LOSS, rows, loss(1), paper=paper)


def task_table(key: str, what: str, scale: str = "124m") -> Experiment:
    title = f"LSSAR Table {key.removeprefix('table').removeprefix('_').upper()}, {what}"
    measured = downstream(key)
    return Experiment(title, "zero-shot scores", TWO, measured, paper=LSSAR[key], paper_scale=scale)


EXPERIMENTS = {
    "table1": Experiment(
        "LSSAR Table 1, loss by length", LOSS, tuple(TABLE1["rows"]), loss(1, 2, 4, 8),
        pictures.beside_the_paper, TABLE1,
    ),
    "table2": task_table("table2", "downstream tasks"),
    "table_a1": task_table("table_a1", "downstream tasks after FineWeb-Edu", "124m_edu"),
    "table_a2": task_table("table_a2", "LAMBADA"),
    "table_a4": loss_table("table_a4", "modified scores"),
    "table_a5": loss_table("table_a5", "softmax without its parts"),
    "table_a6": loss_table("table_a6", "activation functions"),
    "loss_by_length": Experiment(
        "LSSAR Fig. A2, loss to 16 times the training length", LOSS, TWO, loss(*LENGTHS),
        pictures.beside_the_paper, TABLE1, notes=(
            "Fig. A2 has curves without numbers; the paper's values here are of its Table 1.",
        ),
    ),
    "p_sweep": Experiment(
        "LSSAR Appendix B.1.4, loss by p", LOSS,
        ("lssa", *(f"lssar_p{p}" for p in POWERS), "softmax", *(f"softmax_p{p}" for p in POWERS)),
        loss(*LENGTHS), pictures.loss_over_p, TABLE1,
        notes=("The paper has only curves here; its values are of its Table 1.",),
    ),
    "p_at_evaluation": Experiment(
        "Is it the training or the sharpening: other p than in training", LOSS,
        ("lssa", "lssa:p3", "lssa:p15", "lssar_p3", *(f"lssar_p3:p{p}" for p in (1, 5, 15)),
         "lssar_p15", *(f"lssar_p15:p{p}" for p in (1, 3, 5, 10, 20, 30))),
        loss(*LENGTHS), grouped(pictures.by_run), TABLE1,
        notes=("`lssa:p15` are the weights of `lssa`, evaluated with p = 15.",),
    ),
    "components": Experiment(
        "LSSAR taken apart: phi, scale and re-weighting", LOSS, COMPONENTS, loss(*LENGTHS),
        grouped(pictures.by_stage), TABLE1, notes=(
            "phi is exp (`softmax`, `ssmax_fixed`, `softmax_cosine`) or softplus (`phi_softplus`, "
            "`softplus_logn`, `lssa`); the scale of the scores is 1/√d, log n/√d or, with unit q "
            "and k, log d log n. `lssa_threshold` drops what `lssar` drops, without the power.",
        ),
    ),
    "rope": Experiment(
        "RoPE scalings and variants", LOSS,
        tuple(f"{name}:{rope}" for name in ("softmax", "ssmax", "lssar_p15") for rope in ROPES),
        loss(*LENGTHS), grouped(pictures.by_run), notes=(
            "`softmax:yarn` are the weights of `softmax`, evaluated with YaRN. Linear scaling and "
            "YaRN take s = length / training length, `ntk16` s = 16 at every length.",
        ),
    ),
    "league": Experiment(
        "What users pick instead", LOSS, LEAGUE_ROWS, loss(*LENGTHS, costs=STEPS),
        grouped(pictures.by_kind(LEAGUE)), TABLE1, notes=(
            "`softmax:adaptive_temperature` are the weights of `softmax`, as its paper has it. "
            "RoPE is scaled where there is RoPE; `:plain_rope` are the same weights without "
            "scaling. `swa` has its own, shorter window in the control too.",
            "Time and memory are of a training step with one micro-batch, over those of softmax, "
            "with which the table row takes turns: medians of 20 rounds.",
        ),
    ),
    "league_passkey": Experiment(
        "What users pick instead, passkey retrieval", "passkeys found (%)",
        tuple(name for name in LEAGUE_ROWS if ":" not in name), passkeys(1, 1.5, 2, 4, 8),
        grouped(pictures.by_kind(LEAGUE)), LSSAR["passkey"], notes=(OF_100, STRETCHED),
    ),
    "t6": Experiment(
        "T6: queries, keys and values from factors, with softmax and with LSSAR", LOSS,
        ("softmax", "lssar_p15", "softmax_swiglu", "lssar_p15_swiglu", "t6", "t6_lssar_p15"),
        loss(*LENGTHS, costs=DECODING), grouped(pictures.by_block), notes=(
            "`t6` is T6 (Zhang et al. 2025), with as many parameters as GPT-2 to 0.6%; `_swiglu` "
            "is T6 with linear projections and GPT-2's first weights: docs/t6.md.",
            "Generation: one more token of one sequence, after 16 training lengths in the cache, "
            "the fastest of 50 rounds. The cache is that of all layers.",
        ),
    ),
    "loss_by_position": Experiment(
        "Loss at each position, to 16 times the training length", AROUND, TWO,
        loss_by_position(16), pictures.positions,
    ),
    "passkey": Experiment(
        "LSSAR Figs. 2 and A3, passkey retrieval", "passkeys found (%)", TWO,
        passkeys(1, 1.5, 2, 4, 8), pictures.beside_the_paper, LSSAR["passkey"],
        notes=(OF_100, STRETCHED),
    ),
    "attention_maps": Experiment(
        "LSSAR Figs. A1, A4, A5, A6, attention maps", "mean over heads and rows", TWO,
        Measurement(
            columns=tuple(DRAWN.values()),
            evaluation=lambda config: AttentionMaps(tokens=0, **options(config)),
            values=lambda m, config: [mean_over_heads(only_part(m), name) for name in DRAWN],
        ),
        pictures.maps,
    ),
    "table3": Experiment(
        "LSSAR Table 3, Newton's law from orbits", "forces at positions without a label",
        ("oracle", "softmax", "lssar_p15", "lssar_p3", "lssa", "softmax_window", "untrained"),
        Measurement(
            columns=tuple(PHYSICS), evaluation=physics, values=newton,
            better=tuple(PHYSICS.values()), digits=2,
        ),
        task="orbits", remarks=equations, notes=(
            "Cosine and error are of force vectors in the solar system, over eight planets. The "
            "other columns are of magnitudes in two-body systems; the last two count the draws, of "
            "five, in which symbolic regression gives the law. docs/physics.md explains the rows, "
            "the columns and what the paper leaves open.",
            f"The paper's Table 3: {LAWS_OF_THE_PAPER}.",
        ),
    ),
    "physics_figures": Experiment(
        "LSSAR Figs. 1 and A7, forces in the solar system", "mean cosine with the true force",
        ("oracle", "lssar_p15", "softmax", "untrained"),
        Measurement(
            columns=tuple(SOLAR_SYSTEM), evaluation=physics, values=cosines, better="higher",
            digits=2,
        ),
        pictures.forces, task="orbits", notes=(
            "Positions without a label. Arrows: the true forces, then the predictions of the first "
            f"seed, at up to {ARROWS} positions.",
        ),
    ),
    "gradient_norm": Experiment(
        "LSSAR Appendix B.1.4, gradient norm in training", "gradient norm before clipping",
        ("softmax", "softmax_p3", "softmax_p15", "lssar_p3", "lssar_p15"),
        Measurement(
            columns=("median", "highest", "share of steps clipped"), read=formulas.gradient_norms
        ),
        lines("step", "gradient norm before clipping", log="y"), notes=(
            "After the warm-up. The paper says that softmax, unlike LSSAR, suffers from severe "
            "gradient explosion at p = 15.",
        ),
    ),
    "gradient_slopes": Experiment(
        "LSSAR Appendix A.6, decay of the gradient", "slope of the gradient g in the score x",
        tuple(LSSAR["gradients"]["rows"]),
        Measurement(
            columns=(*LSSAR["gradients"]["columns"], "d ln g / d ln x at log d log n"),
            compute=formulas.gradient_slopes,
        ),
        lines("score x of the winner (dotted: log d log n, the highest of LSSA)",
              "gradient dy / dx over its highest value", log="xy", mark=formulas.HIGHEST),
        LSSAR["gradients"], notes=(
            f"Of one score x among {formulas.KEYS:,} keys, the others 0, and head size "
            f"{formulas.HEAD_SIZE}; with p, of (A6)'s y = r^p, before the last l1. The first two "
            "columns are far out (x = {exp:g} for exp, {softplus:g} for softplus), the last is at "
            "the highest score that LSSA can have.".format(**formulas.FAR),
        ),
    ),
    "entropy": Experiment(
        "LSSAR Sect. 2.1.2, entropy by the number of keys", ENTROPY,
        ("softmax", "ssmax", "lssa", "lssar_p15"), entropy(),
        lines("keys n of a row, up to", "entropy of the weights (nats)", "x", equal_weights=True),
        notes=(
            "Rows of the last layer in windows of 16 times the training length, means over heads; "
            "a column is of rows that see more than half as many keys, and at most as many. "
            "Slope: of entropy over log n, from the training length on. 0 is the invariance that "
            "the scale log d log n is to give; equal weights have 1.",
        ),
    ),
    "entropy_random": Experiment(
        "LSSAR Sect. 2.1.2, entropy of random rows", ENTROPY,
        ("softmax", "ssmax_fixed", "lssa", "lssar_p3", "lssar_p15"),
        Measurement(
            columns=(*(f"n = {n:,}" for n in formulas.LENGTHS), "slope"),
            compute=formulas.random_entropy,
        ),
        lines("keys n of a row", "entropy of the weights (nats)", "x", equal_weights=True),
        notes=(
            f"q and k are normal, of head size {formulas.HEAD_SIZE}; means over "
            f"{formulas.QUERIES} queries. Slope: of entropy over log n; equal weights have 1.",
        ),
    ),
    "sparsity": Experiment(
        "LSSAR Sect. 2.2.1, positive weights by distance", "share of weights above 0, of dead ones",
        ("relu_wortsman", "relu_li", "relu_shen", "phi_relu2", "phi_relu6", "lssar_p3",
         "lssar_p15"), sparsity(),
        lines("distance from the diagonal + 1, up to", "share of weights above 0", log="x"),
        notes=(
            "Means over layers, heads and pairs of query and key. Near: closer than 1/16 of the "
            "training length; far: at least half of it. The weights of dead rows are all 0; dead "
            "keys get weight 0 from every later query of the window (of its first half).",
        ),
    ),
    "ssmax_figure1": Experiment(
        "SSMax Fig. 1, attention fading", "largest of n weights", ("softmax", "ssmax"),
        Measurement(columns=SIZES, compute=formulas.attention_fading),
        lines("size n of the input vector", "largest weight", log="x"), notes=(
            "The scores are {others}, the last {last}; s = {s}. In the paper SSMax's stays close "
            "to 1.".format(**formulas.FADING),
        ),
    ),
    "ssmax_figure2": Experiment(
        "SSMax Fig. 2, learnt p_n", "p_n as a_1 log n + a_2", ("ssmax_probe",),
        Measurement(columns=("a_1", "a_2", "R²"), read=formulas.learned_p),
        lines("input vector size n", "p_n", log="x"), notes=(
            "By least squares over n >= 2: a row of one key has weight 1 whatever p_1 is. In the "
            "paper p_n closely follows the logarithm.",
        ),
    ),
    "ssmax_figure3": Experiment(
        "SSMax Fig. 3, the score that attention focuses on", "z_max whose weight is 1/2",
        tuple(formulas.FOCUS),
        Measurement(columns=SIZES, digits=2, compute=formulas.attention_focus),
        lines("z_max; the other n - 1 scores are spread evenly from 0 to 1", "weight of z_max"),
        formulas.FOCUS_RULE, notes=(
            "The n - 1 other scores are spread evenly from 0 to 1. The paper's values are its rule "
            "that z_max must exceed the others by approximately 1 / s, whatever n is.",
        ),
    ),
    "ssmax_figure4": Experiment(
        "SSMax Fig. 4, learning curves", "training loss (nats per token)", SSMAX_ROWS[:4],
        Measurement(
            columns=tuple(SSMAX["figure4"]["columns"]), better="lower", needs=("softmax",),
            read=formulas.learning_curve,
        ),
        lines("step", "training loss (nats per token)"), SSMAX["figure4"], "ssmax_paper", notes=(
            "Means over the last tenth of the steps; all runs of a seed see the same batches.",
        ),
    ),
    "ssmax_figure5": Experiment(
        "SSMax Fig. 5, loss by position", AROUND, SSMAX_ROWS,
        loss_by_position(
            SSMAX["figure5"]["length"] / TRAINED_LENGTH, SSMAX["figure5"]["sequences"],
            rope="none", theta=SSMAX["figure5"]["rope_theta"],
        ),
        pictures.positions, notes=(
            SWAPS,
            "The paper takes {sequences:,} random sequences of {length:,} tokens of SlimPajama's "
            "test set. These (`samples`) are random too: as many as lie side by side in the "
            "validation text, at most the paper's number.".format(**SSMAX["figure5"]),
        ),
    ),
}  # fmt: skip
