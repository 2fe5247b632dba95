"""The papers' tables and figures: their entries, their columns and their pictures.

A new table is a new entry of EXPERIMENTS.
"""

import math
import statistics
from bisect import bisect_left
from dataclasses import replace
from functools import partial

from config import Config
from scripts.attention_maps import AttentionMaps, mean_over_heads
from scripts.common.papers import LSSAR, SSMAX, TRAINED_LENGTH
from scripts.copying import (
    BEYOND,
    UNIT,
    WITHIN,
    Copying,
    lags_in,
    shares_kept,
    worth_at,
)
from scripts.physics import Physics
from scripts.recall import Recall
from scripts.reproduce import formulas, metrics, pictures
from scripts.reproduce.entries import (
    LSSAR_SWIGLU,
    POWERS,
    SOFTMAX_SWIGLU,
    SOFTMAX_WINDOW,
    SSMAX_E,
    SSMAX_F,
    SSMAX_PROBE,
    TRUE_FORCES,
    UNTRAINED,
    Entry,
    Settings,
    all_entries,
    at_other_p,
    by_name,
    config_entries,
    config_entry,
    config_with,
    hybrid,
    with_dynamic_ntk,
    with_p,
)
from scripts.reproduce.headroom import HEADROOM
from scripts.reproduce.kinds import (
    MULTIPLES,
    SOFTMAX_AND_LSSAR,
    accuracies_if_learned,
    all_accuracies,
    downstream,
    each_seed,
    loss,
    loss_and_gain,
    loss_by_position,
    loss_joined_and_apart,
    only_part,
    passkeys,
    recall,
)
from scripts.reproduce.measure import Experiment, all_in_tokens, in_tokens
from scripts.reproduce.pictures import in_panels, lines
from scripts.weights_by_distance import WeightsByDistance, mean_shares, positive_curve

# ---- the entries of larger tables ----

TABLE1 = LSSAR["table1"]
# What users pick instead of LSSAR: a panel for each kind.
LEAGUE = {
    "LSSAR's paper": by_name(*config_entries(*TABLE1["rows"])),
    "scales and norms": by_name(
        *config_entries("softmax", "softmax_logn", "ssmax", "ssmax_fixed", "qk_norm", "softcap")
    ),
    "positions": by_name(
        *config_entries("softmax", "softmax_alibi", "softmax_nope"),
        *with_dynamic_ntk("swa", "hybrid", "hybrid_ssmax", "hybrid_lssar_p5"),
    ),
    "sinks and gates": by_name(
        *config_entries("softmax", "softmax_off_by_one", "softmax_sink", "softpick", "gated", "fox")
    ),
    "whole rows": by_name(
        config_entry("softmax"),
        config_entry("softmax", view="adaptive_temperature"),
        *config_entries("sparsemax", "entmax15", "asentmax", "stick_breaking"),
    ),
}

P_SWEEP = {
    variant: {float(p): with_p(variant, p) for p in POWERS} for variant in ("lssar", "softmax")
}
P_AT_EVALUATION = {
    "lssa": at_other_p("lssa", 3, 15),
    "lssar_p3": at_other_p("lssar_p3", 1, 5, 15),
    "lssar_p15": at_other_p("lssar_p15", 1, 3, 5, 10, 20, 30),
}

# {exp, softplus} x {1 / sqrt d, log n / sqrt d, log d log n cos} x {no stage 2, p = 3, p = 15}
PARTS = ("softmax", "ssmax_fixed", "softmax_cosine", "phi_softplus", "softplus_logn")
COMPONENTS = {
    "not re-weighted": by_name(*config_entries(*PARTS, "lssa", "lssa_threshold")),
    "re-weighted, p = 3": {variant: with_p(variant, 3) for variant in (*PARTS, "lssar")},
    "re-weighted, p = 15": {variant: with_p(variant, 15) for variant in (*PARTS, "lssar")},
}

SCALINGS = ("plain_rope", "linear", "dynamic_ntk", "yarn", "ntk16")
ROPES = {
    name: {scaling: config_entry(name, scaling) for scaling in SCALINGS}
    for name in ("softmax", "ssmax", "lssar_p15")
}


def crossed(config: str, settings_of: dict[str, Settings], *views: str) -> dict[str, Entry]:
    """Return a config with each of these settings, evaluated in its default way and in `views`."""
    entries = []
    for name, settings in settings_of.items():
        entry = config_with(config, f"{config}_{name}", **settings)
        entries += [replace(entry, view=view) for view in ("", *views)]
    return {entry.name.removeprefix(f"{config}_"): entry for entry in entries}


# with and without QK norm, with RoPE on all pairs of a head and on half
NORMED_AND_PARTIAL = {
    "all": {"qk_norm": False, "rope_share": 1.0},
    "half": {"qk_norm": False, "rope_share": 0.5},
    "qk_norm_all": {"qk_norm": True, "rope_share": 1.0},
    "qk_norm_half": {"qk_norm": True, "rope_share": 0.5},
}
NORM_AND_PAIRS = {
    config: crossed(config, NORMED_AND_PARTIAL, "plain_rope")
    for config in ("softmax", "softmax_logn", "ssmax", "lssa", "lssar_p15", "scale_invariant")
}

# with and without document_mask, in the stream and in aligned windows
MASKED_AND_ALIGNED = {
    "stream_joined": {"document_mask": False, "align_documents": False},
    "stream_apart": {"document_mask": True, "align_documents": False},
    "aligned_joined": {"document_mask": False, "align_documents": True},
    "aligned_apart": {"document_mask": True, "align_documents": True},
}
DOCUMENTS = {
    "softmax": crossed("softmax", MASKED_AND_ALIGNED),
    "ssmax": crossed("ssmax", MASKED_AND_ALIGNED),
    "lssar_p15": crossed("lssar_p15", MASKED_AND_ALIGNED),
    "hybrid_ssmax": crossed("hybrid_ssmax", MASKED_AND_ALIGNED, "dynamic_ntk"),
}


NORMALISERS = (
    "softmax",
    "softmax_logn",
    "ssmax",
    "lssa",
    "softmax_cosine",
    "lssar_p3",
    "lssar_p15",
    "sparsemax",
    "entmax15",
)
RECALL = {
    "RoPE, scaled": {name: config_entry(name) for name in NORMALISERS},
    "RoPE, plain": {name: config_entry(name, view="plain_rope") for name in NORMALISERS},
    "no positions": {
        name: config_with(name, f"{name}_nope", positions="none") for name in NORMALISERS
    },
    "ALiBi": {name: config_with(name, f"{name}_alibi", positions="alibi") for name in NORMALISERS},
    "hybrid": {name: hybrid(name) for name in NORMALISERS},
}
RECALL_OF_OTHERS = {
    "others": by_name(
        *config_entries("stick_breaking", "fox", "asentmax", "softpick"),
        *config_entries("swa", "gated", "qk_norm"),
    ),
}

TEXT_AND_RECALL = (
    config_entry("softmax"),
    config_entry("softmax", view="plain_rope"),
    *config_entries("hybrid", "hybrid_ssmax", "hybrid_ssmax_quarter", "hybrid_lssar_p5"),
)
TEXT_AND_RECALL_NOTE = "Half of the steps are of text, half of recall."
COPIES = (
    *TEXT_AND_RECALL,
    config_entry("ssmax"),
    RECALL["no positions"]["ssmax"],
    *config_entries("lssar_p15", "stick_breaking", "fox"),
)

SSMAX_ENTRIES = config_entries("softmax", "ssmax", "ssmax_fixed", "ssmax_bias")


# ---- maps, entropy and dead weights ----

MAPPED = {
    "first_token": "share of the first token",
    "entropy_share": "entropy / log n",
    "zeros": "share of weights that are exactly 0",
}
ENTROPY_AT = (0.25, 1.0, 4.0, 16.0)  # training lengths
SPARSITY_COLUMNS = ("near", "far", "all", "dead rows", "dead keys")


def map_columns(measured: dict) -> list[float]:
    """Return the values of MAPPED, means over heads."""
    part = only_part(measured)
    return [mean_over_heads(part, name) for name in MAPPED]


def entropies(measured: dict) -> tuple[list[float], list[float]]:
    """Return the keys of each group of queries, and their entropy, means over heads."""
    part = only_part(measured)
    means = []
    for column in zip(*part["groups"]["entropy"], strict=True):
        means.append(statistics.mean(value for value in column if value is not None))
    return part["keys"], means


def entropy_by_keys(measured: dict) -> list[float]:
    """LSSAR Sect. 2.1.2: return entropy by the number of keys, and its slope beyond training.

    A query with n keys counts for the smallest power of 2 that is at least n.
    """
    keys, means = entropies(measured)
    trained = measured["trained_length"]
    columns = [means[bisect_left(keys, multiple * trained)] for multiple in ENTROPY_AT]
    first = bisect_left(keys, trained)
    logs = [math.log(n) for n in keys[first:]]
    slope = statistics.linear_regression(logs, means[first:]).slope
    return [*columns, slope]


def dead_shares(measured: dict) -> list[float]:
    """Return the shares of SPARSITY_COLUMNS, means over layers and heads."""
    shares = mean_shares(measured)
    return [shares[name] for name in SPARSITY_COLUMNS]


# ---- orbits ----

# The columns of Table 3, and what is better.
TABLE3 = {
    "cosine": "higher",
    "error": "lower",
    "rank correlation": "higher",
    "median error": "lower",
    "above 0": "higher",
    "exponent of r": None,
    "of m1": None,
    "of m2": None,
    "m1 m2 / r^2 found": "higher",
    "m1 / r^2 found": None,
}
# powers of r, m1 and m2
NEWTON = [-2.0, 1.0, 1.0]
ACCELERATION = [-2.0, 1.0, 0.0]


def physics(config: Config) -> Physics:
    """Return the evaluation in the published sizes, or smaller ones for fewer systems."""
    return Physics(
        steps=min(10_000, math.ceil(config.systems / 40)),
        pairs=min(10_000, math.ceil(config.systems / 10)),
        batch=min(64, config.total_batch_size // config.block_size),
    )


def table3_columns(measured: dict) -> list[float | None]:
    """Return the columns of TABLE3."""
    vectors, magnitudes = measured["parts"].values()
    powers = [law["powers"] for law in magnitudes["laws"]]
    return [
        vectors["cosine"],
        vectors["relative_error"],
        magnitudes["rank_correlation"],
        magnitudes["median_relative_error"],
        magnitudes["positive"],
        *magnitudes["exponents"].values(),
        powers.count(NEWTON),
        powers.count(ACCELERATION),
    ]


def equations(table: dict) -> list[str]:
    """List the equation of every draw."""
    sentences = []
    for name, row in table["rows"].items():
        for run in row["runs"]:
            magnitudes = run["evaluation"]["parts"]["magnitudes"]
            drawn = "; ".join(f"`{law['equation']}`" for law in magnitudes["laws"])
            engine = magnitudes["engine"]
            sentences.append(f"`{name}`, seed {run['seed']}, by {engine}: {drawn}.")
    return sentences


# ---- copies in text ----


def copying_columns(measured: dict) -> list[float | None]:
    """Return the worth of a copy by lag, None where it hurts, and the share kept at the last."""
    shares = shares_kept(measured)
    lags = lags_in(measured)
    worths: list[float | None] = []
    for lag in lags:
        worth, _ = worth_at(measured, [lag])
        worths.append(None if shares.get(lag) == "hurt" else worth)
    share = shares[lags[-1]]
    return [*worths, None if isinstance(share, str) else share]


def shares_kept_by_seed(table: dict) -> list[str]:
    return [f"Share kept, by seed: {each_seed(table, -1, table['rows'])}."]


# ---- the tables ----


def loss_table(title: str, paper: dict) -> Experiment:
    """Return a table of losses at the training length, without a picture."""
    entries = config_entries(*paper["rows"])
    return loss(title, entries, (1,), draw=lambda table: {}, paper=paper)


EXPERIMENTS = {
    "table1": loss_and_gain(
        title="LSSAR Table 1, loss by length",
        entries=config_entries(*TABLE1["rows"]),
        multiples=(1, 2, 4, 8),
        paper=TABLE1,
    ),
    "table2": downstream("LSSAR Table 2, downstream tasks", LSSAR["table2"]),
    "table_a1": downstream("LSSAR Table A1, FineWeb-Edu", LSSAR["table_a1"], "124m_edu"),
    "table_a2": downstream("LSSAR Table A2, LAMBADA", LSSAR["table_a2"]),
    "table_a4": loss_table("LSSAR Table A4, modified scores", LSSAR["table_a4"]),
    "table_a5": loss_table("LSSAR Table A5, softmax without its parts", LSSAR["table_a5"]),
    "table_a6": loss_table("LSSAR Table A6, activation functions", LSSAR["table_a6"]),
    "loss_by_length": loss_and_gain(
        title="LSSAR Fig. A2, loss to 16 times the training length",
        entries=SOFTMAX_AND_LSSAR,
        paper=TABLE1,
        note="Fig. A2 has no numbers; the paper's values here are of its Table 1.",
    ),
    "p_sweep": loss_and_gain(
        title="LSSAR Appendix B.1.4, loss by p",
        entries=(*config_entries("lssa", "softmax"), *all_entries(P_SWEEP)),
        draw=pictures.over_p(P_SWEEP),
        paper=TABLE1,
        note="The paper has only curves here; its values are of its Table 1.",
    ),
    "p_at_evaluation": loss_and_gain(
        title="Is it the training or the sharpening: other p than in training",
        entries=all_entries(P_AT_EVALUATION),
        draw=in_panels(P_AT_EVALUATION),
        paper=TABLE1,
    ),
    "components": loss_and_gain(
        title="LSSAR taken apart: phi, scale and re-weighting",
        entries=all_entries(COMPONENTS),
        draw=in_panels(COMPONENTS),
        paper=TABLE1,
        note=(
            "docs/results.md, What makes LSSAR flatter than softmax, has phi and the scale of each "
            "entry."
        ),
    ),
    "rope": loss_and_gain(
        title="RoPE scalings and variants",
        entries=all_entries(ROPES),
        draw=in_panels(ROPES),
        note="Linear scaling and YaRN take s = length / training length, `ntk16` always s = 16.",
    ),
    "norm_and_pairs": loss_and_gain(
        title="QK norm, and the share of a head's pairs that RoPE turns",
        entries=all_entries(NORM_AND_PAIRS),
        draw=in_panels(NORM_AND_PAIRS),
        note="RoPE rotates all frequency pairs of a head, or the half with higher frequencies.",
    ),
    "documents": loss_joined_and_apart(
        title="Attention within documents, and windows that begin at a document",
        entries=all_entries(DOCUMENTS),
        multiples=(1, 4, 16),
        draw=in_panels(DOCUMENTS),
        note=(
            "`apart`: trained with document_mask, `joined`: without; `aligned`: with "
            "align_documents. Each run is measured across documents, which is drawn, and, in the "
            "last columns, within documents."
        ),
    ),
    "league": loss_and_gain(
        title="What users pick instead",
        entries=all_entries(LEAGUE),
        draw=in_panels(LEAGUE),
        paper=TABLE1,
    ),
    "headroom": HEADROOM,
    "league_passkey": passkeys(
        title="What users pick instead, passkey retrieval",
        entries=tuple(entry for entry in all_entries(LEAGUE) if not entry.view),
        draw=in_panels(LEAGUE),
    ),
    "t6": loss_and_gain(
        title="T6: queries, keys and values from factors, with softmax and with LSSAR",
        entries=(
            *SOFTMAX_AND_LSSAR,
            SOFTMAX_SWIGLU,
            LSSAR_SWIGLU,
            *config_entries("t6", "t6_lssar_p15"),
        ),
        note="docs/t6.md explains the entries.",
    ),
    "loss_by_position": loss_by_position(
        title="Loss by position, to 16 training lengths",
        entries=SOFTMAX_AND_LSSAR,
        multiple=16,
    ),
    "passkey": passkeys(
        title="LSSAR Figs. 2 and A3, passkey retrieval",
        entries=SOFTMAX_AND_LSSAR,
    ),
    "recall": recall(
        title="Recall of what lies far away",
        entries=all_entries(RECALL | RECALL_OF_OTHERS),
        multiples=Recall.multiples,
        values=accuracies_if_learned,
        draw=pictures.recall_pictures(RECALL, RECALL_OF_OTHERS),
        note=(
            "`_nope` has no positions, `hybrid_` none in half of the heads; the others are softmax "
            "with RoPE over a quarter of 1x."
        ),
    ),
    "text_and_recall": loss_and_gain(
        title="Text and recall in one model: loss on text",
        entries=TEXT_AND_RECALL,
        task="language+recall",
        note=TEXT_AND_RECALL_NOTE,
    ),
    "recall_and_text": recall(
        title="Text and recall in one model: recall",
        entries=TEXT_AND_RECALL,
        multiples=MULTIPLES,
        values=all_accuracies,
        better="higher",
        task="language+recall",
        note=TEXT_AND_RECALL_NOTE,
    ),
    "recall_and_documents": recall(
        title="Text with attention within documents, and recall in turn: recall",
        entries=all_entries(DOCUMENTS),
        multiples=(1, 2, 4, 16),
        values=all_accuracies,
        draw=in_panels(DOCUMENTS),
        better="higher",
        task="language+recall",
        note=(
            "`apart`: trained with document_mask, `joined`: without; `aligned`: with "
            f"align_documents in the steps of text. {TEXT_AND_RECALL_NOTE}"
        ),
    ),
    "copying": Experiment(
        title="Worth of an earlier copy of a passage, by lag",
        unit=UNIT,
        entries=COPIES,
        multiples=(*WITHIN, *BEYOND),
        columns=("share kept at 16x",),
        better="higher",
        digits=3,
        evaluation=lambda config: Copying(lags=all_in_tokens(BEYOND, config)),
        values=copying_columns,
        draw=partial(pictures.together, xlabel="lag, in multiples of the training length"),
        remarks=shares_kept_by_seed,
        note="–: hurt, or undecided (docs/evaluations.md, Copies).",
    ),
    "loss_and_copying": loss_and_gain(
        title="Loss by length of models trained with repeats",
        entries=COPIES,
    ),
    "attention_maps": Experiment(
        title="LSSAR Figs. A1, A4, A5, A6, attention maps",
        unit="mean over heads and rows",
        entries=SOFTMAX_AND_LSSAR,
        columns=tuple(MAPPED.values()),
        evaluation=lambda config: AttentionMaps(tokens=0),
        values=map_columns,
        draw_first_seed=pictures.maps,
        note="On the text of Figure A1.",
    ),
    "table3": Experiment(
        title="LSSAR Table 3, Figs. 1 and A7, Newton's law from orbits",
        unit="forces at positions without a label",
        entries=(
            TRUE_FORCES,
            *config_entries("softmax", "lssar_p15", "lssar_p3", "lssa"),
            SOFTMAX_WINDOW,
            UNTRAINED,
        ),
        columns=tuple(TABLE3),
        better=tuple(TABLE3.values()),
        digits=2,
        task="orbits",
        evaluation=physics,
        values=table3_columns,
        draw_first_seed=pictures.forces,
        remarks=equations,
        note=(
            "docs/physics.md explains the entries and the columns, and has the paper's laws. "
            "Arrows: the true forces, then the predictions of the first seed."
        ),
    ),
    "gradient_norm": Experiment(
        title="LSSAR Appendix B.1.4, gradient norm in training",
        unit="gradient norm before clipping",
        entries=config_entries("softmax", "softmax_p3", "softmax_p15", "lssar_p3", "lssar_p15"),
        columns=("median", "highest", "share of steps clipped"),
        read=metrics.gradient_norms,
        draw_first_seed=lines("step", "gradient norm before clipping", log="y"),
        note="After the warm-up. In the paper softmax explodes at p = 15, and LSSAR does not.",
    ),
    "entropy": Experiment(
        title="LSSAR Sect. 2.1.2, entropy by the number of keys",
        unit="entropy of a row's weights (nats)",
        entries=config_entries("softmax", "ssmax", "lssa", "lssar_p15"),
        multiples=ENTROPY_AT,
        columns=("slope",),
        evaluation=lambda config: AttentionMaps(text="", lengths=(in_tokens(16, config),)),
        values=entropy_by_keys,
        curves=lambda measured: {"": entropies(measured)},
        draw_first_seed=lines(
            "keys n of a row, up to", "entropy of the weights (nats)", log="x", equal_weights=True
        ),
        note=(
            "Rows of the last layer in windows of 16 times the training length, means over heads; "
            "a column is of rows that see more than half as many keys, and at most as many. "
            "Slope: of entropy over log n, from the training length on; equal weights have 1."
        ),
    ),
    "gradient_slopes": Experiment(
        title="LSSAR Appendix A.6, decay of the gradient",
        unit="slope of the gradient g in the score x",
        entries=config_entries(*LSSAR["gradients"]["rows"]),
        columns=(*LSSAR["gradients"]["columns"], "d ln g / d ln x at log d log n"),
        compute=formulas.gradient_slopes,
        draw_first_seed=lines(
            "score x of the winner", "gradient dy / dx over its highest value", log="xy"
        ),
        paper=LSSAR["gradients"],
        note=(
            f"Of one score x among {formulas.KEYS:,} keys, the others 0, and head size "
            f"{formulas.HEAD_SIZE}; with p, of (A6)'s y = r^p, before the last l1. The first two "
            f"columns are far out (x = {formulas.FAR['exp']:g} for exp, "
            f"{formulas.FAR['softplus']:g} for softplus), the last is at the highest score that "
            "LSSA can have."
        ),
    ),
    "entropy_random": Experiment(
        title="LSSAR Sect. 2.1.2, entropy of random rows",
        unit="entropy of a row's weights (nats)",
        entries=config_entries("softmax", "ssmax_fixed", "lssa", "lssar_p3", "lssar_p15"),
        columns=(*(f"n = {n:,}" for n in formulas.LENGTHS), "slope"),
        compute=formulas.random_entropy,
        draw_first_seed=lines(
            "keys n of a row", "entropy of the weights (nats)", log="x", equal_weights=True
        ),
        note=(
            f"q and k are normal, of head size {formulas.HEAD_SIZE}; means over "
            f"{formulas.QUERIES} queries. Slope: of entropy over log n; equal weights have 1."
        ),
    ),
    "sparsity": Experiment(
        title="LSSAR Sect. 2.2.1, positive weights by distance",
        unit="share of weights above 0, of dead ones",
        entries=config_entries(
            "relu_wortsman",
            "relu_li",
            "relu_shen",
            "phi_relu2",
            "phi_relu6",
            "lssar_p3",
            "lssar_p15",
        ),
        columns=SPARSITY_COLUMNS,
        evaluation=lambda config: WeightsByDistance(rope="none"),
        values=dead_shares,
        curves=lambda measured: {"": positive_curve(measured)},
        draw_first_seed=lines(
            "distance from the diagonal + 1, up to", "share of weights above 0", log="x"
        ),
        note=(
            "Means over layers, heads and pairs of query and key. Near: closer than 1/16 of the "
            "training length; far: at least half of it."
        ),
    ),
    "ssmax_figure1": Experiment(
        title="SSMax Fig. 1, attention fading",
        unit="largest of n weights",
        entries=config_entries("softmax", "ssmax"),
        columns=formulas.SIZE_COLUMNS,
        compute=formulas.attention_fading,
        draw_first_seed=lines("size n of the input vector", "largest weight", log="x"),
        note=(
            "The scores are {others}, the last {last}; s = {s}. In the paper SSMax's stays close "
            "to 1.".format(**formulas.FADING)
        ),
    ),
    "ssmax_figure2": Experiment(
        title="SSMax Fig. 2, learned p_n",
        unit="p_n as a_1 log n + a_2",
        entries=(SSMAX_PROBE,),
        columns=("a_1", "a_2", "R²"),
        read=metrics.learned_p,
        draw_first_seed=lines("input vector size n", "p_n", log="x"),
        note="By least squares over n >= 2. In the paper p_n closely follows the logarithm.",
    ),
    "ssmax_figure3": Experiment(
        title="SSMax Fig. 3, the score that attention focuses on",
        unit="z_max whose weight is 1/2",
        entries=formulas.FOCUS,
        columns=formulas.SIZE_COLUMNS,
        digits=2,
        compute=formulas.attention_focus,
        draw_first_seed=lines(
            "z_max; the other n - 1 scores are spread evenly from 0 to 1", "weight of z_max"
        ),
        paper=formulas.FOCUS_RULE,
        note="The paper's values are its rule that z_max must exceed the others by about 1 / s.",
    ),
    "ssmax_figure4": Experiment(
        title="SSMax Fig. 4, learning curves",
        unit="training loss (nats per token)",
        entries=SSMAX_ENTRIES,
        columns=tuple(SSMAX["figure4"]["columns"]),
        better="lower",
        read=metrics.learning_curve,
        needs=config_entries("softmax"),
        draw_first_seed=lines("step", "training loss (nats per token)"),
        paper=SSMAX["figure4"],
        paper_scale="ssmax_paper",
        note="Means over the last tenth of the steps; all runs of a seed see the same batches.",
    ),
    "ssmax_figure5": loss_by_position(
        title="SSMax Fig. 5, loss by position",
        entries=(*SSMAX_ENTRIES, SSMAX_E, SSMAX_F),
        multiple=SSMAX["figure5"]["length"] / TRAINED_LENGTH,
        sequences=SSMAX["figure5"]["sequences"],
        rope="none",
        rope_theta=SSMAX["figure5"]["rope_theta"],
        note=(
            "docs/ssmax_swaps.md explains (e) and (f). The paper takes {sequences:,} random "
            "sequences of {length:,} tokens, here as many as the validation text has side by "
            "side.".format(**SSMAX["figure5"])
        ),
    ),
}
