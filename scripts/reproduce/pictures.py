"""Pictures of a table: functions of the table that return a figure, or several by file name."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping

from matplotlib.figure import Figure

from scripts import eval_length
from scripts.attention_maps import MapOptions, draw_run
from scripts.common.plots import THIN, Curve, draw_curves, heat_map
from scripts.common.tables import SIDES
from scripts.physics import plot_forces
from scripts.reproduce.entries import NORMALISERS, split_p
from scripts.reproduce.measure import Pictures

SLIDING = "sliding window of 1x"
PAPER = "the paper's"
DIFFERENCE = "minus the first entry, with the same seed"
LENGTH = "tokens, in multiples of the training length"
# The entries of recall by the pattern of their names, and what their positions are called.
RECALL_POSITIONS = {
    "{}": "RoPE, scaled", "{}:plain_rope": "RoPE, plain", "{}_nope": "no positions",
    "{}_alibi": "ALiBi", "hybrid_{}:plain_rope": "hybrid",
}  # fmt: skip


def first_seeds(table: dict) -> dict[str, dict]:
    """Entry -> the evaluation of its first seed."""
    return {name: entry["runs"][0]["evaluation"] for name, entry in table["rows"].items()}


# ---- means over seeds, and their range ----


def over_length(table: dict, panels: Mapping[str, Mapping[str, dict]]) -> Figure:
    """A panel for each {title: {label: summary over seeds}}: loss over length; thin: controls."""
    x = table["multiples"]
    curves: dict[str, list[Curve]] = {title: [] for title in panels}
    for title, summaries in panels.items():
        for label, summary in summaries.items():
            known = (summary[side][: len(x)] for side in SIDES if side in summary)
            sides = [[math.nan if v is None else v for v in values] for values in known]
            curves[title].append(Curve(label, x, *sides))
            runs = [run.get("evaluation", {}) for run in summary.get("runs", [])]
            losses = [run["control"]["loss"] for run in runs if "loss" in run.get("control", {})]
            if losses:
                means = [statistics.mean(column) for column in zip(*losses, strict=True)]
                curves[title].append(Curve(label, x, means, thin=True))
    alike = DIFFERENCE not in panels
    return draw_curves(curves, LENGTH, table["unit"], "x", THIN, sharey=alike)


def together(table: dict) -> Figure:
    """All entries in one panel; in others the paper's values, and differences from the baseline."""
    rows = table["rows"]
    panels = {
        f"scale {table['scale']}": rows,
        PAPER: {name: {"mean": entry["paper"]} for name, entry in rows.items() if entry["paper"]},
        DIFFERENCE: {n: entry["difference"] for n, entry in rows.items() if "difference" in entry},
    }
    return over_length(table, {title: shown for title, shown in panels.items() if shown})


Places = Callable[[str], list[tuple[str, str]]]  # the panels and labels of an entry, by its name


def grouped(of: Places) -> Callable[[dict], Figure]:
    """A panel for each title of `of`."""

    def draw(table: dict) -> Figure:
        groups: dict[str, dict[str, dict]] = {}
        for name, entry in table["rows"].items():
            for title, label in of(name):
                groups.setdefault(title, {})[label] = entry
        return over_length(table, groups)

    return draw


def by_run(name: str) -> list[tuple[str, str]]:
    run, _, view = name.partition(":")
    return [(run, view or "as trained")]


def by_stage(name: str) -> list[tuple[str, str]]:
    variant, p = split_p(name)
    return [("not re-weighted" if p is None else f"re-weighted, p = {p:g}", variant)]


def by_kind(kinds: Mapping[str, Iterable[str]]) -> Places:
    return lambda name: [(kind, name) for kind, names in kinds.items() if name in names]


def recall(table: dict) -> Pictures:
    """Normalisers by positions at 16x, and curves by length; of entries whose seeds all learned."""
    learned = {name: one for name, one in table["rows"].items() if None not in one["mean"]}
    if not learned:
        return {}
    at = table["multiples"].index(16)
    places: dict[str, tuple[str, str]] = {}
    shares: dict[str, list[float | None]] = {}
    for one in NORMALISERS:
        names = {form.format(one): title for form, title in RECALL_POSITIONS.items()}
        places |= {name: (title, one) for name, title in names.items()}
        if table["rows"].keys() & names:  # run, learned or not
            shares[one] = [learned[n]["mean"][at] / 100 if n in learned else None for n in names]
    title = f"recall at {table['columns'][at]} tokens; grey: not learned, or not run"
    across = [title.replace(" ", "\n") for title in RECALL_POSITIONS.values()]
    by_length = grouped(lambda name: [places.get(name, ("others", name))])
    pictures = {"recall_by_length.png": by_length(table | {"rows": learned})}
    if shares:
        pictures["recall.png"] = heat_map(title, shares, across, table["unit"], "", "")
    return pictures


def loss_over_p(table: dict) -> Pictures:
    """A panel for each variant with a p, a curve over p for each column but the gain."""
    powers = {name: split_p(name) for name in table["rows"]}
    panels: dict[str, list[Curve]] = {}
    for variant in dict.fromkeys(variant for variant, p in powers.values() if p):
        members = sorted((p, name) for name, (v, p) in powers.items() if v == variant and p)
        ps, entries = [p for p, _ in members], [table["rows"][name] for _, name in members]
        panels[variant] = [
            Curve(column, ps, *([entry[side][i] for entry in entries] for side in SIDES))
            for i, column in enumerate(table["columns"])
            if table["better"][i] == "lower"
        ]
    return draw_curves(panels, "p", table["unit"], "x") if panels else {}


# ---- the first seed ----


def lines(x: str, y: str, log: str = "", equal_weights: bool = False) -> Callable[[dict], Figure]:
    """The curves of the entries, a panel for each name of a curve.

    `log` names the logarithmic axes; `equal_weights` adds the entropy of n equal weights.
    """

    def draw(table: dict) -> Figure:
        panels: dict[str, list[Curve]] = {}
        for name, measured in first_seeds(table).items():
            for title, (xs, ys) in measured["curves"].items():
                panels.setdefault(title, []).append(Curve(name, xs, ys))
        for curves in panels.values() if equal_weights else ():
            xs = curves[0].x
            curves.append(Curve("equal weights", xs, [math.log(n) for n in xs]))
        return draw_curves(panels, x, y, log, sharey=False)

    return draw


def maps(table: dict) -> Pictures:
    """LSSAR Fig. A1: the attention maps of the first seed of each entry."""
    pictures: dict[str, Figure] = {}
    for name, (run, *_) in ((name, entry["runs"]) for name, entry in table["rows"].items()):
        measured = run["evaluation"]
        options = MapOptions(rope=measured["rope"], dtype=measured["dtype"])
        if figure := draw_run(options, run["run"], measured):
            pictures[f"{name}.png"] = figure
    return pictures


def positions(table: dict) -> Figure:
    """SSMax Fig. 5: loss over positions."""
    return eval_length.plot(first_seeds(table), table["scale"], by_position=True)


def forces(table: dict) -> Figure:
    """LSSAR Figs. 1 and A7: the force on each planet."""
    return plot_forces(first_seeds(table))
