"""Plotting helpers shared by the commands."""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from runtime.files import atomic_write

CURVE_MARKERS = "osD^v<>pPX*hd8H"


def write_picture(figure: Figure, path: Path) -> None:
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=150)


def save_picture(figure: Figure, path: Path) -> None:
    """Write a picture and print its path."""
    write_picture(figure, path)
    print(f"picture: {os.path.relpath(path)}")


def row_style(i: int) -> dict[str, Any]:
    """Line style of the i-th row of a table; 20 styles are distinct."""
    return {"color": f"C{i % 10}", "marker": CURVE_MARKERS[i % len(CURVE_MARKERS)],
            "markersize": 4, "linestyle": "-" if i < 10 else "--"}  # fmt: skip


def one_panel() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    return figure, figure.subplots()


def length_axis(
    axes: Axes, label: str, trained: Iterable[int], lengths: Sequence[int] | None = None
) -> None:
    """Make x a log2 axis of lengths in tokens, with a dotted line at each training length.

    Its ticks are at `lengths` where given.
    """
    for length in trained:
        axes.axvline(length, color="0.6", linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    if lengths is None:
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    else:
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.minorticks_off()
    axes.set_xlabel(f"{label} (dotted: training length)")
    axes.grid(alpha=0.3)


def heat_maps(
    maps: dict[str, list[list[float | None]]],
    lengths: Sequence[int],
    depths: Sequence[str],
    label: str,
) -> Figure:
    """A panel for each title: shares [depths][lengths] in [0, 1], None where not measured."""
    columns = min(3, len(maps))
    lines = -(-len(maps) // columns)
    width = max(4.8, 1.2 + columns * (1.2 + 0.8 * len(lengths)))
    figure = Figure(figsize=(width, lines * (1.6 + 0.32 * len(depths))), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False)
    for axes in panels.flat[len(maps) :]:
        axes.axis("off")
    for (title, shares), axes in zip(maps.items(), panels.flat, strict=False):
        values = [[math.nan if share is None else 100 * share for share in row] for row in shares]
        axes.set_facecolor("0.85")
        image = axes.imshow(values, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                if not math.isnan(value):
                    colour = "black" if value > 60 else "white"
                    axes.text(x, y, f"{value:.0f}", ha="center", va="center", color=colour)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), depths)
        axes.set_title(title, fontsize="medium")
    figure.supxlabel("length in tokens", fontsize="medium")
    figure.supylabel("depth", fontsize="medium")
    figure.colorbar(image, ax=panels, label=label)
    return figure
