"""Train a grid of settings on this machine, evaluate every run, and compare them.

python -m scripts.sweep configs/lssar_p15.py --p=3,5,7,10 --seed=1,2
python -m scripts.sweep configs/softmax.py configs/scales/tiny.py --learning_rate=1e-3,2e-3 \
    --lengths 128,1024

Config files and settings are those of train.py, but --SETTING=VALUE,VALUE gives a setting several
values. Each combination of values is a run, in the folder out/sweep_CONFIGS/p3_seed1, or in the
--out_dir, such as out/mine/p{p}_{seed}.

Every run is evaluated as in the tables of scripts.reproduce, with the control and the gain from
context; a run of another task than language by its last validation. The table of the losses by
length, with the mean over seeds for each combination, goes to the folder that contains the runs as
sweep_RUN_RUN.md and .json, and its picture as sweep_RUN_RUN.png.

An interrupted command continues where it stopped; nothing is done twice, and a larger grid takes
over the runs of a smaller grid. A run that fails does not stop the others. Each run takes all GPUs.
To train several runs at the same time, start the same command on each GPU, with
CUDA_VISIBLE_DEVICES: runs that another process is training are left to it.
"""

import argparse
import itertools
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from config import load_config, names, require_known_setting
from errors import UserError, command
from runtime.log import read_metrics
from scripts.common import runner
from scripts.common.planned import PlannedRun
from scripts.reproduce.entries import Scale
from scripts.reproduce.measure import Experiment, Values, Work
from scripts.reproduce.pictures import grouped
from scripts.reproduce.report import carry_out
from scripts.reproduce.tables import LOSS, loss

# Lengths at which the runs are evaluated, in training lengths.
MULTIPLES: tuple[float, ...] = (1, 2, 4, 8)
# Settings with a single value: losses on other data or at other lengths cannot be compared.
SINGLE = (*names("data"), "block_size", "out_dir")


@dataclass(frozen=True)
class Grid(Scale):
    """The runs of a grid, by the name of their combination of values and by their seed."""

    runs: dict[tuple[str, int], PlannedRun]

    def run(self, name: str, seed: int) -> PlannedRun:
        return self.runs[name, seed]


@command
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        usage="%(prog)s [CONFIG.py ...] --SETTING=VALUE,VALUE [--SETTING=VALUE ...] [options]",
        epilog="settings: python train.py --help",
        allow_abbrev=False,
    )
    add = parser.add_argument
    help = "to evaluate at, in tokens, besides the training length (default: 1x to 8x training)"
    add("--lengths", type=runner.lengths_of, help=help)
    add("--plan", action="store_true", help="print what it would cost, and stop")
    options, settings = parser.parse_known_args()
    fixed, values = parse_grid(settings)
    grid = make_grid(fixed, values)
    names, seeds = (tuple(dict.fromkeys(keys)) for keys in zip(*grid.runs, strict=True))
    title = "; ".join(f"{key} = {', '.join(texts)}" for key, texts in values.items())
    note = f"Made by `python -m scripts.sweep {shlex.join(sys.argv[1:])}`."
    experiment = compared(grid, title, names, options.lengths, notes=(note,))
    picture = runner.picture_path([run.folder for run in grid.runs.values()], "sweep")
    work = Work(picture.stem, experiment, grid, names, seeds, picture.parent)
    carry_out(work, picture.stem, "--out_dir", options.plan)


def parse_grid(arguments: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The arguments of all runs, and the values of each setting that has several."""
    fixed: list[str] = []
    grid: dict[str, list[str]] = {}
    for argument in arguments:
        key, _, text = argument.removeprefix("--").partition("=")
        if key in ("resume", "dry_run"):
            raise UserError("a sweep continues its runs without --resume; --plan is its --dry_run")
        if not argument.startswith("--") or "," not in text:
            fixed.append(argument)
            continue
        require_known_setting(key, "the command line")
        grid[key] = [value.strip() for value in text.split(",")]
        if key in SINGLE or not all(grid[key]):
            problem = "can have one value only" if key in SINGLE else "has an empty value"
            raise UserError(f"{argument} {problem}")
    if not grid:
        raise UserError("nothing to compare: give a setting several values, such as --p=3,5,7")
    return fixed, grid


def make_grid(fixed: list[str], grid: dict[str, list[str]]) -> Grid:
    """The runs of all combinations, in the order of the values."""
    stems = [Path(file).stem for file in fixed if file.endswith(".py")]
    has_folder = any(argument.startswith("--out_dir") for argument in fixed)
    runs: dict[tuple[str, int], PlannedRun] = {}
    for texts in itertools.product(*grid.values()):
        arguments = [*fixed, *(f"--{key}={text}" for key, text in zip(grid, texts, strict=True))]
        config = load_config(arguments)
        values = {key: getattr(config, key) for key in grid}
        if not has_folder:
            parts = (v if isinstance(v, str) else f"{k}{shown(v)}" for k, v in values.items())
            folder = f"{'_'.join(['out/sweep', *stems])}/{'_'.join(parts).replace('/', '-')}"
            arguments.append(f"--out_dir={folder}")
            config = load_config(arguments)
        if config.out_dir in (run.config.out_dir for run in runs.values()):
            raise UserError(
                f"two runs of the sweep would be in {config.out_dir}: its values must be distinct, "
                "and --out_dir must name its settings, as in --out_dir=out/mine/p{p}_{seed}"
            )
        values.pop("seed", None)
        name = ", ".join(f"{k} = {shown(v)}" for k, v in values.items()) or config.variant_name
        runs[name, config.seed] = PlannedRun(name, config, arguments)
    out = runner.common_folder([run.folder for run in runs.values()])
    return Grid("_".join(stems) or "124m", tuple(arguments), out, runs)


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def compared(
    grid: Grid, title: str, names: tuple[str, ...], lengths: tuple[int, ...] | None, **more: Any
) -> Experiment:
    """The losses by length; of tasks other than language, the last validation of training."""
    if "language" not in grid.config.tasks:
        if lengths:
            raise UserError(f"--lengths: runs of {grid.config.task} are validated at one length")
        return Experiment(title, LOSS, names, (1,), read=last_validation, better="lower", **more)
    trained, multiples = grid.config.block_size, MULTIPLES
    if lengths:
        multiples = tuple(length / trained for length in sorted({trained, *lengths}))
    elif any(run.config.positions == "learned" for run in grid.runs.values()):
        multiples = (1,)
    return loss(title, names, multiples, draw=grouped(), **more)


def last_validation(run: PlannedRun) -> Values:
    return [step["val_loss"] for step in read_metrics(run.folder) if "val_loss" in step][-1:], {}


if __name__ == "__main__":
    main()
