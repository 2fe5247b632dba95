"""Draw the curves of runs: loss, validation loss, learning rate and gradient norm.

python -m scripts.curves RUN [RUN ...]
python -m scripts.curves out/tiny/*/seed1337 --smooth 20 --out curves.pdf

Each quantity has a panel over the steps in the runs' metrics.jsonl; a run may still be training.
The picture is curves.png in the run's folder or, for several runs, curves_RUN_RUN.png in the folder
that contains them; --out names another file. The gradient norm is the norm before clipping.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from config import PositiveInt
from errors import UserError, command
from runtime import run_folder
from runtime.files import check_writable
from runtime.log import read_metrics
from scripts.common.command_line import option, parse
from scripts.common.labels import label_runs, picture_path
from scripts.common.plots import Curve, draw_curves, save_picture

PANELS = {
    "loss": "training loss (nats per token)",
    "val_loss": "validation loss (nats per token)",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
}
Steps = list[dict[str, float]]  # lines of metrics.jsonl


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Draw the curves of runs, also while they train."""

    smooth: PositiveInt = option(1, "steps to average, drawn over a thin curve of all")


@command
def main() -> None:
    options, arguments = parse(Curves)
    runs = label_runs(arguments.runs)
    steps = {name: read_steps(run) for name, run in runs.items()}
    picture = arguments.out or picture_path(list(runs.values()), "curves")
    check_writable(picture.parent, "; --out FILE.png puts the picture elsewhere")
    save_picture(plot(steps, options), picture)


def read_steps(path: str | Path) -> Steps:
    """Read the steps and validations of a run. Raises UserError if there are none."""
    steps = read_metrics(run_folder.folder_of(path))
    if not steps:
        raise UserError(f"{path}: its metrics.jsonl has no step yet")
    return steps


def plot(runs: dict[str, Steps], options: Curves) -> Figure:
    panels: dict[str, list[Curve]] = {}
    for key, title in PANELS.items():
        curves = []
        for name, metrics in runs.items():
            lines = [line for line in metrics if key in line]
            steps = np.array([line["step"] for line in lines])
            values = np.array([line[key] for line in lines])
            if key in ("loss", "grad_norm") and options.smooth > 1 and lines:
                curves.append(Curve(name, steps, values, style="thin"))
                size = min(options.smooth, len(values))
                values = np.convolve(values, np.ones(size) / size, "valid")
                begin = size // 2
                steps = steps[begin : begin + len(values)]
            curves.append(Curve(name, steps, values))
        panels[title] = curves
    figure = draw_curves(panels, "step", "", thin="", sharey=False)
    figure.axes[-1].set_yscale("log")  # norms of gradients span decades
    return figure


if __name__ == "__main__":
    main()
