"""The curves of runs while they train: loss, validation loss, learning rate and gradient norm.

python -m scripts.curves RUN [RUN ...]
python -m scripts.curves out/sweep_lssar_p15/p* --x tokens --smooth 20 --out curves.pdf

Draws a panel for each of them from the runs' metrics.jsonl, also of a run in training: curves.png
in the run's folder, or for several runs curves_RUN_RUN.png in the folder that contains them (or
--out). Beside it, under the same name, is a .csv with a line for every step of every run:

    run, step
    tokens              trained on so far; after scripts.finetune_squad those of its examples
    seconds             of the steps so far, without validations and checkpoints
    loss, val_loss      in nats per token; val_loss in the lines of its steps only
    lr, grad_norm       the gradient norm is that before clipping
"""

import argparse
import csv
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from matplotlib.figure import Figure

from errors import UserError, command
from runtime import checkpoint
from runtime.files import atomic_write
from runtime.log import read_text
from scripts.common.arguments import AtLeast, add_runs
from scripts.common.plots import add_legend, save_picture, show_equal_curves
from scripts.common.runs import check_output_folders, picture_path, run_names

PANELS = {
    "loss": "training loss (nats per token)",
    "val_loss": "validation loss (nats per token)",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
}
COLUMNS = ("step", "tokens", "seconds", *PANELS)
AXES = {"steps": "step", "tokens": "tokens", "time": "seconds"}


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_runs(parser, "a run's folder")
    parser.add_argument("--x", choices=AXES, default="steps", help="(%(default)s)")
    parser.add_argument(
        "--smooth", action=AtLeast, at_least=1, default=1, metavar="STEPS",
        help="draw means of so many steps, over a faint curve of each step (%(default)s)",
    )  # fmt: skip
    arguments = parser.parse_args()
    paths = arguments.runs
    check_output_folders(paths)
    rows = [read_metrics(Path(path)) for path in paths]
    names = run_names(paths)
    picture = arguments.out or picture_path(paths, "curves")
    save_picture(plot(names, rows, arguments.x, arguments.smooth), picture)
    write_csv(picture.with_suffix(".csv"), names, rows)


def read_metrics(run: Path) -> list[dict[str, float]]:
    """A run's steps, each with the COLUMNS that it has. Raises UserError where there is none."""
    run = checkpoint.folder_of(run)
    batch = checkpoint.read_config(run).total_batch_size
    finetuned = (run / "squad.json").exists()  # its steps are of examples, shorter than block_size
    steps: dict[int, dict[str, float]] = {}
    seconds, tokens = 0.0, 0
    for line in read_text(run / "metrics.jsonl").splitlines()[1:]:  # the first is the run's id
        # of a line that a run in training has not finished, or that is damaged
        with suppress(ValueError, LookupError, TypeError, OverflowError, RecursionError):
            values = json.loads(line)
            step, known = int(values["step"]), {k: float(values[k]) for k in PANELS if k in values}
            took = values.get("ms", 0) / 1000
            seconds += took
            tokens += round(values.get("tokens_per_s", 0) * took)
            row = steps.setdefault(step, {"step": step})
            row |= {"tokens": tokens if finetuned else step * batch, "seconds": seconds} | known
    if not steps:
        raise UserError(f"{run}: its metrics.jsonl has no step yet")
    return [steps[step] for step in sorted(steps)]


def write_csv(path: Path, names: Sequence[str], rows: Sequence[list[dict[str, float]]]) -> None:
    with atomic_write(path, "w") as file:
        sheet = csv.DictWriter(file, ("run", *COLUMNS), lineterminator="\n")
        sheet.writeheader()
        for name, steps in zip(names, rows, strict=True):
            sheet.writerows({"run": name} | step for step in steps)
    print(f"numbers: {os.path.relpath(path)}")


def plot(
    names: Sequence[str], rows: Sequence[list[dict[str, float]]], x: str, smooth: int
) -> Figure:
    figure = Figure(figsize=(10, 7), layout="constrained")
    unit, label = 1.0, x
    if x == "time":
        longest = max(steps[-1]["seconds"] for steps in rows)
        unit, word = next(
            (size, word) for size, word in ((3600, "hours"), (60, "minutes"), (1, "seconds"))
            if longest >= 2 * size or size == 1
        )  # fmt: skip
        label = f"{word} of training"
    for key, axes in zip(PANELS, figure.subplots(2, 2).flat, strict=True):
        for i, (name, steps) in enumerate(zip(names, rows, strict=True)):
            known = [step for step in steps if key in step]
            places = np.array([step[AXES[x]] / unit for step in known])
            values = np.array([step[key] for step in known])
            line = {"color": f"C{i % 10}", "linestyle": "-" if i < 10 else "--", "linewidth": 1.2}
            if key in ("loss", "grad_norm") and smooth > 1:
                axes.plot(places, values, color=line["color"], alpha=0.25, linewidth=0.6)
                size = max(1, min(smooth, len(values)))
                values = np.convolve(values, np.ones(size) / size, "valid")
                places = places[size // 2 :][: len(values)]
            marker = "o" if key == "val_loss" else None
            axes.plot(places, values, label=name, marker=marker, markersize=3, **line)
        axes.set_xlabel(label)
        axes.set_title(PANELS[key], fontsize="medium")
        axes.grid(alpha=0.3)
        show_equal_curves(axes)
    figure.axes[-1].set_yscale("log")  # norms of gradients span decades
    add_legend(figure)
    return figure


if __name__ == "__main__":
    main()
