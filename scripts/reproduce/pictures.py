"""Pictures of a table: functions of the table that return a figure, or several by file name."""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure

from scripts import eval_length
from scripts.attention_maps import AttentionMaps
from scripts.common.plots import STYLES, Curve, draw_curves, heat_map
from scripts.common.tables import ranged
from scripts.physics import plot_forces
from scripts.recall import chance_label, chances
from scripts.reproduce.entries import Entry
from scripts.reproduce.measure import Pictures

SLIDING = "sliding window of at most 1x"
APART = ", apart"  # ends the names of columns of losses within documents
LENGTH = "tokens, in multiples of the training length"

Draw = Callable[[dict], Pictures]
Panels = Mapping[str, Mapping[str, Entry]]  # title -> label of a curve -> entry


# ---- means over seeds, and their standard deviation ----


def curves_of(table: dict, label: str, summary: dict) -> list[Curve]:
    """Return the curve over length of a summary over seeds, and of its control, which is thin."""
    x = table["multiples"]
    mean = summary["mean"][: len(x)]
    curves = [with_band(table, label, x, mean, summary["deviation"][: len(x)])]
    control = control_losses(table, summary["runs"])
    if control:
        curves.append(Curve(label, x, control, style="thin"))
    return curves


def committed_curves(table: dict) -> list[Curve]:
    """Return the curves of the committed rows that the table has beside its own."""
    if "beside" not in table:
        return []
    x = table["multiples"]
    rows = table["beside"]["rows"].values()
    label = f"{table['beside']['folder']}, {len(rows)} rows"
    curves = []
    for row in rows:
        curves.append(Curve(label, x, row["mean"][: len(x)], style="behind"))
    return curves


def with_band(
    table: dict,
    label: str,
    x: Sequence[float],
    mean: Sequence[float | None],
    deviation: Sequence[float | None],
) -> Curve:
    """Return a curve of means; single seeds have no band."""
    if all(value is None for value in deviation):
        return Curve(label, x, mean)
    seeds = ranged([len(row["runs"]) for row in table["rows"].values()])
    band = f"± standard deviation, n = {seeds}"
    return Curve(label, x, mean, deviation, band=band)


def lengths_of(table: dict) -> list[int]:
    """Return the lengths of a table in tokens, from columns such as "4x, 2,048"."""
    columns = table["columns"][: len(table["multiples"])]
    return [int(column.partition(", ")[2].replace(",", "")) for column in columns]


def control_losses(table: dict, runs: Sequence[dict]) -> list[float]:
    """Return the losses of the control at each length, means over runs; empty without a control."""
    # losses across and within documents: their control was measured in one of the two ways alone
    if any(column.endswith(APART) for column in table["columns"]):
        return []
    losses = []
    for run in runs:
        control = run.get("evaluation", {}).get("control", {})
        if "loss" in control:  # in some committed tables at other lengths too
            loss_at = dict(zip(control["lengths"], control["loss"], strict=True))
            losses.append([loss_at[length] for length in lengths_of(table)])
    return [statistics.mean(column) for column in zip(*losses, strict=True)]


def level_of_chance(table: dict) -> list[Curve]:
    """Return the accuracy of a model that matches no key; nothing if the table is not of recall."""
    measured = first_measurement(table)
    if "recall" not in measured:
        return []
    label = f"chance: {chance_label(measured['recall'])}"
    levels = chances(measured, lengths_of(table))
    return [Curve(label, table["multiples"], levels, style="reference")]


def together(table: dict, xlabel: str = LENGTH) -> Figure:
    """Draw a panel of all entries, one of the paper's values, and one of the differences.

    The level of chance is a dashed line. Committed rows are behind the entries. More entries than
    line styles are drawn in a panel for each config, if a config has several entries.
    """
    names = table["rows"]
    configs = {config_of(name) for name in names}
    if len(names) > STYLES and 2 * len(configs) <= len(names):
        return by_config(table)
    x = table["multiples"]
    own = committed_curves(table)
    paper = []
    differences = []
    for name, row in table["rows"].items():
        own += curves_of(table, name, row)
        if row["paper"]:
            paper.append(Curve(name, x, row["paper"][: len(x)]))
        if "difference" in row:
            differences += curves_of(table, name, row["difference"])
    chance = level_of_chance(table)
    panels = {f"scale {table['scale']}": own + chance}
    sharey = True
    if paper:
        panels["the paper's"] = paper + chance
        sharey = table["same_tokens"]  # nats per token of two tokenizers have other scales
    if differences:
        panels[f"minus {table['baseline']}, with the same seed"] = differences
        sharey = False
    return draw_curves(panels, xlabel, table["unit"], "x", sharey=sharey)


def config_of(name: str) -> str:
    """Return the config of an entry of scripts.compare, whose settings and view follow it."""
    return re.split("[,:]", name)[0]


def by_config(table: dict) -> Figure:
    """Draw a panel for each config, and its entries by their settings and views."""
    curves_in: dict[str, list[Curve]] = {}
    for name, row in table["rows"].items():
        config = config_of(name)
        label = name.removeprefix(config)[1:] or config
        curves_in.setdefault(config, []).extend(curves_of(table, label, row))
    behind = committed_curves(table) + level_of_chance(table)
    panels = {config: curves + behind for config, curves in curves_in.items()}
    return draw_curves(panels, LENGTH, table["unit"], "x")


def in_panels(panels: Panels) -> Callable[[dict], Figure]:
    """Draw the entries of each panel that the table has; an entry may be in several panels."""

    def draw(table: dict) -> Figure:
        rows = table["rows"]
        curves_in: dict[str, list[Curve]] = {}
        for title, entries in panels.items():
            curves = []
            for label, entry in entries.items():
                if entry.name in rows:
                    curves += curves_of(table, label, rows[entry.name])
            if curves:
                curves_in[title] = curves + level_of_chance(table)
        return draw_curves(curves_in, LENGTH, table["unit"], "x")

    return draw


def over_p(panels: Mapping[str, Mapping[float, Entry]]) -> Draw:
    """Draw a panel of entries by p for each variant, a curve for each column but the gain."""

    def draw(table: dict) -> Pictures:
        curves_in: dict[str, list[Curve]] = {}
        for variant, entries in panels.items():
            rows = {}
            for p, entry in entries.items():
                if entry.name in table["rows"]:
                    rows[p] = table["rows"][entry.name]
            if not rows:
                continue
            curves_in[variant] = []
            for i, column in enumerate(table["columns"]):
                if table["better"][i] == "lower":
                    mean = [row["mean"][i] for row in rows.values()]
                    deviation = [row["deviation"][i] for row in rows.values()]
                    curve = with_band(table, column, list(rows), mean, deviation)
                    curves_in[variant].append(curve)
        if not curves_in:  # a table of the variants without p alone
            return {}
        return draw_curves(curves_in, "p", table["unit"], "x")

    return draw


def recall_pictures(positions: Panels, others: Panels) -> Draw:
    """Draw a map of normalisers by positions at 16x, and curves by length.

    The curves are of entries whose seeds have all learned the task. `positions` have the same
    normalisers each; `others` are curves only.
    """
    by_length = in_panels({**positions, **others})

    def draw(table: dict) -> Pictures:
        rows = table["rows"]
        learned = {name: row for name, row in rows.items() if None not in row["mean"]}
        if not learned:
            return {}
        pictures = {"recall_by_length.png": by_length(table | {"rows": learned})}
        at_16x = recall_at_16x(table, positions)
        if at_16x is not None:
            pictures["recall.png"] = at_16x
        return pictures

    return draw


def recall_at_16x(table: dict, positions: Panels) -> Figure | None:
    """Draw normalisers by positions; returns None if the table has none of their entries."""
    column = table["multiples"].index(16)
    means = {name: row["mean"][column] for name, row in table["rows"].items()}
    shares: dict[str, list[float | None]] = {}
    for normaliser in next(iter(positions.values())):
        names = [entries[normaliser].name for entries in positions.values()]
        if means.keys().isdisjoint(names):
            continue
        shares[normaliser] = []
        for name in names:
            mean = means.get(name)
            shares[normaliser].append(None if mean is None else mean / 100)
    if not shares:
        return None
    title = f"recall at {table['columns'][column]} tokens; grey: not learned, or not run"
    across = [name.replace(" ", "\n") for name in positions]
    return heat_map(title, shares, across, table["unit"], xlabel="", ylabel="")


# ---- the first seed ----


def first_seeds(table: dict) -> dict[str, dict]:
    """Return the evaluation of the first seed of each entry."""
    return {name: row["runs"][0]["evaluation"] for name, row in table["rows"].items()}


def first_measurement(table: dict) -> dict:
    """Return the evaluation of the first seed of the first entry."""
    return next(iter(first_seeds(table).values()))


def lines(x: str, y: str, log: str = "", equal_weights: bool = False) -> Draw:
    """Draw the curves of the entries, a panel for each name of a curve.

    `log` names the logarithmic axes; `equal_weights` adds the entropy of n equal weights.
    """

    def draw(table: dict) -> Figure:
        panels: dict[str, list[Curve]] = {}
        for name, measured in first_seeds(table).items():
            for title, (xs, ys) in measured["curves"].items():
                panels.setdefault(title, []).append(Curve(name, xs, ys))
        if equal_weights:
            for curves in panels.values():
                xs = curves[0].x
                curves.append(Curve("equal weights", xs, [math.log(n) for n in xs]))
        return draw_curves(panels, x, y, log, sharey=False)

    return draw


def maps(table: dict) -> Pictures:
    """LSSAR Fig. A1: draw the attention maps of the first seed of each entry."""
    pictures: dict[str, Figure] = {}
    for name, row in table["rows"].items():
        run = row["runs"][0]
        measured = run["evaluation"]
        evaluation = AttentionMaps(
            device=table["device"],
            dtype=measured["dtype"],
            attention_impl=measured["attention_impl"],
            rope=measured["rope"],
        )
        figure = evaluation.draw_run(run["run"], measured)
        if figure is not None:
            pictures[f"{name}.png"] = figure
    return pictures


def loss_over_positions(table: dict) -> Figure:
    """SSMax Fig. 5: draw the loss over positions."""
    title = f"scale {table['scale']}"
    return eval_length.plot(first_seeds(table), title, by_position=True)


def forces(table: dict) -> Figure:
    """LSSAR Figs. 1 and A7: draw the force on each planet."""
    return plot_forces(first_seeds(table))
