"""The curves of runs while they train: loss, validation loss, learning rate and gradient norm.

python -m scripts.curves RUN [RUN ...]
python -m scripts.curves out/sweep_lssar_p15/p* --x tokens --smooth 20 --out curves.pdf

Draws a panel for each quantity from the runs' metrics.jsonl, also of a run in training: curves.png
in the run's folder, or for several runs curves_RUN_RUN.png in the folder that contains them (or
--out). Beside it, under the same name, is a .csv with a line for every step of every run:

    run, step
    tokens              trained on so far; after scripts.finetune_squad the tokens of its examples
    seconds             of the steps so far, without validations and checkpoints
    loss, val_loss      in nats per token; val_loss in the lines of its steps only
    lr, grad_norm       the gradient norm before clipping
"""

import csv
import os
import sys
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from matplotlib.figure import Figure

from errors import UserError, command
from runtime import checkpoint
from runtime.files import atomic_write
from runtime.log import read_metrics
from scripts.common.plots import Curve, draw_curves, save_picture
from scripts.common.runner import option, parse, picture_path, run_names

PANELS = {
    "loss": "training loss (nats per token)",
    "val_loss": "validation loss (nats per token)",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
}
COLUMNS = ("run", "step", "tokens", "seconds", *PANELS)
AXES = {"steps": "step", "tokens": "tokens", "time": "seconds"}
Steps = list[dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The curves of runs while they train."""

    x: str = option("steps", "of the panels", choices=tuple(AXES))
    smooth: int = option(
        1, "draw means of so many steps, over a faint curve of each step", at_least=1
    )


@command
def main() -> None:
    options, arguments = parse(Curves)
    runs = dict(zip(run_names(arguments.runs), map(read_steps, arguments.runs), strict=True))
    picture = arguments.out or picture_path(arguments.runs, "curves")
    save_picture(plot(runs, options), picture)
    with atomic_write(picture.with_suffix(".csv"), "w") as file:
        sheet = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        sheet.writeheader()
        for name, steps in runs.items():
            sheet.writerows({"run": name} | step for step in steps)
    print(f"numbers: {os.path.relpath(picture.with_suffix('.csv'))}")


def read_steps(path: str | Path) -> Steps:
    """A run's steps, each with the COLUMNS that it has. Raises UserError where there is none."""
    run = checkpoint.folder_of(path)
    batch = checkpoint.read_config(run).total_batch_size
    finetuned = (run / "squad.json").exists()  # its steps are of examples, shorter than block_size
    steps: dict[int, dict[str, float]] = {}
    seconds, tokens = 0.0, 0
    for values in read_metrics(run):
        step, took = values["step"], values.get("ms", 0) / 1000
        seconds += took
        tokens += round(values.get("tokens_per_s", 0) * took)
        so_far = {"tokens": tokens if finetuned else step * batch, "seconds": seconds}
        known = {key: values[key] for key in PANELS if key in values}
        steps[step] = steps.get(step, {"step": step}) | so_far | known
    if not steps:
        raise UserError(f"{run}: its metrics.jsonl has no step yet")
    return [steps[step] for step in sorted(steps)]


def plot(runs: dict[str, Steps], options: Curves) -> Figure:
    unit = 3600 if options.x == "time" else 1
    label = "hours of training" if options.x == "time" else options.x
    drawn: dict[str, list[Curve]] = {title: [] for title in PANELS.values()}
    for key, title in PANELS.items():
        for name, steps in runs.items():
            known = [step for step in steps if key in step]
            places = np.array([step[AXES[options.x]] / unit for step in known])
            values = np.array([step[key] for step in known])
            if key in ("loss", "grad_norm") and options.smooth > 1:
                drawn[title].append(Curve(name, places, values, thin=True))
                size = max(1, min(options.smooth, len(values)))
                values = np.convolve(values, np.ones(size) / size, "valid")
                places = places[size // 2 :][: len(values)]
            drawn[title].append(Curve(name, places, values))
    figure = draw_curves(drawn, label, "", sharey=False)
    figure.axes[-1].set_yscale("log")  # norms of gradients span decades
    return figure


if __name__ == "__main__":
    main()
