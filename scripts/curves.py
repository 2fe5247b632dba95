"""The curves of runs while they train: loss, validation loss, learning rate and gradient norm.

python -m scripts.curves RUN [RUN ...]
python -m scripts.curves out/tiny/*/seed1337 --smooth 20 --out curves.pdf

Draws a panel for each quantity by step, from the runs' metrics.jsonl, also of a run in training:
curves.png in the run's folder, or for several runs curves_RUN_RUN.png in the folder that contains
them (or --out). The gradient norm is the norm before clipping.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

# for a script that is run as a file: the repository's modules are not beside it
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from matplotlib.figure import Figure

from errors import UserError, command
from runtime import checkpoint
from runtime.log import read_metrics
from scripts.common.labels import picture_path, run_names
from scripts.common.options import option, parse
from scripts.common.plots import Curve, draw_curves, save_picture

PANELS = {
    "loss": "training loss (nats per token)",
    "val_loss": "validation loss (nats per token)",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
}
Steps = list[dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The curves of runs while they train."""

    smooth: int = option(1, "draw means of so many steps over a faint curve", at_least=1)


@command
def main() -> None:
    options, arguments = parse(Curves)
    runs = dict(zip(run_names(arguments.runs), map(read_steps, arguments.runs), strict=True))
    save_picture(plot(runs, options), arguments.out or picture_path(arguments.runs, "curves"))


def read_steps(path: str | Path) -> Steps:
    """The steps and validations of a run. Raises UserError where there are none."""
    if steps := read_metrics(checkpoint.folder_of(path)):
        return steps
    raise UserError(f"{path}: its metrics.jsonl has no step yet")


def plot(runs: dict[str, Steps], options: Curves) -> Figure:
    drawn: dict[str, list[Curve]] = {title: [] for title in PANELS.values()}
    for key, title in PANELS.items():
        for name, steps in runs.items():
            known = [step for step in steps if key in step]
            places, values = (np.array([step[k] for step in known]) for k in ("step", key))
            if known and key in ("loss", "grad_norm") and options.smooth > 1:
                drawn[title].append(Curve(name, places, values, thin=True))
                size = max(1, min(options.smooth, len(values)))
                values = np.convolve(values, np.ones(size) / size, "valid")
                places = places[size // 2 :][: len(values)]
            drawn[title].append(Curve(name, places, values))
    figure = draw_curves(drawn, "step", "", sharey=False)
    figure.axes[-1].set_yscale("log")  # norms of gradients span decades
    return figure


if __name__ == "__main__":
    main()
