"""Train a grid of settings on this machine, evaluate every run, and compare them.

python -m scripts.sweep configs/lssar_p15.py --p=3,5,7,10 --seed=1,2
python -m scripts.sweep configs/softmax.py configs/scales/tiny.py --learning_rate=1e-3,2e-3 \
    --lengths 128,1024

Config files and settings are those of train.py, but a setting of the command line may have several
values, with commas between them. Each combination of values is a run, in the folder
out/sweep_CONFIGS/p3_seed1, or in the --out_dir, such as out/mine/p{p}_{seed}.

Every run is evaluated as in the tables of scripts.reproduce, with the control and the gain from
context; a run of orbits by its last validation. The table of the losses by length, with the mean
over seeds for each combination, goes to the folder that contains the runs as sweep_RUN_RUN.md and
.json, and its picture as sweep_RUN_RUN.png.

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

from config import Config, load_config, names, pop_value, require_known_setting
from errors import UserError, command
from runtime.log import read_metrics
from scripts.common import runner
from scripts.common.planned import PlannedRun
from scripts.reproduce import pictures
from scripts.reproduce.measure import Measurement, Values, Work
from scripts.reproduce.report import carry_out
from scripts.reproduce.rows import Scale
from scripts.reproduce.tables import LOSS, Experiment, loss

# Lengths at which the runs are evaluated, in training lengths.
MULTIPLES = (1, 2, 4, 8)
# Settings with a single value: losses on other data or at other lengths cannot be compared.
SINGLE = (*names("data"), "block_size", "out_dir")


@dataclass(frozen=True)
class Grid(Scale):
    """The runs of a grid, by the name of their combination of values and by their seed."""

    runs: dict[tuple[str, int], PlannedRun]

    @property
    def config(self) -> Config:
        return next(iter(self.runs.values())).config

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
    rows, seeds = (tuple(dict.fromkeys(keys)) for keys in zip(*grid.runs, strict=True))
    picture = runner.picture_path([run.folder for run in grid.runs.values()], "sweep")
    experiment = Experiment(
        title="; ".join(f"{key} = {', '.join(texts)}" for key, texts in values.items()),
        unit=LOSS,
        rows=rows,
        measurement=measurement(grid, options.lengths),
        draw=pictures.grouped(lambda name: [("", name)]),
        notes=(f"Made by `python -m scripts.sweep {shlex.join(sys.argv[1:])}`.",),
    )
    work = Work(grid, rows, seeds, picture.parent)
    carry_out(picture.stem, experiment, work, picture.stem, "--out_dir", options.plan)


def parse_grid(arguments: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The arguments of all runs, and the values of each setting that has several."""
    files: list[str] = []
    settings: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            files.append(argument)
            continue
        key, equals, text = argument[2:].partition("=")
        require_known_setting(key, "the command line")
        settings[key] = text if equals else pop_value(key, rest)
    if "resume" in settings or "dry_run" in settings:
        raise UserError("a sweep continues its runs without --resume; --plan is its --dry_run")
    grid = {key: [v.strip() for v in text.split(",")] for key, text in settings.items()}
    grid = {key: values for key, values in grid.items() if len(values) > 1}
    for key, values in grid.items():
        if key in SINGLE or not all(values):
            problem = "can have one value only" if key in SINGLE else "has an empty value"
            raise UserError(f"--{key}={settings[key]} {problem}")
    if not grid:
        raise UserError("nothing to compare: give a setting several values, such as --p=3,5,7")
    return files + [f"--{key}={text}" for key, text in settings.items() if key not in grid], grid


def make_grid(fixed: list[str], grid: dict[str, list[str]]) -> Grid:
    """The runs of all combinations, in the order of the values."""
    stems = [Path(file).stem for file in fixed if not file.startswith("--")]
    has_folder = any(argument.startswith("--out_dir=") for argument in fixed)
    runs: dict[tuple[str, int], PlannedRun] = {}
    folders: set[str] = set()
    for texts in itertools.product(*grid.values()):
        arguments = [*fixed, *(f"--{key}={text}" for key, text in zip(grid, texts, strict=True))]
        config = load_config(arguments)
        values = {key: getattr(config, key) for key in grid}
        if not has_folder:
            parts = (v if isinstance(v, str) else f"{k}{shown(v)}" for k, v in values.items())
            folder = f"{'_'.join(['out/sweep', *stems])}/{'_'.join(parts).replace('/', '-')}"
            arguments.append(f"--out_dir={folder}")
            config = load_config(arguments)
        if config.out_dir in folders:
            raise UserError(
                f"two runs of the sweep would be in {config.out_dir}: its values must be distinct, "
                "and --out_dir must name its settings, as in --out_dir=out/mine/p{p}_{seed}"
            )
        folders.add(config.out_dir)
        values.pop("seed", None)
        name = ", ".join(f"{k} = {shown(v)}" for k, v in values.items()) or config.variant_name
        runs[name, config.seed] = PlannedRun(name, config, arguments)
    out = runner.common_folder(sorted(folders))
    return Grid("_".join(stems) or "124m", (), out, runs)


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def measurement(grid: Grid, lengths: tuple[int, ...] | None) -> Measurement:
    """The losses by length; of orbits, the last validation of training."""
    configs = [run.config for run in grid.runs.values()]
    if grid.config.task == "orbits":
        if lengths:
            raise UserError("--lengths: runs of orbits are validated at the training length alone")
        return Measurement(columns=(1,), better="lower", read=last_validation)
    trained = grid.config.block_size
    if lengths:
        return loss(*(length / trained for length in sorted({trained, *lengths})))
    learned = any(config.positions == "learned" for config in configs)
    return loss(*(MULTIPLES[:1] if learned else MULTIPLES))


def last_validation(run: PlannedRun) -> Values:
    return [step["val_loss"] for step in read_metrics(run.folder) if "val_loss" in step][-1:], {}


if __name__ == "__main__":
    main()
