"""Plotting helpers shared by the commands."""

import itertools
import math
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from runtime.files import atomic_write

MARKERS = "osD^v<>pPX*hd8H"
STYLES = 20  # of lines that are distinct
MOST_TICKS = 16
TITLE_WIDTH = 52  # characters, as many as fit above a panel
# The controls of scripts.common.validation in a legend.
THIN = "thin: sliding window"
Numbers = Sequence[Any] | np.ndarray  # numbers; None, of y and deviation, leaves a gap
Style = Literal["line", "thin", "reference", "behind"]


def save_picture(figure: Figure, path: Path) -> None:
    """Write a picture in the format of its suffix, and print its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)
    print(f"picture: {os.path.relpath(path)}")


def add_legend(figure: Figure) -> None:
    """Add one legend for all axes below them, and make the figure taller by its height.

    The legend has as many columns as fit, and takes a fifth of the figure at most. A label that is
    in several axes has the same style in all of them, and one entry.
    """
    entries: dict[str, Any] = {}  # label -> handle
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    if not entries:
        return
    # in inches: 0.075 a character, 0.6 the handle, 0.2 a line
    column_width = 0.6 + 0.075 * max(map(len, entries))
    columns = min(len(entries), max(1, int(figure.get_figwidth() / column_width)))
    height = 0.2 + 0.2 * math.ceil(len(entries) / columns)
    figure.set_figheight(max(figure.get_figheight(), 4 * height) + height)
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        ncols=columns,
        fontsize="small",
    )


def panels(count: int, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure with this number of axes, at most three side by side."""
    across = 2 if count == 4 else min(count, 3)
    down = math.ceil(count / across)
    figure = Figure(figsize=(max(6.4, 5.2 * across), 4.4 * down), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False, sharey=sharey).flat)
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def heat_map(
    title: str,
    shares: Mapping[str, Sequence[float | None]],
    across: Sequence[str],
    label: str,
    xlabel: str = "length in tokens",
    ylabel: str = "depth",
) -> Figure:
    """Draw shares in [0, 1] in percent: a row for each key of `shares`, a column for each `across`.

    A share is None where nothing was measured.
    """
    figure, (axes,) = panels(1)
    values = 100 * np.array(list(shares.values()), dtype=float)  # None becomes NaN
    axes.set_facecolor("0.85")
    image = axes.imshow(values, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for (y, x), value in np.ndenumerate(values):
        if not math.isnan(value):
            colour = "black" if value > 60 else "white"
            axes.text(x, y, f"{value:.0f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(across)), across)
    axes.set_yticks(range(len(shares)), list(shares))
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    figure.colorbar(image, ax=axes, label=label)
    return figure


@dataclass(frozen=True)
class Curve:
    """A curve with a band around it, from y - deviation to y + deviation.

    A thin curve has the colour of its label and no entry in the legend. A reference is a thin grey
    dashed line with an entry, such as the level of chance. Curves behind the others are light grey
    and dashed, with one entry for all that share a label.
    """

    label: str
    x: Numbers
    y: Numbers
    deviation: Numbers | None = None
    band: str = field(default="", kw_only=True)  # what the band is, for the legend
    style: Style = field(default="line", kw_only=True)


def draw_curves(
    panels_of: Mapping[str, Sequence[Curve]],
    xlabel: str,
    ylabel: str,
    log: str = "",
    thin: str = THIN,
    marks: Iterable[float] = (),
    sharey: bool = True,
) -> Figure:
    """Draw a panel of curves for each title; a label has the same style in all panels.

    `log` names the logarithmic axes: "x", "y" or "xy". The ticks of a logarithmic x axis are the
    curves' points, if there are at most MOST_TICKS. `thin` is the legend's text for thin curves, if
    there are any; `marks` are places on the x axis with a dotted line.
    """
    figure, all_axes = panels(len(panels_of), sharey)
    index_of: dict[str, dict[str, int]] = {"line": {}, "reference": {}, "behind": {}}
    index_of["thin"] = index_of["line"]
    points: set[float] = set()
    for curve in itertools.chain(*panels_of.values()):
        points.update(curve.x)
        labels = index_of[curve.style]
        labels.setdefault(curve.label, len(labels))
    for (title, curves), axes in zip(panels_of.items(), all_axes, strict=True):
        for place in marks:
            axes.axvline(place, color="0.6", linestyle=":", linewidth=1)
        for curve in curves:
            draw(axes, curve, index_of[curve.style][curve.label])
        if thin and any(curve.style == "thin" for curve in curves):
            axes.plot([], [], color="0.3", linewidth=0.7, label=thin)
        for band in {curve.band for curve in curves if curve.band}:  # one in a panel
            axes.fill_between([], [], color="0.3", alpha=0.2, lw=0, label=band)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        words = re.sub(r",(?=[a-z])", ", ", title)  # an entry's name has no space: lssar,p=3,seed=1
        axes.set_title(textwrap.fill(words, TITLE_WIDTH), fontsize="medium")
        if "x" in log:
            axes.set_xscale("log")
            if len(points) <= MOST_TICKS:
                axes.set_xticks(list(points), [f"{x:,.10g}" for x in points])
        if "y" in log:
            axes.set_yscale("log")
            axes.set_ylim(bottom=max(1e-9, axes.get_ylim()[0]))
        if "%" in ylabel and sharey:  # else a panel may have differences
            axes.set_ylim(-3, 103)
        axes.xaxis.minorticks_off()
        axes.grid(alpha=0.3)
    add_legend(figure)
    return figure


def draw_by_length(
    measurements: Iterable[dict],
    title: str,
    curves: Sequence[Curve],
    xlabel: str,
    ylabel: str,
) -> Figure:
    """Draw curves over a number of tokens, with a dotted line at each run's training length."""
    return draw_curves(
        {title: curves},
        f"{xlabel} in tokens (dotted: training length)",
        ylabel,
        log="x",
        marks={measurement["trained_length"] for measurement in measurements},
    )


def draw(axes: Axes, curve: Curve, i: int) -> None:
    """Draw the i-th curve of its style; STYLES lines are distinct."""
    color = f"C{i % 10}"
    looks: dict[str, dict[str, Any]] = {
        "line": {
            "color": color,
            "alpha": 0.8,
            "linestyle": "-" if i < 10 else "--",
            "marker": MARKERS[i % len(MARKERS)],
            "markersize": 4,
            "markevery": 1 if len(curve.x) <= 20 else 0.1,  # a share of the axes' diagonal
            "label": curve.label,
        },
        "thin": {"color": color, "alpha": 0.8, "linewidth": 0.7},
        "reference": {
            "color": "0.3",
            "linestyle": (0, (6 / (i + 1), 3)),  # dashes shorten from one reference to the next
            "linewidth": 1,
            "label": curve.label,
        },
        "behind": {"color": "0.7", "linestyle": "--", "linewidth": 0.8, "label": curve.label},
    }
    axes.plot(curve.x, curve.y, **looks[curve.style])
    if curve.deviation is not None and curve.style == "line":
        y = np.array(curve.y, dtype=float)
        deviation = np.array(curve.deviation, dtype=float)
        axes.fill_between(curve.x, y - deviation, y + deviation, color=color, alpha=0.2, lw=0)
