"""Kinds of experiment that several tables share: loss, downstream tasks, passkeys and recall."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from config import Config
from scripts.common.papers import LSSAR
from scripts.common.tables import cell, ranged, summarise
from scripts.common.validation import accuracies
from scripts.downstream import Downstream
from scripts.eval_length import (
    UNIT,
    LossByLength,
    difference_error,
    error_range,
    gain,
    gain_error,
    smoothed,
)
from scripts.passkey import PasskeyRetrieval
from scripts.recall import (
    LEARNED_AT,
    PERCENT,
    Recall,
    chance_label,
    chances,
    has_learned,
)
from scripts.reproduce import pictures
from scripts.reproduce.entries import Entry, config_entries
from scripts.reproduce.measure import Experiment, Multiples, all_in_tokens, in_tokens, up_to_16x
from scripts.reproduce.pictures import SLIDING, Draw

GAIN = "gain from context"
MULTIPLES = (1, 2, 4, 8, 16)  # of the training length, in most tables
SOFTMAX_AND_LSSAR = config_entries("softmax", "lssar_p15")

Entries = tuple[Entry, ...]


# ---- loss ----


def loss(
    title: str,
    entries: Entries,
    multiples: Multiples,
    documents: str = "trained",
    draw: Draw = pictures.together,
    **more: Any,
) -> Experiment:
    """Measure the loss by length, over the same tokens at each length."""

    def evaluation(config: Config) -> LossByLength:
        return LossByLength(
            lengths=all_in_tokens(multiples, config),
            tokens=config.val_tokens,
            documents=documents,
            no_control=documents == "both",  # it is measured only as the run was trained
        )

    return Experiment(
        title=title,
        unit=UNIT,
        entries=entries,
        multiples=multiples,
        better="lower",
        evaluation=evaluation,
        values=lambda measured: measured["loss"],
        draw=draw,
        **more,
    )


def loss_and_gain(
    title: str, entries: Entries, multiples: Multiples = MULTIPLES, **more: Any
) -> Experiment:
    """Measure the loss by length, and the gain of the longest context over a sliding window."""

    def values(measured: dict) -> list[float]:
        return [*measured["loss"], measured["control"]["loss"][-1], gain(measured)]

    lower = ["lower"] * (len(multiples) + 1)
    return replace(
        loss(title, entries, multiples, **more),
        columns=(f"{multiples[-1]:g}x, {SLIDING}", GAIN),
        better=(*lower, "higher"),
        values=values,
        remarks=lambda table: [*smaller_windows(table), *errors_over_text(table)],
    )


def loss_joined_and_apart(
    title: str, entries: Entries, multiples: Multiples, **more: Any
) -> Experiment:
    """Measure the loss across documents by length, then within documents, of every run."""

    def values(measured: dict) -> list[float]:
        # what a run was trained with has no name of its own
        across = measured.get("joined", measured)
        within = measured.get("apart", measured)
        return [*across["loss"], *within["loss"]]

    return replace(
        loss(title, entries, multiples, documents="both", **more),
        columns=tuple(f"{multiple:g}x{pictures.APART}" for multiple in multiples),
        values=values,
    )


def smaller_windows(table: dict) -> list[str]:
    """Name the entries whose control has a smaller window than the training length."""
    entries = []
    for name, row in table["rows"].items():
        measured = row["runs"][0]["evaluation"]
        window = measured["control"]["window"]
        if window < measured["trained_length"]:
            entries.append(f"`{name}` {window}")
    if not entries:
        return []
    return [f"The sliding window is the model's own, in tokens, for {', '.join(entries)}."]


def errors_over_text(table: dict) -> list[str]:
    """State the standard error over the text of gains and of differences from the baseline.

    The runs share the text, so its choice moves a difference less than the two losses.
    """
    gain_errors: list[float | None] = []
    difference_errors: list[float | None] = []
    baseline = {}
    for run in table["rows"].get(table["baseline"], {"runs": []})["runs"]:
        baseline[run["seed"]] = run["evaluation"]["parts"]
    for name, row in table["rows"].items():
        for run in row["runs"]:
            gain_errors.append(gain_error(run["evaluation"]))
            if name == table["baseline"] or run["seed"] not in baseline:
                continue
            for key, part in run["evaluation"]["parts"].items():
                difference_errors.append(difference_error(part, baseline[run["seed"]][key]))
    errors = []
    if gain_errors_text := error_range(gain_errors):
        errors.append(f"of a gain {gain_errors_text}")
    if difference_errors_text := error_range(difference_errors):
        errors.append(f"of a loss minus `{table['baseline']}`'s {difference_errors_text}")
    return [f"Standard error over the text: {'; '.join(errors)}."] if errors else []


def loss_by_position(
    title: str,
    entries: Entries,
    multiple: float,
    sequences: int | None = None,
    note: str = "",
    **rope_options: Any,
) -> Experiment:
    """Measure the loss at every position of windows of one length.

    Columns are means around chosen positions. There are `sequences` windows, or as many as the
    validation text has. `rope_options` are options of the evaluation.
    """
    shown = (0.5, 1, 2, 4, 8, 16)

    def evaluation(config: Config) -> LossByLength:
        length = in_tokens(multiple, config)
        tokens = sequences * length if sequences else config.val_tokens
        return LossByLength(
            lengths=(length,), tokens=tokens, per_position=True, documents="trained", **rope_options
        )

    def values(measured: dict) -> list[float]:
        curve = smoothed(only_part(measured)["loss_by_position"])
        trained = measured["trained_length"]
        return [curve[round(position * trained) - 1] for position in shown]

    return Experiment(
        title=title,
        unit="validation loss around a position (nats)",
        entries=entries,
        multiples=shown,
        better="lower",
        evaluation=evaluation,
        values=values,
        draw_first_seed=pictures.loss_over_positions,
        remarks=lambda table: [
            "The standard error is of the mean over all positions; around one it is several times "
            "as large."
        ],
        note=note,
    )


def only_part(measured: dict) -> dict:
    """Return the values of a measurement that has a single chunk."""
    (part,) = measured["parts"].values()
    return part


# ---- downstream tasks and passkeys ----


def downstream(title: str, paper: dict, scale: str = "124m") -> Experiment:
    """Measure tasks of lm-evaluation-harness; accuracies are in percent.

    The columns are the paper's: the name of a task and of a metric, such as "piqa acc_norm".
    """
    columns = [column.split() for column in paper["columns"]]
    tasks = list(dict.fromkeys(task for task, metric in columns))

    def values(measured: dict) -> list[float]:
        scores = []
        for task, metric in columns:
            score = measured["parts"][task]["results"][task][f"{metric},none"]
            if metric.startswith("acc"):
                score *= 100
            scores.append(score)
        return scores

    return Experiment(
        title=title,
        unit="zero-shot scores",
        entries=SOFTMAX_AND_LSSAR,
        columns=tuple(paper["columns"]),
        better=tuple("lower" if metric == "perplexity" else "higher" for _, metric in columns),
        digits=2,
        evaluation=lambda config: Downstream(tasks=",".join(tasks)),
        values=values,
        paper=paper,
        paper_scale=scale,
    )


def passkeys(title: str, entries: Entries, draw: Draw = pictures.together) -> Experiment:
    """Measure how many passkeys are retrieved, in percent."""

    def multiples(config: Config) -> Multiples:
        return tuple(length / config.block_size for length in PasskeyRetrieval().lengths_of(config))

    return Experiment(
        title=title,
        unit="passkeys found (%)",
        entries=entries,
        multiples=multiples,
        better="higher",
        digits=1,
        evaluation=lambda config: PasskeyRetrieval(),
        values=all_accuracies,
        draw=draw,
        paper=LSSAR["passkey"],
        note=(
            "Of 100 trials: a value near 50 has a standard error of 5, whatever the seeds. Lengths "
            "are multiples of the training length, or of its least multiple that fits a prompt."
        ),
    )


def all_accuracies(measured: dict) -> list[float]:
    """Return the accuracy in percent at each length."""
    return list(accuracies(measured).values())


# ---- recall ----


def recall(
    title: str,
    entries: Entries,
    multiples: Multiples,
    values: Callable[[dict], Sequence[float | None]],
    task: str = "recall",
    draw: Draw = pictures.together,
    **more: Any,
) -> Experiment:
    """Measure recall by length, in percent."""
    return Experiment(
        title=title,
        unit=PERCENT,
        entries=entries,
        multiples=multiples,
        digits=1,
        evaluation=lambda config: Recall(lengths=all_in_tokens(multiples, config)),
        values=values,
        draw=draw,
        remarks=recall_remarks,
        task=task,
        **more,
    )


def accuracies_if_learned(measured: dict) -> list[float | None]:
    """Return the accuracy in percent at each length; if the task is not learned, only at 1x.

    With another p or attention, which may lower the accuracy at 1x, all are returned.
    """
    known = has_learned(measured) or measured.get("changed")
    trained = measured["trained_length"]
    shares = accuracies(measured).items()
    return [share if known or length == trained else None for length, share in shares]


def recall_remarks(table: dict) -> list[str]:
    """State the level of chance and the error of sampling, and list the accuracies by seed."""
    sentences = [chance_sentence(table), *accuracy_by_seed(table)]
    measured = pictures.first_measurement(table)
    if measured["recall"] != "sort":  # where the answers of a sequence depend on each other
        answers = measured["answers"]
        error = 50 / math.sqrt(answers)
        sentences.append(f"Of {answers} answers, 50% has a standard error of {error:.1f}.")
    return sentences


def chance_sentence(table: dict) -> str:
    """State how often a model is right that matches no key."""
    measured = pictures.first_measurement(table)
    meaning = chance_label(measured["recall"])
    levels = [f"{level:.1f}" for level in chances(measured, pictures.lengths_of(table))]
    if len(set(levels)) == 1:
        return f"Chance (dashed) is {levels[0]} at every length: {meaning}."
    multiples = [f"{multiple:g}x" for multiple in table["multiples"]]
    return f"Chance (dashed) is {', '.join(levels)} at {', '.join(multiples)}: {meaning}."


def accuracy_by_seed(table: dict) -> list[str]:
    """List the accuracy of each seed at 16x or less, and the entries that have not learned."""
    multiples = table["multiples"]
    column = up_to_16x(table)
    longest = multiples[column]
    learned_rows = {}
    other_rows = {}
    for name, row in table["rows"].items():
        if row["mean"][column] is None:
            other_rows[name] = row
        else:
            learned_rows[name] = row
    sentences = []
    if learned_rows:
        sentences.append(f"At {longest:g}x, by seed: {each_seed(table, column, learned_rows)}.")
    if other_rows:
        steps = ranged([run["step"] for row in other_rows.values() for run in row["runs"]])
        sentences.append(
            f"Not learned in {steps} steps, as a seed has less than {LEARNED_AT} at 1x (other "
            "learning rates or more steps may change that); at 1x, by seed: "
            f"{each_seed(table, multiples.index(1), other_rows)}."
        )
    return sentences


def each_seed(table: dict, column: int, rows: dict[str, dict]) -> str:
    """List these rows of the table with their values in a column, by seed."""
    descriptions = []
    for name, row in rows.items():
        values = [cell(table, summarise([run]), column) for run in row["runs"]]
        descriptions.append(f"`{name}` {', '.join(values)}")
    return "; ".join(descriptions)
