"""Train a grid of settings on this machine, evaluate every run, and compare them.

python -m scripts.sweep configs/lssar_p15.py --p=3,5,7,10 --seed=1,2
python -m scripts.sweep configs/softmax.py configs/scales/tiny.py --learning_rate=1e-3,2e-3 \
    --lengths 128,1024

Config files and settings are those of train.py, but a setting of the command line may have several
values, with commas between them. Each combination of values is a run, in the folder
out/sweep_CONFIGS/p3_seed1, or in the --out_dir, such as out/mine/p{p}_{seed}.

Every run is evaluated as by scripts.eval_length, a run of orbits by its last validation. The table
of the losses by length, with the mean over seeds for each combination, goes to the folder that
contains the runs as sweep_RUN_RUN.md and .json; the picture, sweep_RUN_RUN.png, has the loss over
the first setting that is a number, or without such a setting over the length.

An interrupted command continues where it stopped; nothing is done twice, and a larger grid takes
over the runs of a smaller grid. A run that fails does not stop the others. Each run takes all GPUs.
To train several runs at the same time, start the same command on each GPU, with
CUDA_VISIBLE_DEVICES: runs that another process is training are left to it.
"""

import argparse
import itertools
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.figure import Figure

from config import load_config, names, pop_value, require_known_setting
from errors import UserError, command
from runtime.files import check_writable, read_json
from runtime.log import read_metrics
from scripts.common import runner
from scripts.common.planned import PlannedRun, check, check_data, cost, stop_on_signals, train
from scripts.common.plots import Curve, draw_curves, save_picture
from scripts.common.tables import SIDES, how_measured, ranged, seed_sentences, summarise, write
from scripts.eval_length import LossByLength

# Lengths at which the runs are evaluated, in training lengths.
MULTIPLES = (1, 2, 4, 8)
# Settings with a single value: losses on other data cannot be compared.
SINGLE = (*names("data"), "out_dir")
LOSS = "validation loss (nats per token)"


@dataclass(frozen=True)
class Point:
    """A combination of values, and its run for each seed."""

    name: str
    values: dict[str, Any]
    runs: list[PlannedRun]


@command
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        usage="%(prog)s [CONFIG.py ...] --SETTING=VALUE,VALUE [--SETTING=VALUE ...] [options]",
        epilog="settings: python train.py --help",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--lengths",
        type=runner.lengths_of,
        help="to evaluate at, in tokens (default: 1x to 8x training)",
    )
    add("--plan", action="store_true", help="print what it would cost, and stop")
    options, settings = parser.parse_known_args()
    fixed, grid = parse_grid(settings)
    points = make_points(fixed, grid)
    # all values of a seed before the next seed
    runs = [run for of_seed in zip(*(p.runs for p in points), strict=True) for run in of_seed]
    folder = runner.common_folder([run.folder for run in runs])
    check(runs, "--out_dir")
    check_data(runs)
    lengths = lengths_of(runs, options.lengths)
    check_writable(folder)

    swept = "; ".join(f"{key} = {', '.join(values)}" for key, values in grid.items())
    print(f"{len(runs)} runs in {os.path.relpath(folder)}: {swept}\n{cost(runs)}", flush=True)
    if options.plan:
        return
    stop_on_signals()
    failures = train(runs)
    table = build_table(points, lengths, failures)
    picture = runner.picture_path([run.folder for point in points for run in point.runs], "sweep")
    save_picture(plot(points, table, lengths), picture)
    write(picture.parent, picture.stem, table, [picture.name])
    print("\n" + picture.with_suffix(".md").read_text())
    print(f"written: {os.path.relpath(picture.with_suffix(''))}.md, .json, .png")
    if failures:
        sys.exit(1)


# ---- the grid ----


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


def make_points(fixed: list[str], grid: dict[str, list[str]]) -> list[Point]:
    """The combinations, in the order of the values."""
    stems = [Path(file).stem for file in fixed if not file.startswith("--")]
    has_folder = any(argument.startswith("--out_dir=") for argument in fixed)
    points: dict[str, Point] = {}
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
        name = named(values) or config.variant_name
        run = PlannedRun(name, config, arguments)
        points.setdefault(name, Point(name, values, [])).runs.append(run)
    return list(points.values())


def named(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {shown(value)}" for key, value in values.items())


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def lengths_of(runs: Sequence[PlannedRun], wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """The lengths to evaluate at. Raises UserError where a run cannot be evaluated there."""
    configs = [run.config for run in runs]
    orbits = any(config.task == "orbits" for config in configs)
    if orbits and wanted:
        raise UserError("--lengths: runs of orbits are validated at the training length alone")
    ends = orbits or any(config.positions == "learned" for config in configs)
    shortest = min(config.block_size for config in configs)
    lengths = wanted or tuple(n * shortest for n in ((1,) if ends else MULTIPLES))
    for config in configs if not orbits else ():
        LossByLength(lengths=lengths).facts(config)
    return lengths


# ---- the table and its picture ----


def evaluate(run: PlannedRun, lengths: tuple[int, ...]) -> dict[str, Any]:
    """A finished run's losses at the lengths; of orbits, the last validation of training."""
    if run.config.task == "orbits":
        losses = [step["val_loss"] for step in read_metrics(run.folder) if "val_loss" in step]
        return {"loss": losses[-1:], "environment": read_json(run.folder / "environment.json")}
    device, dtype = run.config.device, run.config.dtype
    return runner.measured(LossByLength(lengths=lengths, device=device, dtype=dtype), run.folder)


def build_table(points: Sequence[Point], lengths: tuple[int, ...], failures: list[str]) -> dict:
    """The table, in the format of scripts.common.tables; evaluates the finished runs."""
    entries = {}
    for point in points:
        measured = [(run, evaluate(run, lengths)) for run in point.runs if run.finished]
        if measured:
            results = [run.entry(one["loss"], one) for run, one in measured]
            entries[point.name] = summarise(results) | {"paper": None}
    if not entries:
        raise UserError("no run has finished: " + "; ".join(failures))
    trained = {run.config.block_size for point in points for run in point.runs}
    multiples = [f"{n / min(trained):g}x, " if len(trained) == 1 else "" for n in lengths]
    runs = [run for entry in entries.values() for run in entry["runs"]]
    seeds = sorted({run["seed"] for run in runs})
    table = {
        "title": "Loss by length",
        "columns": [f"{text}{n:,}" for text, n in zip(multiples, lengths, strict=True)],
        "paper_columns": [None] * len(lengths),
        "better": ["lower"] * len(lengths),
        "digits": 4,
        "rows": entries,
    }
    table["caption"] = [
        f"{LOSS} after {ranged([run['tokens'] for run in runs])} tokens of training, by `python -m "
        f"scripts.sweep {shlex.join(sys.argv[1:])}`; "
        f"{'mean over seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}.",
        *seed_sentences(table, seeds),
        how_measured(runs),
        *(f"{failure}." for failure in failures),
    ]
    return table


def plot(points: Sequence[Point], table: dict, lengths: tuple[int, ...]) -> Figure:
    """The loss over the first setting that is a number, with a curve for each length.

    The other settings have a panel for each combination. Without such a setting, the loss is drawn
    over the length, with a curve for each combination.
    """
    made, entries = [point for point in points if point.name in table["rows"]], table["rows"]
    numbers = [key for key in made[0].values if all(is_number(p.values[key]) for p in points)]
    if not numbers:
        curves = [Curve(name, lengths, *(e[side] for side in SIDES)) for name, e in entries.items()]
        ticks = {float(n): f"{n:,}" for n in lengths}
        return draw_curves({"": curves}, "length in tokens", LOSS, "x", ticks)
    key = numbers[0]
    made.sort(key=lambda point: point.values[key])
    panels: dict[str, list[Point]] = {}
    for point in made:
        others = {k: value for k, value in point.values.items() if k != key}
        panels.setdefault(named(others), []).append(point)
    drawn = {
        title: [
            Curve(
                f"{column} tokens",
                [point.values[key] for point in members],
                *([entries[point.name][side][i] for point in members] for side in SIDES),
            )
            for i, column in enumerate(table["columns"])
        ]
        for title, members in panels.items()
    }
    places = [point.values[key] for point in made]
    log = "x" if places[-1] >= 10 * places[0] > 0 else ""
    return draw_curves(drawn, key, LOSS, log, {place: shown(place) for place in places})


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


if __name__ == "__main__":
    main()
