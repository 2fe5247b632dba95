"""Our table beside the paper's: numbers, Markdown and pictures.

A table is that of scripts.common.tables, with the keys

    name, scale, paper_scale, unit, multiples (of the training length; null where columns are none)
    not_run     rows
    failures    sentences
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention import VARIANTS
from config import Config
from errors import UserError
from runtime.files import atomic_write, read_json
from scripts import eval_length, needle
from scripts.common.plots import (
    add_legend,
    panels,
    plot_band,
    row_style,
    show_equal_curves,
    write_picture,
)
from scripts.common.tables import SIDES, how_measured, ranged, seed_sentences
from scripts.common.tables import write as write_table
from scripts.reproduce.training import split_p

SLIDING = "sliding window of 1x"
CONTROL_NOTE = (
    "Sliding window: the same weights with plain RoPE, where each row sees as many keys as in "
    "training at most; independent windows of that length give the loss of 1x at any length. The "
    "gain from context is the lower of the two minus the loss with the full context, at the "
    "longest length: above 0 the model uses what lies beyond its training length, below 0 it is "
    "hurt by it."
)


def compare(table: dict) -> None:
    """Add to every row the difference between ours and the paper's, or both ratios to softmax."""
    baseline = table["rows"].get("softmax")
    for row in table["rows"].values():
        paper = row["paper"] or [None] * len(table["columns"])
        if table["compare"] == "ratio":
            row["compared"] = {
                "ours": ratios(row["mean"], baseline and baseline["mean"]),
                "paper": ratios(paper, baseline and baseline["paper"]),
            }
        else:
            row["compared"] = [
                None if theirs is None else ours - theirs
                for ours, theirs in zip(row["mean"], paper, strict=True)
            ]


def ratios(values: list, baseline: list | None) -> list:
    pairs = zip(values, baseline or [None] * len(values), strict=True)
    return [None if value is None or base is None else value / base for value, base in pairs]


def caption(table: dict, config: Config, notes: tuple[str, ...]) -> list[str]:
    """Sentences on what was measured, how much it varies, and what is missing."""
    rows = table["rows"]
    runs = [run for row in rows.values() for run in row["runs"]]
    seeds = sorted({run["seed"] for run in runs} - {None})
    of_model = bool(seeds) or table["compare"] == "ratio"  # else of a formula
    model = f"; {config.n_layer} layers, {config.n_embd} wide" if of_model else ""
    sentences = [f"{table['unit']}{model}."]
    if seeds:
        source = "simulated orbits" if config.task == "orbits" else config.data_dir
        sentences[0] = (
            f"{table['unit']}; {config.n_layer} layers, {config.n_embd} wide, trained at "
            f"length {config.block_size:,} for {ranged(run['tokens'] for run in runs)} tokens of "
            f"{source}; {'mean over seeds' if len(seeds) > 1 else 'seed'} "
            f"{', '.join(map(str, seeds))}."
        )
    if any(row["paper"] for row in rows.values()):
        ratio = table["compare"] == "ratio"
        how = "its ratio to softmax, as behind ours" if ratio else "ours minus it"
        sentences.append(f"In parentheses the paper's value and {how}.")
        if of_model and table["scale"] != table["paper_scale"]:
            sentences.append(
                f"The paper's values are for {table['paper_scale']}. At scale {table['scale']} the "
                "model, the data and the number of tokens differ, so compare the rows with each "
                "other, not with the paper's values."
            )
    sentences += seed_sentences(table, seeds)
    sentences.append(how_measured(runs))
    sentences += [CONTROL_NOTE] if controls(table, 1) else []
    sentences += notes
    if table["not_run"]:
        sentences.append("Not run yet: " + ", ".join(f"`{row}`" for row in table["not_run"]) + ".")
    return sentences + [f"{failure}." for failure in table["failures"]]


def write(folder: Path, table: dict, pictures: dict[str, Figure | Path]) -> None:
    """Save the table and its pictures; those that are files are copied."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        if isinstance(picture, Figure):
            write_picture(picture, folder / name)
        else:
            with atomic_write(folder / name) as file:
                file.write(picture.read_bytes())
    write_table(folder, "table", table, list(pictures))


# ---- pictures ----


def losses_at(measured: dict, lengths: Iterable[int]) -> list[float]:
    """The losses of a measurement of scripts.eval_length at some of its lengths."""
    losses = dict(zip(measured["lengths"], measured["loss"], strict=True))
    return [losses[length] for length in lengths]


def controls(table: dict, most: int | None = None) -> dict[str, list[float]]:
    """Row -> its control's mean loss at each multiple of the training length, where it has one."""
    means = {}
    for name, row in list(table["rows"].items())[:most]:
        found = [run["evaluation"].get("control", {"lengths": ()}) for run in row["runs"]]
        length = row["runs"][0]["evaluation"].get("trained_length", 0)
        lengths = [round(m * length) for m in table["multiples"] or ()]
        if lengths and all(set(lengths) <= set(control["lengths"]) for control in found):
            losses = [losses_at(control, lengths) for control in found]
            means[name] = [statistics.mean(column) for column in zip(*losses, strict=True)]
    return means


def draw_row(axes: Axes, table: dict, name: str, label: str, style: dict[str, Any]) -> None:
    """A row's mean over length with its range over seeds; thin: its control."""
    row, x = table["rows"][name], table["multiples"]
    band = [row[side][: len(x)] for side in SIDES]
    plot_band(axes, x, band, label, style)
    if control := controls({**table, "rows": {name: row}}).get(name):
        axes.plot(x, control, color=style["color"], linewidth=0.7, alpha=0.8)


def label_lengths(axes: Axes, table: dict, title: str) -> None:
    """The axes of a panel of curves over length."""
    x = table["multiples"]
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{multiple:g}x" for multiple in x])
    axes.minorticks_off()
    axes.set_xlabel("length, in multiples of the training length")
    axes.set_ylabel(table["unit"])
    if "%" in table["unit"]:
        axes.set_ylim(-3, 103)
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    show_equal_curves(axes)


def explain_control(axes: Axes, table: dict) -> None:
    """A line of the legend on the thin curves, if there are any."""
    if controls(table):
        axes.plot([], [], color="0.3", linewidth=0.7, label=f"thin: {SLIDING}, plain RoPE")


def curves(table: dict) -> dict[str, Figure]:
    """Each row over length in multiples of the training length, beside the paper's curves."""
    known = any(any(v is not None for v in row["paper"] or []) for row in table["rows"].values())
    figure, axes = panels(2 if known else 1)
    for i, (name, row) in enumerate(table["rows"].items()):
        draw_row(axes[0], table, name, name, row_style(i))
        paper = zip(table["multiples"], row["paper"] or [], strict=False)
        if points := [(m, v) for m, v in paper if v is not None]:
            axes[1].plot(*zip(*points, strict=True), **row_style(i))
    explain_control(axes[0], table)
    titles = (f"ours: {table['scale']}", f"the paper's ({table['paper_scale']})")
    for title, ax in zip(titles, axes, strict=False):
        label_lengths(ax, table, title)
    add_legend(figure)
    return {f"{table['name']}.png": figure}


def grouped(table: dict, groups: dict[str, dict[str, str]]) -> dict[str, Figure]:
    """A panel for each group {title: {row: label}}, with a curve over length for each row."""
    figure, axes = panels(len(groups), sharey=True)
    for (title, members), ax in zip(groups.items(), axes, strict=True):
        for i, (name, label) in enumerate(members.items()):
            draw_row(ax, table, name, label, row_style(i))
        explain_control(ax, table)
        label_lengths(ax, table, f"{title}, {table['scale']}")
    add_legend(figure)
    return {f"{table['name']}.png": figure}


def views(table: dict) -> dict[str, Figure]:
    """A panel for each run, with a curve for each way in which it is evaluated."""
    groups: dict[str, dict[str, str]] = {}
    for name in table["rows"]:
        run, _, view = name.partition(":")
        groups.setdefault(run, {})[name] = view or "as trained"
    return grouped(table, groups)


def components(table: dict) -> dict[str, Figure]:
    """A panel for each kind of re-weighting, with a curve for each phi and scale."""
    groups: dict[str, dict[str, str]] = {}
    for name in table["rows"]:
        variant, p = split_p(name)
        kind = "not re-weighted" if p is None else f"re-weighted, p = {p:g}"
        groups.setdefault(kind, {})[name] = variant
    return grouped(table, groups)


def league(table: dict, kinds: Mapping[str, tuple[str, ...]]) -> dict[str, Figure]:
    """A panel for each kind of attention, over length; and the same by position, with softmax.

    A variant with another p joins the kinds that contain the variant.
    """
    placed = {row for rows in kinds.values() for row in rows}
    present: dict[str, dict[str, str]] = {}
    for kind, rows in kinds.items():
        variants = {split_p(row)[0] for row in rows}
        added = {row for row in table["rows"] if split_p(row)[0] in variants} - placed
        present[kind] = {row: row for row in table["rows"] if row in {*rows, *added}}
    kept = {kind: names for kind, names in present.items() if names.keys() - {"softmax"}}
    pictures = grouped(table, kept or present)
    for kind, names in kept.items():
        some = table | {
            "name": f"by_position_{kind.replace(' ', '_').replace(chr(39), '')}",
            "rows": {row: table["rows"][row] for row in names},
        }
        pictures |= positions(some)
    return pictures


def blocks(table: dict) -> dict[str, Figure]:
    """A panel for each kind of block, with a curve for each attention in it."""
    groups: dict[str, dict[str, str]] = {}
    for name in table["rows"]:
        t6, swiglu = name.startswith("t6"), name.endswith("_swiglu")
        kind = "T6" if t6 else "T6's blocks, linear projections" if swiglu else "GPT-2"
        label = name.removesuffix("_swiglu").removeprefix("t6").strip("_") or "softmax"
        groups.setdefault(kind, {})[name] = label
    return grouped(table, groups)


def beside(folder: Path, table: dict, scales: tuple[str, ...]) -> dict[str, Figure]:
    """LSSAR Fig. A2: the curves of this table and of other scales', a panel for each scale.

    No picture where fewer than two of the scales have a table beside `folder`, RESULTS/SCALE/NAME.
    """
    known = {
        scale: read_json(folder.parents[1] / scale / table["name"] / "table.json")
        for scale in scales
    }
    if table["scale"] in known:
        known[table["scale"]] = table
    tables = {scale: one for scale, one in known.items() if one}
    if len(tables) < 2:
        return {}
    figure, axes = panels(len(tables), sharey=True)
    names = list(dict.fromkeys(name for one in tables.values() for name in one["rows"]))
    for (scale, one), ax in zip(tables.items(), axes, strict=True):
        for name in one["rows"]:
            draw_row(ax, one, name, name, row_style(names.index(name)))
        explain_control(ax, one)
        label_lengths(ax, one, scale)
    add_legend(figure)
    return {f"{table['name']}_scales.png": figure}


def dots(table: dict) -> dict[str, Figure]:
    """A panel for each column: every row's seeds and the paper's value, relative to softmax."""
    names, columns, baseline = list(table["rows"]), table["columns"], table["rows"].get("softmax")
    if baseline is None:
        return {}
    across, ratio = min(4, len(columns)), table["compare"] == "ratio"
    down = -(-len(columns) // across)
    figure = Figure(figsize=(max(6.4, 3.2 * across), 1 + down * (1.2 + 0.35 * len(names))))
    figure.set_layout_engine("constrained")
    axes = figure.subplots(down, across, sharey=True, squeeze=False)

    def relative(value: float, base: float) -> float:
        return value / base if ratio else value - base

    for column, ax in zip(range(len(columns)), axes.flat, strict=False):
        for y, row in enumerate(table["rows"].values()):
            ours = [
                relative(run["values"][column], baseline["mean"][column]) for run in row["runs"]
            ]
            ax.plot(ours, [y] * len(ours), "o", color="C0", alpha=0.7, label="ours, each seed")
            if row["paper"] and row["paper"][column] is not None:
                paper = relative(row["paper"][column], baseline["paper"][column])
                ax.plot(paper, y, "D", color="C1", mfc="none", label="the paper's")
        ax.set_yticks(range(len(names)), names)
        ax.set_xlabel(f"{columns[column]}\n{'over' if ratio else 'minus'} softmax's", fontsize=8)
        ax.axvline(1 if ratio else 0, color="0.6", linewidth=1)
        ax.grid(alpha=0.3)
    for ax in axes.flat[len(columns) :]:
        ax.axis("off")
    axes[0, 0].set_ylim(len(names) - 0.5, -0.5)
    figure.suptitle(f"{table['unit']}, scale {table['scale']}", fontsize="medium")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique, loc="outside lower center", ncols=2, fontsize="small")
    return {f"{table['name']}.png": figure}


def loss_over_p(table: dict) -> dict[str, Figure]:
    """Loss over p: a panel for each attention variant, a curve for each length.

    Dashed: the variant without re-weighting. Dotted: the longest length's control.
    """
    families: dict[str, list[tuple[float, str]]] = {}
    for name in table["rows"]:
        variant, p = split_p(name)
        if p is not None:
            families.setdefault(variant, []).append((p, name))
    if not families:
        return {}
    figure, axes = panels(len(families), sharey=True)
    for (variant, members), ax in zip(families.items(), axes, strict=True):
        ps, names = zip(*sorted(members), strict=True)
        rows = [table["rows"][name] for name in names]
        plain = table["rows"].get(without_p(variant, table))
        for i in range(len(table["multiples"])):
            style = row_style(i)
            band = [[row[side][i] for row in rows] for side in SIDES]
            plot_band(ax, ps, band, table["columns"][i], style)
            if plain:
                ax.axhline(plain["mean"][i], color=style["color"], linestyle="--", linewidth=0.8)
        control = controls(table)
        if len(table["multiples"]) > 1 and all(name in control for name in names):
            last = [control[name][-1] for name in names]
            ax.plot(ps, last, color=style["color"], linestyle=":", label=f"{SLIDING}, plain RoPE")
        ax.plot([], [], color="0.3", linestyle="--", linewidth=0.8, label="without re-weighting")
        ax.set_xscale("log")
        ax.set_xticks(ps, [f"{p:g}" for p in ps])
        ax.minorticks_off()
        ax.set_xlabel("p")
        ax.set_ylabel(table["unit"])
        ax.set_title(f"{variant}, {table['scale']}", fontsize="medium")
        ax.grid(alpha=0.3)
        show_equal_curves(ax)
    add_legend(figure)
    return {f"{table['name']}.png": figure}


def without_p(variant: str, table: dict) -> str | None:
    """The table's row that is this variant without re-weighting: lssa for lssar."""
    wanted = replace(VARIANTS[variant], needs_p=False)
    return next((name for name in table["rows"] if VARIANTS.get(name) == wanted), None)


def first_seeds(table: dict) -> dict[str, dict]:
    """Row -> the measurement of its first seed."""
    return {name: row["runs"][0]["evaluation"] for name, row in table["rows"].items()}


def first_seed(table: dict) -> int:
    return next(iter(table["rows"].values()))["runs"][0]["seed"]


def with_seed(figure: Figure, table: dict) -> Figure:
    """The figure, whose title also says of which seed it is."""
    axes = figure.axes[0]
    axes.set_title(f"{axes.get_title()}, seed {first_seed(table)}", fontsize="medium")
    return figure


def maps(table: dict) -> dict[str, Path]:
    """The maps that scripts.attention_maps drew for each row's first seed."""
    pictures = {}
    for name, measured in first_seeds(table).items():
        drawn = Path(measured["folder"]) / measured["picture"]
        if not drawn.is_file():
            raise UserError(
                f"{drawn} is gone: python -m scripts.attention_maps {drawn.parent} draws it again"
            )
        pictures[f"{name}.png"] = drawn
    return pictures


def positions(table: dict) -> dict[str, Figure]:
    """SSMax Fig. 5: loss over positions."""
    rows = first_seeds(table)
    runs = [
        eval_length.MeasuredRun(name, [measured], measured.get("control"))
        for name, measured in rows.items()
    ]
    return {f"{table['name']}.png": with_seed(eval_length.plot_positions(runs), table)}


def haystacks(table: dict) -> dict[str, Figure]:
    """SSMax Fig. 6: a heat map for every row, the share of needles found by length and depth."""
    runs = {name: measured["parts"] for name, measured in first_seeds(table).items()}
    return {f"{table['name']}.png": needle.plot_found(runs)}


def heads(table: dict) -> dict[str, Figure]:
    """SSMax Fig. 7: the highest needle scores of all heads at one needle."""
    return {f"{table['name']}.png": needle.plot_heads(list(table["rows"]), scores(table))}


def trials(table: dict) -> dict[str, Figure]:
    """SSMax Fig. 8: the highest needle score of each trial, marked by the answer's grade."""
    return {f"{table['name']}.png": needle.plot_scores(list(table["rows"]), scores(table))}


def scores(table: dict) -> list[dict]:
    """The needle scores of each row's first seed."""
    parts = [measured["parts"].values() for measured in first_seeds(table).values()]
    return [next(part for part in run_parts if "one needle" in part) for run_parts in parts]
