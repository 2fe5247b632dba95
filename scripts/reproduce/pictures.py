"""Pictures of a table: functions of the table that return a figure, or several by file name."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping

from matplotlib.figure import Figure

from scripts import eval_length
from scripts.attention_maps import AttentionMaps
from scripts.common.plots import Curve, draw_curves
from scripts.common.tables import SIDES
from scripts.physics import plot_forces
from scripts.reproduce.rows import split_p

Pictures = Figure | dict[str, Figure]
SLIDING = "sliding window of 1x"
THIN = f"thin: {SLIDING}, plain RoPE"
PAPER = "the paper's"
LENGTH = "length, in multiples of the training length"


def first_seeds(table: dict) -> dict[str, dict]:
    """Table row -> the evaluation of its first seed."""
    return {name: entry["runs"][0]["evaluation"] for name, entry in table["rows"].items()}


def title_of(table: dict) -> str:
    """The scale, and the first seed if there are seeds."""
    seed = next(iter(table["rows"].values()))["runs"][0]["seed"]
    return table["scale"] if seed is None else f"seed {seed}, {table['scale']}"


# ---- means over seeds, and their range ----


def losses_at(measured: dict, lengths: Iterable[int]) -> list[float]:
    """The losses of a measurement of scripts.eval_length at these of its lengths."""
    losses = dict(zip(measured["lengths"], measured["loss"], strict=True))
    return [losses[length] for length in lengths]


def control_of(entry: dict, multiples: list[float] | None) -> list[float] | None:
    """The mean loss of a table row's control at each multiple of the training length."""
    known = [run["evaluation"].get("control") for run in entry["runs"]]
    if not multiples or not known or not all(known):
        return None
    lengths = [round(multiple * known[0]["trained_length"]) for multiple in multiples]
    losses = [losses_at(control, lengths) for control in known]
    return [statistics.mean(column) for column in zip(*losses, strict=True)]


def over_length(table: dict, panels: Mapping[str, Mapping[str, str]]) -> Figure:
    """A panel for each {title: {table row: label}}: loss over length; thin: the controls.

    The panel "the paper's" has the paper's values.
    """
    x = table["multiples"]
    curves: dict[str, list[Curve]] = {}
    for title, names in panels.items():
        shown = curves[title] = []
        for name, label in names.items():
            entry = table["rows"][name]
            if title == PAPER:
                values = [math.nan if value is None else value for value in entry["paper"]]
                shown.append(Curve(label, x, values[: len(x)]))
                continue
            shown.append(Curve(label, x, *(entry[side][: len(x)] for side in SIDES)))
            if control := control_of(entry, x):
                shown.append(Curve(label, x, control, thin=True))
    ticks = {multiple: f"{multiple:g}x" for multiple in x}
    thin = THIN if any(curve.thin for shown in curves.values() for curve in shown) else ""
    return draw_curves(curves, LENGTH, table["unit"], log="x", ticks=ticks, thin=thin)


def beside_the_paper(table: dict) -> Figure:
    """Our curves over length, and the paper's."""
    ours = {name: name for name in table["rows"]}
    papers = {name: name for name, entry in table["rows"].items() if entry["paper"]}
    title = f"ours: {table['scale']}"
    return over_length(table, {title: ours} | ({PAPER: papers} if papers else {}))


def grouped(of: Callable[[str], Iterable[tuple[str, str]]]) -> Callable[[dict], Figure]:
    """A panel for each title, where `of` gives the titles and labels of a table row's name."""

    def draw(table: dict) -> Figure:
        groups: dict[str, dict[str, str]] = {}
        for name in table["rows"]:
            for title, label in of(name):
                groups.setdefault(title, {})[name] = label
        return over_length(table, groups)

    return draw


def by_run(name: str) -> list[tuple[str, str]]:
    run, _, view = name.partition(":")
    return [(run, view or "as trained")]


def by_stage(name: str) -> list[tuple[str, str]]:
    variant, p = split_p(name)
    return [("not re-weighted" if p is None else f"re-weighted, p = {p:g}", variant)]


def by_block(name: str) -> list[tuple[str, str]]:
    t6, swiglu = name.startswith("t6"), name.endswith("_swiglu")
    kind = "T6" if t6 else "T6's blocks, linear projections" if swiglu else "GPT-2"
    return [(kind, name.removesuffix("_swiglu").removeprefix("t6").strip("_") or "softmax")]


def by_kind(kinds: Mapping[str, Iterable[str]]) -> Callable[[str], list[tuple[str, str]]]:
    """The kinds that have a table row, or its variant with another p."""
    variants = {kind: {split_p(name)[0] for name in names} for kind, names in kinds.items()}
    return lambda name: [(kind, name) for kind, v in variants.items() if split_p(name)[0] in v]


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
    ticks = {p: f"{p:g}" for _, p in powers.values() if p}
    return draw_curves(panels, "p", table["unit"], "x", ticks) if panels else {}


# ---- the first seed ----


def lines(
    x: str, y: str, log: str = "", equal_weights: bool = False, mark: float | None = None
) -> Callable[[dict], Figure]:
    """The curves of the table rows, a panel for each name of a curve.

    `log` names the axes that are logarithmic; `mark` is a place on the x axis.
    """

    def draw(table: dict) -> Figure:
        panels: dict[str, list[Curve]] = {}
        for name, measured in first_seeds(table).items():
            for title, (xs, ys) in measured["curves"].items():
                panels.setdefault(title, []).append(Curve(name, xs, ys))
        for curves in panels.values() if equal_weights else ():
            xs = curves[0].x
            curves.append(Curve("equal weights", xs, [math.log(n) for n in xs]))
        titled = {", ".join(filter(None, (t, title_of(table)))): c for t, c in panels.items()}
        return draw_curves(titled, x, y, log, marks=[] if mark is None else [mark], sharey=False)

    return draw


def maps(table: dict) -> Pictures:
    """LSSAR Fig. A1: the attention maps of the first seed of each table row."""
    pictures: dict[str, Figure] = {}
    for name, measured in first_seeds(table).items():
        evaluation = AttentionMaps(rope=measured["rope"], dtype=measured["dtype"])
        if figure := evaluation.picture(measured["folder"], measured):
            pictures[f"{name}.png"] = figure
    return pictures


def positions(table: dict) -> Figure:
    """SSMax Fig. 5: loss over positions."""
    figure = eval_length.plot(list(first_seeds(table).items()), by_position=True)
    figure.suptitle(title_of(table), fontsize="medium")
    return figure


def forces(table: dict) -> Pictures:
    """LSSAR Figs. 1 and A7: the Earth, and the other planets."""
    found = {name: one["parts"]["vectors"]["planets"] for name, one in first_seeds(table).items()}
    earth = {name: {"Earth": planets["Earth"]} for name, planets in found.items()}
    others = {
        name: {planet: one for planet, one in planets.items() if planet != "Earth"}
        for name, planets in found.items()
    }
    return {"earth.png": plot_forces(earth), "planets.png": plot_forces(others)}
