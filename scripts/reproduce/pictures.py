"""Pictures of a table: functions of the table that return figures by file name."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention import VARIANTS
from errors import UserError
from runtime.files import read_json
from scripts import eval_length, needle
from scripts.common.plots import add_legend, panels, plot_band, row_style, show_equal_curves
from scripts.common.tables import SIDES
from scripts.physics import plot_forces
from scripts.reproduce.rows import split_p

Pictures = dict[str, Figure | Path]
SLIDING = "sliding window of 1x"
THIN = f"thin: {SLIDING}, plain RoPE"


def first_seeds(table: dict) -> dict[str, dict]:
    """Table row -> the evaluation of its first seed."""
    return {name: entry["runs"][0]["evaluation"] for name, entry in table["rows"].items()}


def title_of(table: dict) -> str:
    """The scale, and the first seed if there are seeds."""
    seed = next(iter(table["rows"].values()))["runs"][0]["seed"]
    return table["scale"] if seed is None else f"seed {seed}, {table['scale']}"


# ---- over length ----


def losses_at(measured: dict, lengths: Iterable[int]) -> list[float]:
    """The losses of a measurement of scripts.eval_length at some of its lengths."""
    losses = dict(zip(measured["lengths"], measured["loss"], strict=True))
    return [losses[length] for length in lengths]


def controls(table: dict) -> dict[str, list[float]]:
    """Table row -> the mean loss of its control at each multiple of the training length."""
    means = {}
    for name, entry in table["rows"].items():
        known = [run["evaluation"].get("control") for run in entry["runs"]]
        if table["multiples"] and known and all(known):
            lengths = [
                round(multiple * known[0]["trained_length"]) for multiple in table["multiples"]
            ]
            if all(set(lengths) <= set(control["lengths"]) for control in known):
                losses = [losses_at(control, lengths) for control in known]
                means[name] = [statistics.mean(column) for column in zip(*losses, strict=True)]
    return means


def over_length(parts: Sequence[tuple[str, dict, dict[str, str]]]) -> Figure:
    """A panel for each (title, table, {table row: label}): means over length, and their range.

    Thin curves are the controls. A label has the same style in all panels.
    """
    figure, all_axes = panels(len(parts), sharey=True)
    labels = list(dict.fromkeys(label for _, _, names in parts for label in names.values()))
    for (title, table, names), axes in zip(parts, all_axes, strict=True):
        x, control = table["multiples"], controls(table)
        for name, label in names.items():
            style = row_style(labels.index(label))
            plot_band(
                axes, x, [table["rows"][name][side][: len(x)] for side in SIDES], label, style
            )
            if name in control:
                axes.plot(x, control[name], color=style["color"], linewidth=0.7, alpha=0.8)
        if control:
            axes.plot([], [], color="0.3", linewidth=0.7, label=THIN)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{multiple:g}x" for multiple in x])
        axes.set_xlabel("length, in multiples of the training length")
        axes.set_ylabel(table["unit"])
        if "%" in table["unit"]:
            axes.set_ylim(-3, 103)
        finish(axes, title)
    add_legend(figure)
    return figure


def finish(axes: Axes, title: str) -> None:
    axes.minorticks_off()
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    show_equal_curves(axes)


def beside_the_paper(table: dict) -> Pictures:
    """Our curves over length, and the paper's."""
    names = {name: name for name in table["rows"]}
    parts = [(f"ours: {table['scale']}", table, names)]
    paper = {
        name: [math.nan if value is None else value for value in entry["paper"]]
        for name, entry in table["rows"].items()
        if entry["paper"]
    }
    if paper:
        entries = {
            name: dict.fromkeys(SIDES, values) | {"runs": []} for name, values in paper.items()
        }
        shown = {name: name for name in paper}
        parts.append((f"the paper's ({table['paper_scale']})", table | {"rows": entries}, shown))
    return {f"{table['name']}.png": over_length(parts)}


def draw_groups(table: dict, groups: Mapping[str, dict[str, str]]) -> Pictures:
    """A panel for each group {title: {table row: label}}."""
    parts = [(f"{title}, {table['scale']}", table, names) for title, names in groups.items()]
    return {f"{table['name']}.png": over_length(parts)}


def grouped(of: Callable[[str], tuple[str, str]]) -> Callable[[dict], Pictures]:
    """A panel for each title, where `of` gives the title and the label of a table row's name."""

    def draw(table: dict) -> Pictures:
        groups: dict[str, dict[str, str]] = {}
        for name in table["rows"]:
            title, label = of(name)
            groups.setdefault(title, {})[name] = label
        return draw_groups(table, groups)

    return draw


def by_run(name: str) -> tuple[str, str]:
    run, _, view = name.partition(":")
    return run, view or "as trained"


def by_stage(name: str) -> tuple[str, str]:
    variant, p = split_p(name)
    return "not re-weighted" if p is None else f"re-weighted, p = {p:g}", variant


def by_block(name: str) -> tuple[str, str]:
    t6, swiglu = name.startswith("t6"), name.endswith("_swiglu")
    kind = "T6" if t6 else "T6's blocks, linear projections" if swiglu else "GPT-2"
    return kind, name.removesuffix("_swiglu").removeprefix("t6").strip("_") or "softmax"


def by_kind(table: dict, kinds: Mapping[str, Sequence[str]]) -> dict[str, dict[str, str]]:
    """The table rows of each kind of attention; a variant with another p joins its kinds."""
    placed = {name for names in kinds.values() for name in names}
    groups = {}
    for kind, names in kinds.items():
        variants = {split_p(name)[0] for name in names}
        added = {name for name in table["rows"] if split_p(name)[0] in variants} - placed
        groups[kind] = {name: name for name in table["rows"] if name in {*names, *added}}
    more = {kind: names for kind, names in groups.items() if names.keys() - {"softmax"}}
    return more or groups


def league(kinds: Mapping[str, Sequence[str]]) -> Callable[[dict], Pictures]:
    """A panel for each kind of attention over length, and a picture of each by position."""

    def draw(table: dict) -> Pictures:
        groups = by_kind(table, kinds)
        pictures = draw_groups(table, groups)
        for kind, names in groups.items():
            word = kind.replace(" ", "_").replace("'", "")
            members = {name: table["rows"][name] for name in names}
            pictures |= positions(table | {"name": f"by_position_{word}", "rows": members})
        return pictures

    return draw


def scales_side_by_side(folder: Path, table: dict, scales: Sequence[str]) -> Pictures:
    """LSSAR Fig. A2: a panel for each scale that has this table in RESULTS/SCALE/NAME.

    No picture where fewer than two of the scales have the table.
    """
    files = {one: folder.parents[1] / one / table["name"] / "table.json" for one in scales}
    tables = {
        one: table if one == table["scale"] else read_json(file) for one, file in files.items()
    }
    parts = [(one, t, {name: name for name in t["rows"]}) for one, t in tables.items() if t]
    return {f"{table['name']}_scales.png": over_length(parts)} if len(parts) > 1 else {}


def loss_over_p(table: dict) -> Pictures:
    """A panel for each variant with a p, a curve over p for each length.

    Dashed: the variant without re-weighting. Dotted: the control at the longest length.
    """
    powers = {name: split_p(name) for name in table["rows"]}
    variants = list(dict.fromkeys(variant for variant, p in powers.values() if p is not None))
    if not variants:
        return {}
    figure, all_axes = panels(len(variants), sharey=True)
    control, lengths = controls(table), range(len(table["multiples"]))
    for variant, axes in zip(variants, all_axes, strict=True):
        members = sorted((p, name) for name, (v, p) in powers.items() if v == variant and p)
        ps, entries = [p for p, _ in members], [table["rows"][name] for _, name in members]
        without = replace(VARIANTS[variant], needs_p=False)
        plain = next((name for name in table["rows"] if VARIANTS.get(name) == without), None)
        for i in lengths:
            style = row_style(i)
            band = [[entry[side][i] for entry in entries] for side in SIDES]
            plot_band(axes, ps, band, table["columns"][i], style)
            if plain:
                level = table["rows"][plain]["mean"][i]
                axes.axhline(level, color=style["color"], linestyle="--", linewidth=0.8)
        if len(lengths) > 1 and all(name in control for _, name in members):
            last = [control[name][-1] for _, name in members]
            axes.plot(ps, last, color=style["color"], linestyle=":", label=f"{SLIDING}, plain RoPE")
        axes.plot([], [], color="0.3", linestyle="--", linewidth=0.8, label="without re-weighting")
        axes.set_xscale("log")
        axes.set_xticks(ps, [f"{p:g}" for p in ps])
        axes.set_xlabel("p")
        axes.set_ylabel(table["unit"])
        finish(axes, f"{variant}, {table['scale']}")
    add_legend(figure)
    return {f"{table['name']}.png": figure}


# ---- a panel for each column ----


def dots(truths: Mapping[str, float | None] | None = None) -> Callable[[dict], Pictures]:
    """A panel for each column: every seed of each table row, and the paper's value.

    The values are relative to softmax; where the truth of the columns is known, absolute.
    """

    def draw(table: dict) -> Pictures:
        names, columns = list(table["rows"]), table["columns"]
        softmax, ratio = table["rows"].get("softmax"), table["compare"] == "ratio"
        if truths is None and softmax is None:
            return {}
        across = min(4 if truths is None else 5, len(columns))
        down = -(-len(columns) // across)
        size = max(6.4, 2.8 * across), 1 + down * (1.2 + 0.35 * len(names))
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(down, across, sharey=True, squeeze=False)

        def relative(value: float, base: dict | None, side: str, i: int) -> float:
            if truths is not None or base is None:
                return value
            return value / base[side][i] if ratio else value - base[side][i]

        for i, (column, axes) in enumerate(zip(columns, grid.flat, strict=False)):
            for y, entry in enumerate(table["rows"].values()):
                ours = [relative(run["values"][i], softmax, "mean", i) for run in entry["runs"]]
                axes.plot(
                    ours, [y] * len(ours), "o", color="C0", alpha=0.7, label="ours, each seed"
                )
                if truths is None and entry["paper"] and entry["paper"][i] is not None:
                    paper = relative(entry["paper"][i], softmax, "paper", i)
                    axes.plot(paper, y, "D", color="C1", mfc="none", label="the paper's")
            more = "" if truths is not None else "\nover softmax" if ratio else "\nminus softmax"
            line = float(ratio) if truths is None else truths[column]
            if line is not None:
                axes.axvline(line, color="0.6", linewidth=1)
            axes.set_xlabel(f"{column}{more}", fontsize=8)
            axes.grid(alpha=0.3)
        for axes in grid.flat[len(columns) :]:
            axes.axis("off")
        grid[0, 0].set_yticks(range(len(names)), names)
        grid[0, 0].set_ylim(len(names) - 0.5, -0.5)
        truth = "" if truths is None else "; line: the truth"
        figure.suptitle(f"{table['unit']}, scale {table['scale']}{truth}", fontsize="medium")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        figure.legend(
            unique.values(), unique, loc="outside lower center", ncols=2, fontsize="small"
        )
        return {f"{table['name']}.png": figure}

    return draw


# ---- curves of the first seed ----


def lines(
    x: str,
    y: str,
    log: str = "",
    apart: bool = True,
    equal_weights: bool = False,
    mark: float | None = None,
) -> Callable[[dict], Pictures]:
    """The curves of the table rows, a panel for each name of a curve, or together.

    `log` names the axes that are logarithmic; `mark` is a place on the x axis.
    """

    def draw(table: dict) -> Pictures:
        curves = {name: one["curves"] for name, one in first_seeds(table).items()}
        titles = list(dict.fromkeys(title for one in curves.values() for title in one))
        figure, all_axes = panels(len(titles) if apart else 1)
        for i, (name, one) in enumerate(curves.items()):
            for title, points in one.items():
                place = titles.index(title)
                axes = all_axes[place if apart else 0]
                label = name if apart else f"{name}, {title}"
                style = row_style(i if apart else place) | {"markevery": 0.1}
                axes.plot(*points, label=label, **style)
        for title, axes in zip(titles if apart else [""], all_axes, strict=True):
            if "x" in log:
                axes.set_xscale("log")
            if "y" in log:
                axes.set_yscale("log")
                axes.set_ylim(bottom=max(1e-9, axes.get_ylim()[0]))
            if equal_weights:
                xs, _ = next(iter(curves.values()))[title]
                axes.plot(xs, [math.log(n) for n in xs], "--", color="0.3", label="equal weights")
            if mark is not None:
                axes.axvline(mark, color="0.6", linestyle=":", linewidth=1)
            axes.set_xlabel(x)
            axes.set_ylabel(y)
            finish(axes, f"{title}, {title_of(table)}" if title else title_of(table))
        add_legend(figure)
        return {f"{table['name']}.png": figure}

    return draw


# ---- drawn by the evaluations ----


def maps(table: dict) -> Pictures:
    """The maps that scripts.attention_maps drew for the first seed of each table row."""
    pictures: Pictures = {}
    for name, measured in first_seeds(table).items():
        drawn = Path(measured["folder"]) / measured["picture"]
        if not drawn.is_file():
            raise UserError(
                f"{drawn} is gone: python -m scripts.attention_maps {drawn.parent} draws it again"
            )
        pictures[f"{name}.png"] = drawn
    return pictures


def positions(table: dict) -> Pictures:
    """SSMax Fig. 5: loss over positions."""
    measured = first_seeds(table).items()
    runs = [eval_length.MeasuredRun(name, [one], one.get("control")) for name, one in measured]
    figure = eval_length.plot_positions(runs)
    figure.suptitle(title_of(table), fontsize="medium")
    return {f"{table['name']}.png": figure}


def haystacks(table: dict) -> Pictures:
    """SSMax Fig. 6: the share of needles found by length and depth."""
    runs = {name: measured["parts"] for name, measured in first_seeds(table).items()}
    return {f"{table['name']}.png": needle.plot_found(runs)}


def needle_scores(draw: Callable[[list[str], list[dict]], Figure]) -> Callable[[dict], Pictures]:
    """SSMax Figs. 7 and 8: the needle scores of each table row."""

    def drawn(table: dict) -> Pictures:
        parts = [measured["parts"].values() for measured in first_seeds(table).values()]
        scores = [next(one for one in found if "one needle" in one) for found in parts]
        return {f"{table['name']}.png": draw(list(table["rows"]), scores)}

    return drawn


def forces(table: dict) -> Pictures:
    """LSSAR Figs. 1 and A7: the Earth, and the other planets."""
    found = {name: one["parts"]["vectors"]["planets"] for name, one in first_seeds(table).items()}

    def only(earth: bool) -> dict:
        return {
            name: {planet: one for planet, one in planets.items() if (planet == "Earth") == earth}
            for name, planets in found.items()
        }

    return {"earth.png": plot_forces(only(True)), "planets.png": plot_forces(only(False))}
