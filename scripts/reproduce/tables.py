"""The papers' tables and figures: their entries, their numbers and their pictures.

A new table is a new entry of EXPERIMENTS.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from config import Config
from data.tokenizer import get_tokenizer
from layers.rope import Rope
from scripts import passkey
from scripts.attention_maps import (
    ATTENTION_MAPS,
    MapOptions,
    mean_over_heads,
    mean_shares,
    positive_curve,
)
from scripts.common.papers import LSSAR, SSMAX, TRAINED_LENGTH
from scripts.common.tables import cell, summarise
from scripts.common.validation import accuracies
from scripts.copying import (
    BEYOND,
    COPYING,
    UNIT,
    WITHIN,
    CopyingOptions,
    shares_kept,
    worth_at,
)
from scripts.downstream import DOWNSTREAM, DownstreamOptions
from scripts.eval_length import EVAL_LENGTH, LossOptions, gain, smoothed
from scripts.passkey import PASSKEY, PasskeyOptions
from scripts.physics import PHYSICS, PhysicsOptions
from scripts.recall import LEARNED, PERCENT, RECALL, RecallOptions, learned
from scripts.reproduce import formulas, metrics, pictures
from scripts.reproduce.entries import NORMALISERS
from scripts.reproduce.measure import Experiment, at, lengths
from scripts.reproduce.pictures import SLIDING, grouped, lines

TWO = ("softmax", "lssar_p15")
LOSS = "validation loss (nats per token)"
GAIN = "gain from context"
HEADROOM = ("softmax", "softmax_4t", "softmax_16t")  # each trained longer than the one before

# ---- measurements that several tables share ----


def loss(
    title: str, entries: tuple[str, ...], multiples: tuple[float, ...], **more: Any
) -> Experiment:
    """Loss by length over the same tokens, and what the longest context is worth."""

    def values(measured: dict, config: Config) -> list[float | None]:
        control = [measured["control"]["loss"][-1], gain(measured)] if longer else []
        return [*measured["loss"], *control]

    longer = multiples[-1] > 1
    controlled = (f"{multiples[-1]:g}x, {SLIDING}", GAIN) if longer else ()
    return Experiment(
        title, LOSS, entries, (*multiples, *controlled), values,
        EVAL_LENGTH,
        lambda config: LossOptions(
            lengths=lengths(multiples, config), tokens=config.val_tokens
        ),
        better=("lower",) * len(multiples) + ("lower", "higher") * longer,
        **more,
    )  # fmt: skip


def loss_table(title: str, paper: dict) -> Experiment:
    """A table of losses at the training length."""
    return loss(title, tuple(paper["rows"]), (1,), paper=paper)


def loss_by_position(
    title: str, entries: tuple[str, ...], multiple: float, sequences: int | None = None,
    note: str = "", **opened: Any,
) -> Experiment:  # fmt: skip
    """Loss at every position of windows of one length; columns are the loss around positions.

    There are `sequences` windows, or as many as the validation text has. `opened` are options of
    the runs' RoPE.
    """
    shown = (0.5, 1, 2, 4, 8, 16)

    def options(config: Config) -> LossOptions:
        length = at(multiple, config)
        tokens = sequences * length if sequences else config.val_tokens
        return LossOptions(lengths=(length,), tokens=tokens, per_position=True, **opened)

    def values(measured: dict, config: Config) -> list[float]:
        curve = smoothed(only_part(measured)["loss_by_position"])
        return [curve[at(position, config) - 1] for position in shown]

    return Experiment(
        title, "validation loss around a position (nats)", entries, shown, values,
        EVAL_LENGTH, options,
        better="lower", draw=pictures.positions, note=note,
    )  # fmt: skip


def only_part(measured: dict) -> dict:
    (part,) = measured["parts"].values()
    return part


def passkeys(title: str, entries: tuple[str, ...], **more: Any) -> Experiment:
    """Passkeys found, in percent."""

    def columns(config: Config) -> tuple:
        """Multiples of the training length, or of its smallest multiple that fits a prompt."""
        factor = -(-passkey.shortest(get_tokenizer(config.tokenizer)) // config.block_size)
        return tuple(multiple * factor for multiple in (1, 1.5, 2, 4, 8))

    return Experiment(
        title, "passkeys found (%)", entries, columns,
        lambda measured, config: list(accuracies(measured).values()),
        PASSKEY, lambda config: PasskeyOptions(lengths=lengths(columns(config), config)),
        better="higher", digits=1, paper=LSSAR["passkey"], note=(
            "Of 100 trials: a value near 50 has a standard error of 5, whatever the seeds. Lengths "
            "are multiples of the training length, or of its least multiple that fits a prompt."
        ), **more,
    )  # fmt: skip


def downstream(title: str, paper: dict, scale: str = "124m") -> Experiment:
    """Tasks of lm-evaluation-harness; accuracies in percent."""
    columns = tuple(paper["columns"])
    pairs = [column.split() for column in columns]
    tasks = tuple(dict.fromkeys(task for task, _ in pairs))

    def values(measured: dict, config: Config) -> list[float]:
        scores = {task: measured["parts"][task]["scores"][task]["metrics"] for task in tasks}
        return [
            scores[task][metric]["value"] * (100 if metric.startswith("acc") else 1)
            for task, metric in pairs
        ]

    return Experiment(
        title, "zero-shot scores", TWO, columns, values,
        DOWNSTREAM, lambda config: DownstreamOptions(tasks=",".join(tasks)),
        better=tuple("lower" if metric == "perplexity" else "higher" for _, metric in pairs),
        digits=2, paper=paper, paper_scale=scale,
    )  # fmt: skip


def entropies(measured: dict) -> tuple[list[float], list[float]]:
    """Of attention_maps: the keys of each group of queries, and their entropy, mean over heads."""
    part = only_part(measured)
    columns = zip(*part["groups"]["entropy"], strict=True)
    known = [[value for value in column if value is not None] for column in columns]
    return part["keys"], [statistics.mean(column) for column in known]


def entropy_by_keys(measured: dict, config: Config) -> list[float]:
    """LSSAR Sect. 2.1.2: entropy by the number of keys, and its slope beyond training.

    A query with n keys counts for the smallest power of 2 that is at least n.
    """
    keys, means = entropies(measured)
    shown = [means[(at(m, config) - 1).bit_length() - 1] for m in ENTROPY_AT]
    points = zip(keys, means, strict=True)
    beyond = [(math.log(n), mean) for n, mean in points if n >= config.block_size]
    return [*shown, statistics.linear_regression(*zip(*beyond, strict=True)).slope]


# ---- orbits ----

# The columns of Table 3, and what is better.
TABLE3 = {
    "cosine": "higher", "error": "lower", "rank correlation": "higher", "median error": "lower",
    "above 0": "higher", "exponent of r": None, "of m1": None, "of m2": None,
    "m1 m2 / r^2 found": "higher", "m1 / r^2 found": None,
}  # fmt: skip
LAWS = ([-2.0, 1.0, 1.0], [-2.0, 1.0, 0.0])  # powers of r, m1 and m2


def physics(config: Config) -> PhysicsOptions:
    return PhysicsOptions(
        # the published numbers, or less for fewer systems
        steps=min(10_000, -(-config.systems // 40)),
        pairs=min(10_000, -(-config.systems // 10)),
        batch=min(64, config.total_batch_size // config.block_size),
    )


def newton(measured: dict, config: Config) -> list[float]:
    """LSSAR Table 3."""
    vectors, magnitudes = measured["parts"].values()
    return [
        vectors["cosine"], vectors["relative_error"], magnitudes["rank_correlation"],
        magnitudes["median_relative_error"], magnitudes["positive"],
        *magnitudes["exponents"].values(),
        *(sum(law["powers"] == powers for law in magnitudes["laws"]) for powers in LAWS),
    ]  # fmt: skip


def equations(table: dict) -> list[str]:
    """The equation of every draw."""
    sentences = []
    for name, run in ((name, run) for name, e in table["rows"].items() for run in e["runs"]):
        found = run["evaluation"]["parts"]["magnitudes"]
        drawn = "; ".join(f"`{law['equation']}`" for law in found["laws"])
        sentences.append(f"`{name}`, seed {run['seed']}, by {found['engine']}: {drawn}.")
    return sentences


# ---- recall ----


def recalled(measured: dict, config: Config) -> list[float | None]:
    """The accuracy in percent at each length; if the task is not learned, at 1x alone."""
    known, trained = learned(measured), measured["trained_length"]
    return [share if known or n == trained else None for n, share in accuracies(measured).items()]


def recall(
    title: str, entries: tuple[str, ...], multiples: tuple[float, ...],
    values: Callable[[dict, Config], list] = recalled, **more: Any,
) -> Experiment:  # fmt: skip
    """Recall by length, in percent."""
    return Experiment(
        title, PERCENT, entries, multiples, values,
        RECALL, lambda config: RecallOptions(lengths=lengths(multiples, config)),
        digits=1, **({"task": "recall"} | more),
    )  # fmt: skip


def each_seed(table: dict, column: int, rows: dict) -> str:
    """Of these rows of the table, the names and the values in a column, by seed."""
    return "; ".join(
        f"`{name}` {', '.join(cell(table, summarise([run]), column) for run in row['runs'])}"
        for name, row in rows.items()
    )


def accuracy_by_seed(table: dict) -> list[str]:
    """The accuracy of each seed at 16x or less, and the entries that have not learned the task."""
    multiples, rows = table["multiples"], table["rows"]
    at = max(i for i, multiple in enumerate(multiples) if multiple <= 16)
    learned = {name: row for name, row in rows.items() if row["mean"][at] is not None}
    missing = {name: row for name, row in rows.items() if name not in learned}
    accuracies = f"At {multiples[at]:g}x, by seed: {each_seed(table, at, learned)}."
    sentences = [accuracies] if learned else []
    if missing:
        steps = next(iter(missing.values()))["runs"][0]["step"]
        sentences.append(
            f"Not learned in {steps:,} steps, as a seed has less than {LEARNED} at 1x (other "
            "learning rates or more steps may change that); at 1x, by seed: "
            f"{each_seed(table, multiples.index(1), missing)}."
        )
    return sentences


# ---- copies in text ----


def copied(measured: dict, config: Config) -> list[float | None]:
    """The worth of the first copy by lag, without what is hurt, and the share kept at the last."""
    kept, lags = shares_kept(measured), sorted(map(int, measured["parts"]))
    known = [None if kept.get(n) == "hurt" else worth_at(measured, [n])[0] for n in lags]
    return [*known, None if isinstance(share := kept[lags[-1]], str) else share]


# ---- headroom ----


def available(entries: dict[str, list[dict]], length: int) -> list[float]:
    """By seed, what a context of this length is worth to a softmax that was trained on it.

    `entries` are the measured runs of headroom. Of the run that was trained at this length, or at
    the next longer one, it is the loss at T, reading T tokens at a time, minus the loss at the
    length. A sliding window of T would have a lower loss, so the context is worth this at most.
    """
    gains: dict[int, float] = {}
    for run in (run for name in HEADROOM[1:] for run in entries.get(name, [])):
        measured = run["evaluation"]
        losses = dict(zip(measured["lengths"], measured["loss"], strict=True))
        if measured["trained_length"] >= length and length in losses:
            gains.setdefault(run["seed"], measured["loss"][0] - losses[length])
    return list(gains.values())


def headroom(table: dict) -> list[str]:
    """What is available at each length beyond the first, by seed."""
    entries = {name: entry["runs"] for name, entry in table["rows"].items()}
    lengths = next(iter(entries.values()))[0]["evaluation"]["lengths"]
    return [
        f"Available at {multiple:g}x, by seed: {', '.join(f'{gain:+.4f}' for gain in gains)}."
        for multiple, length in zip(table["multiples"], lengths, strict=True)
        if multiple > 1 and (gains := available(entries, length))
    ]


# ---- the tables ----

TABLE1 = LSSAR["table1"]
LENGTHS = (1, 2, 4, 8, 16)
MAPPED = {
    "first_token": "share of the first token",
    "entropy_share": "entropy / log n",
    "zeros": "share of weights that are exactly 0",
}
ENTROPY_AT = (0.25, 1.0, 4.0, 16.0)  # training lengths
SIZES = tuple(f"n = {n:,}" for n in formulas.SIZES)
SSMAX_ENTRIES = tuple(SSMAX["rows"])
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
LEAGUE_ENTRIES = tuple(dict.fromkeys(name for names in LEAGUE.values() for name in names))
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
DEAD = ("near", "far", "all", "dead rows", "dead keys")

RECALL_ENTRIES = (
    *(form.format(name) for name in NORMALISERS for form in pictures.RECALL_POSITIONS),
    "stick_breaking", "fox", "asentmax", "softpick", "swa:plain_rope", "gated", "qk_norm",
)  # fmt: skip

BOTH = "Half of the steps are of text, half of recall. `:plain_rope` has no dynamic NTK."
TEXT_AND_RECALL = (
    "softmax", "softmax:plain_rope", "hybrid:plain_rope", "hybrid_ssmax:plain_rope",
    "hybrid_ssmax_quarter:plain_rope", "hybrid_lssar_p5:plain_rope",
)  # fmt: skip

COPIES = (*TEXT_AND_RECALL, "ssmax", "ssmax_nope", "lssar_p15", "stick_breaking", "fox")

EXPERIMENTS = {
    "table1": loss(
        "LSSAR Table 1, loss by length", tuple(TABLE1["rows"]), (1, 2, 4, 8),
        draw=pictures.together, paper=TABLE1,
    ),
    "table2": downstream("LSSAR Table 2, downstream tasks", LSSAR["table2"]),
    "table_a1": downstream("LSSAR Table A1, FineWeb-Edu", LSSAR["table_a1"], "124m_edu"),
    "table_a2": downstream("LSSAR Table A2, LAMBADA", LSSAR["table_a2"]),
    "table_a4": loss_table("LSSAR Table A4, modified scores", LSSAR["table_a4"]),
    "table_a5": loss_table("LSSAR Table A5, softmax without its parts", LSSAR["table_a5"]),
    "table_a6": loss_table("LSSAR Table A6, activation functions", LSSAR["table_a6"]),
    "loss_by_length": loss(
        "LSSAR Fig. A2, loss to 16 times the training length", TWO, LENGTHS,
        draw=pictures.together, paper=TABLE1,
        note="Fig. A2 has no numbers; the paper's values here are of its Table 1.",
    ),
    "p_sweep": loss(
        "LSSAR Appendix B.1.4, loss by p",
        ("lssa", *(f"lssar_p{p}" for p in POWERS), "softmax", *(f"softmax_p{p}" for p in POWERS)),
        LENGTHS, draw=pictures.loss_over_p, paper=TABLE1,
        note="The paper has only curves here; its values are of its Table 1.",
    ),
    "p_at_evaluation": loss(
        "Is it the training or the sharpening: other p than in training",
        ("lssa", "lssa:p3", "lssa:p15", "lssar_p3", *(f"lssar_p3:p{p}" for p in (1, 5, 15)),
         "lssar_p15", *(f"lssar_p15:p{p}" for p in (1, 3, 5, 10, 20, 30))),
        LENGTHS, draw=grouped(pictures.by_run), paper=TABLE1,
    ),
    "components": loss(
        "LSSAR taken apart: phi, scale and re-weighting", COMPONENTS, LENGTHS,
        draw=grouped(pictures.by_stage), paper=TABLE1,
        note="docs/results.md, LSSAR taken apart, has phi and the scale of each entry.",
    ),
    "rope": loss(
        "RoPE scalings and variants",
        tuple(f"{name}:{rope}" for name in ("softmax", "ssmax", "lssar_p15") for rope in ROPES),
        LENGTHS, draw=grouped(pictures.by_run),
        note="Linear scaling and YaRN take s = length / training length, `ntk16` always s = 16.",
    ),
    "league": loss(
        "What users pick instead", LEAGUE_ENTRIES, LENGTHS,
        draw=grouped(pictures.by_kind(LEAGUE)), paper=TABLE1,
        note="`:plain_rope` has no dynamic NTK. `swa` has its own window in the control too.",
    ),
    "headroom": replace(
        loss("What a longer context is worth to a model trained on it", HEADROOM, LENGTHS),
        columns=LENGTHS, better="lower", values=lambda measured, config: measured["loss"],
        draw=pictures.together, remarks=headroom, note=(
            "Available: the loss at 1x minus the loss at the length, of the model that was trained "
            "there or at the next longer length. `softmax_4t` has its own sliding window, of 4x."
        ),
    ),
    "league_passkey": passkeys(
        "What users pick instead, passkey retrieval",
        tuple(name for name in LEAGUE_ENTRIES if ":" not in name),
        draw=grouped(pictures.by_kind(LEAGUE)),
    ),
    "t6": loss(
        "T6: queries, keys and values from factors, with softmax and with LSSAR",
        ("softmax", "lssar_p15", "softmax_swiglu", "lssar_p15_swiglu", "t6", "t6_lssar_p15"),
        LENGTHS, draw=pictures.together, note="docs/t6.md explains the entries.",
    ),
    "loss_by_position": loss_by_position("Loss by position, to 16 training lengths", TWO, 16),
    "passkey": passkeys("LSSAR Figs. 2 and A3, passkey retrieval", TWO, draw=pictures.together),
    "recall": recall(
        "Recall of what lies far away", RECALL_ENTRIES, RecallOptions.multiples,
        draw=pictures.recall, remarks=accuracy_by_seed, note=(
            "A guess has 6.2 in lookup and latest, 1.6 in mqar; in sort, repeating the last answer "
            "has 36, 57, 75, 88, 94, 97, 98 at 1x to 64x. Of 512 answers, 50 has a standard error "
            "of 2.2. `:plain_rope` has no dynamic NTK, `_nope` no positions, `hybrid_` none in "
            "half of the heads; the others are softmax with RoPE over a quarter of 1x."
        ),
    ),
    "text_and_recall": loss(
        "Text and recall in one model: loss on text", TEXT_AND_RECALL, LENGTHS,
        task="language+recall",
        draw=pictures.together, note=BOTH,
    ),
    "recall_and_text": recall(
        "Text and recall in one model: recall", TEXT_AND_RECALL, LENGTHS,
        lambda measured, config: [*accuracies(measured).values()], better="higher",
        task="language+recall", draw=pictures.together, remarks=accuracy_by_seed, note=BOTH,
    ),
    "copying": Experiment(
        "Worth of an earlier copy of a passage, by lag", UNIT, COPIES,
        (*WITHIN, *BEYOND, "share kept at 16x"), copied, COPYING, lambda config: CopyingOptions(),
        better="higher", digits=3, draw=pictures.together,
        remarks=lambda table: [f"Share kept, by seed: {each_seed(table, -1, table['rows'])}."],
        note="–: hurt, or undecided (docs/evaluations.md, Copies). `:plain_rope` has no scaling.",
    ),
    "loss_and_copying": loss(
        "Loss by length of models trained with repeats", COPIES, LENGTHS, draw=pictures.together
    ),
    "attention_maps": Experiment(
        "LSSAR Figs. A1, A4, A5, A6, attention maps", "mean over heads and rows", TWO,
        tuple(MAPPED.values()),
        lambda measured, config: [mean_over_heads(only_part(measured), name) for name in MAPPED],
        ATTENTION_MAPS, lambda config: MapOptions(tokens=0), draw=pictures.maps,
    ),
    "table3": Experiment(
        "LSSAR Table 3, Figs. 1 and A7, Newton's law from orbits",
        "forces at positions without a label",
        ("oracle", "softmax", "lssar_p15", "lssar_p3", "lssa", "softmax_window", "untrained"),
        tuple(TABLE3), newton, PHYSICS, physics,
        better=tuple(TABLE3.values()), digits=2, task="orbits", remarks=equations,
        draw=pictures.forces, note=(
            "docs/physics.md explains the entries and the columns, and has the paper's laws. "
            "Arrows: the true forces, then the predictions of the first seed."
        ),
    ),
    "gradient_norm": Experiment(
        "LSSAR Appendix B.1.4, gradient norm in training", "gradient norm before clipping",
        ("softmax", "softmax_p3", "softmax_p15", "lssar_p3", "lssar_p15"),
        ("median", "highest", "share of steps clipped"), read=metrics.gradient_norms,
        draw=lines("step", "gradient norm before clipping", log="y"),
        note="After the warm-up. In the paper softmax explodes at p = 15, and LSSAR does not.",
    ),
    "entropy": Experiment(
        "LSSAR Sect. 2.1.2, entropy by the number of keys", "entropy of a row's weights (nats)",
        ("softmax", "ssmax", "lssa", "lssar_p15"), (*ENTROPY_AT, "slope"), entropy_by_keys,
        ATTENTION_MAPS, lambda config: MapOptions(text="", lengths=(at(16, config),)),
        curves=lambda measured: {"": entropies(measured)},
        draw=lines("keys n of a row, up to", "entropy of the weights (nats)", "x", True),
        note=(
            "Rows of the last layer in windows of 16 times the training length, means over heads; "
            "a column is of rows that see more than half as many keys, and at most as many. "
            "Slope: of entropy over log n, from the training length on; equal weights have 1."
        ),
    ),
    "gradient_slopes": Experiment(
        "LSSAR Appendix A.6, decay of the gradient", "slope of the gradient g in the score x",
        tuple(LSSAR["gradients"]["rows"]),
        (*LSSAR["gradients"]["columns"], "d ln g / d ln x at log d log n"),
        compute=formulas.gradient_slopes, paper=LSSAR["gradients"],
        draw=lines("score x of the winner", "gradient dy / dx over its highest value", log="xy"),
        note=(
            f"Of one score x among {formulas.KEYS:,} keys, the others 0, and head size "
            f"{formulas.HEAD_SIZE}; with p, of (A6)'s y = r^p, before the last l1. The first two "
            "columns are far out (x = {exp:g} for exp, {softplus:g} for softplus), the last is at "
            "the highest score that LSSA can have.".format(**formulas.FAR)
        ),
    ),
    "entropy_random": Experiment(
        "LSSAR Sect. 2.1.2, entropy of random rows", "entropy of a row's weights (nats)",
        ("softmax", "ssmax_fixed", "lssa", "lssar_p3", "lssar_p15"),
        (*(f"n = {n:,}" for n in formulas.LENGTHS), "slope"), compute=formulas.random_entropy,
        draw=lines("keys n of a row", "entropy of the weights (nats)", "x", True), note=(
            f"q and k are normal, of head size {formulas.HEAD_SIZE}; means over "
            f"{formulas.QUERIES} queries. Slope: of entropy over log n; equal weights have 1."
        ),
    ),
    "sparsity": Experiment(
        "LSSAR Sect. 2.2.1, positive weights by distance", "share of weights above 0, of dead ones",
        ("relu_wortsman", "relu_li", "relu_shen", "phi_relu2", "phi_relu6", "lssar_p3",
         "lssar_p15"), DEAD,
        lambda measured, config: [mean_shares(measured)[name] for name in DEAD],
        ATTENTION_MAPS, lambda config: MapOptions(text="", lengths=(), distances=True, rope="none"),
        curves=lambda measured: {"": positive_curve(measured)},
        draw=lines("distance from the diagonal + 1, up to", "share of weights above 0", "x"),
        note=(
            "Means over layers, heads and pairs of query and key. Near: closer than 1/16 of the "
            "training length; far: at least half of it."
        ),
    ),
    "ssmax_figure1": Experiment(
        "SSMax Fig. 1, attention fading", "largest of n weights", ("softmax", "ssmax"), SIZES,
        compute=formulas.attention_fading,
        draw=lines("size n of the input vector", "largest weight", log="x"), note=(
            "The scores are {others}, the last {last}; s = {s}. In the paper SSMax's stays close "
            "to 1.".format(**formulas.FADING)
        ),
    ),
    "ssmax_figure2": Experiment(
        "SSMax Fig. 2, learnt p_n", "p_n as a_1 log n + a_2", ("ssmax_probe",),
        ("a_1", "a_2", "R²"), read=metrics.learned_p,
        draw=lines("input vector size n", "p_n", log="x"),
        note="By least squares over n >= 2. In the paper p_n closely follows the logarithm.",
    ),
    "ssmax_figure3": Experiment(
        "SSMax Fig. 3, the score that attention focuses on", "z_max whose weight is 1/2",
        tuple(formulas.FOCUS), SIZES, compute=formulas.attention_focus, digits=2,
        draw=lines("z_max; the other n - 1 scores are spread evenly from 0 to 1",
                   "weight of z_max"),
        paper=formulas.FOCUS_RULE,
        note="The paper's values are its rule that z_max must exceed the others by about 1 / s.",
    ),
    "ssmax_figure4": Experiment(
        "SSMax Fig. 4, learning curves", "training loss (nats per token)", SSMAX_ENTRIES[:4],
        tuple(SSMAX["figure4"]["columns"]), read=metrics.learning_curve, needs=("softmax",),
        better="lower", draw=lines("step", "training loss (nats per token)"),
        paper=SSMAX["figure4"], paper_scale="ssmax_paper",
        note="Means over the last tenth of the steps; all runs of a seed see the same batches.",
    ),
    "ssmax_figure5": loss_by_position(
        "SSMax Fig. 5, loss by position", SSMAX_ENTRIES,
        SSMAX["figure5"]["length"] / TRAINED_LENGTH, SSMAX["figure5"]["sequences"],
        rope="none", rope_theta=SSMAX["figure5"]["rope_theta"], note=(
            "docs/ssmax_swaps.md explains (e) and (f). The paper takes {sequences:,} random "
            "sequences of {length:,} tokens, here as many as the validation text has side by "
            "side.".format(**SSMAX["figure5"])
        ),
    ),
}  # fmt: skip
