"""Plotting helpers shared by the commands."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from runtime.files import atomic_write

MARKERS = "osD^v<>pPX*hd8H"
MOST_TICKS = 16
# The controls of scripts.common.validation in a legend.
THIN = "thin: sliding window, plain RoPE"
Values = Sequence[float] | np.ndarray


def save_picture(figure: Figure, path: Path) -> None:
    """Write a picture in the format of its suffix, and print its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)
    print(f"picture: {os.path.relpath(path)}")


def add_legend(figure: Figure) -> None:
    """A legend below all axes, in which a label has the same style; a fifth of the figure at most.

    It has as many columns as fit.
    """
    entries: dict[str, Any] = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    # in inches: 0.075 a character, 0.6 the handle, 0.2 a line
    column = 0.6 + 0.075 * max(map(len, entries))
    columns = min(len(entries), max(1, int(figure.get_figwidth() / column)))
    height = 0.2 + 0.2 * -(-len(entries) // columns)
    figure.set_figheight(max(figure.get_figheight(), 4 * height) + height)
    handles, labels = list(entries.values()), list(entries)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small")


def panels(count: int, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure of so many axes, at most three side by side."""
    across = 2 if count == 4 else min(count, 3)
    down = -(-count // across)
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
    """A share in [0, 1] for each place down and across; None where nothing was measured."""
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
    """A curve with a band from low to high; a thin curve has the colour of its label."""

    label: str
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None
    thin: bool = field(default=False, kw_only=True)


def draw_curves(
    panels_of: Mapping[str, Sequence[Curve]],
    x: str,
    y: str,
    log: str = "",
    thin: str = "",
    marks: Iterable[float] = (),
    sharey: bool = True,
) -> Figure:
    """A panel for each title; a label has the same style in all of them.

    `log` names the logarithmic axes; the ticks of such an x axis are the curves' points, if they
    are few. `thin` is the legend's text for thin curves, if there are any, `marks` are places on
    the x axis with a dotted line.
    """
    figure, all_axes = panels(len(panels_of), sharey)
    labels = list(dict.fromkeys(curve.label for curves in panels_of.values() for curve in curves))
    places = {place for curves in panels_of.values() for curve in curves for place in curve.x}
    for (title, curves), axes in zip(panels_of.items(), all_axes, strict=True):
        for place in marks:
            axes.axvline(place, color="0.6", linestyle=":", linewidth=1)
        for curve in curves:
            draw(axes, curve, labels.index(curve.label))
        if thin and any(curve.thin for curve in curves):
            axes.plot([], [], color="0.3", linewidth=0.7, label=thin)
        axes.set(xlabel=x, ylabel=y)
        axes.set_title(title, fontsize="medium")
        if "x" in log:
            axes.set_xscale("log")
            if len(places) <= MOST_TICKS:
                axes.set_xticks([*places], [f"{place:,.10g}" for place in places])
        if "y" in log:
            axes.set_yscale("log")
            axes.set_ylim(bottom=max(1e-9, axes.get_ylim()[0]))
        if "%" in y and sharey:  # else a panel may have differences
            axes.set_ylim(-3, 103)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    add_legend(figure)
    return figure


def draw_by_length(
    measurements: Iterable[dict], title: str, curves: Sequence[Curve], x: str, y: str
) -> Figure:
    """Curves over a number of tokens, with a dotted line at each run's training length."""
    trained = {measurement["trained_length"] for measurement in measurements}
    x += " in tokens (dotted: training length)"
    return draw_curves({title: curves}, x, y, "x", THIN, trained)


def draw(axes: Axes, curve: Curve, i: int) -> None:
    """Draw a curve in the i-th style; 20 styles are distinct."""
    color = f"C{i % 10}"
    if curve.thin:
        axes.plot(curve.x, curve.y, color=color, linewidth=0.7, alpha=0.8)
        return
    axes.plot(
        curve.x, curve.y, label=curve.label, color=color, linestyle="-" if i < 10 else "--",
        alpha=0.8, marker=MARKERS[i % len(MARKERS)], markersize=4,
        markevery=1 if len(curve.x) <= 20 else 0.1,  # a share of the axes' diagonal
    )  # fmt: skip
    if curve.low is not None and curve.high is not None:
        axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.2, lw=0)
