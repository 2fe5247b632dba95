"""Train a grid of settings on this machine, evaluate every run, and compare them.

python -m scripts.sweep configs/lssar_p15.py --p=3,5,7,10 --seed=1,2
python -m scripts.sweep configs/softmax.py configs/scales/tiny.py --learning_rate=1e-3,2e-3 \
    --processes 2 --lengths 128,1024

Config files and settings are those of train.py, but a setting of the command line may have several
values, with commas between them: each combination of these is a run. Its folder is
out/sweep_CONFIGS/p3_seed1, or what --out_dir says, such as out/mine/p{p}_{seed}.

Every run is evaluated as by scripts.eval_length, one of orbits by its last validation. In the
folder that contains the runs, the table of the losses by length, with a row for each combination
and the mean over its seeds, is written as sweep_RUN_RUN.md, .json, .csv and .tex, and its picture
as sweep_RUN_RUN.png: the loss over the first setting that is a number, or without one over the
length.

An interrupted command, repeated, continues where it stopped; nothing is done twice, and a larger
grid takes over the runs of a smaller one. A run that fails does not stop the others. With
--processes, each of the runs at the same time has a GPU of its own, as far as there are enough, or
its share of the cores, and its output goes to a .log beside its folder.
"""

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from config import Config, load_config, pop_value, require_known_setting
from errors import EXIT_MISTAKE, UserError, command
from runtime.device import pick_device
from runtime.distributed import EXIT_STOPPED
from runtime.files import check_writable, is_locked, read_json
from scripts.common.arguments import AtLeast, Lengths
from scripts.common.planned import (
    POLL_SECONDS,
    PlannedRun,
    check,
    check_data,
    child_environment,
    cost,
    stop_on_signals,
    train,
)
from scripts.common.plots import (
    add_legend,
    panels,
    plot_band,
    row_style,
    save_picture,
    show_equal_curves,
)
from scripts.common.runs import common_folder, open_run, picture_path
from scripts.common.tables import SIDES, how_measured, ranged, seed_sentences, summarise, write
from scripts.curves import read_metrics
from scripts.eval_length import LossRequest, measure

# Lengths at which the runs are evaluated, in training lengths.
MULTIPLES = (1, 2, 4, 8)
# Settings that cannot have several values: losses on other data cannot be compared.
SINGLE = ("task", "data_dir", "tokenizer", "val_tokens", "planets", "bins", "out_dir")


@dataclass(frozen=True)
class Point:
    """A combination of values, without the seed: a row of the table, with a run for each seed."""

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
    parser.add_argument(
        "--lengths", action=Lengths, help="to evaluate at, in tokens (default: 1x to 8x training)"
    )
    parser.add_argument(
        "--processes", action=AtLeast, at_least=1, default=1, metavar="N",
        help="train N runs at the same time (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--plan", action="store_true", help="print what it would cost, and stop")
    options, settings = parser.parse_known_args()
    fixed, grid = parse_grid(settings)
    points = make_points(fixed, grid)
    runs = [run for of_seed in zip(*(p.runs for p in points), strict=True) for run in of_seed]
    folders = [run.folder for point in points for run in point.runs]
    check(runs, "--out_dir", processes=1 if options.processes > 1 else None)
    check_data(runs)
    orbits = any(run.config.task == "orbits" for run in runs)
    if orbits and options.lengths:
        raise UserError("--lengths: runs of orbits are validated at the training length alone")
    ends = orbits or any(run.config.positions == "learned" for run in runs)
    lengths = options.lengths or tuple(
        n * min(run.config.block_size for run in runs) for n in ((1,) if ends else MULTIPLES)
    )
    for run in runs if not orbits else ():
        request_of(run.config, lengths).check(run.config)
    check_writable(common_folder(folders))

    names = {run.folder: run.name for run in runs}
    swept = "; ".join(f"{key} = {', '.join(values)}" for key, values in grid.items())
    print(f"{len(runs)} runs in {os.path.relpath(common_folder(folders))}: {swept}")
    print(cost(runs, names), flush=True)
    if options.plan:
        return
    stop_on_signals()
    failed = train_together(runs, options.processes) if options.processes > 1 else {}
    left = [run for run in runs if run.folder not in failed]
    failures = [*failed.values(), *train(left, lambda: cost(left, names))]
    table = build_table(points, lengths, failures)
    picture = picture_path(folders, "sweep")
    save_picture(plot(points, table, lengths), picture)
    write(picture.parent, picture.stem, table, [picture.name])
    print("\n" + picture.with_suffix(".md").read_text())
    print(f"written: {os.path.relpath(picture.with_suffix(''))}.md, .json, .csv, .tex, .png")
    if failures:
        sys.exit(1)


# ---- the grid ----


def parse_grid(arguments: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The arguments of all runs, and the values of each setting that has several.

    Raises UserError for an unknown setting, and where nothing is left to compare.
    """
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
    if "resume" in settings:
        raise UserError("--resume: a sweep continues its runs without it")
    grid = {key: [v.strip() for v in text.split(",")] for key, text in settings.items()}
    grid = {key: values for key, values in grid.items() if len(values) > 1}
    for key, values in grid.items():
        if key in SINGLE or not all(values):
            problem = "can have one value only" if key in SINGLE else "has an empty value"
            raise UserError(f"--{key}={settings[key]} {problem}")
    if not grid:
        raise UserError("nothing to compare: give a setting several values, such as --p=3,5,7")
    fixed = [f"--{key}={text}" for key, text in settings.items() if key not in grid]
    return files + fixed, grid


def make_points(fixed: list[str], grid: dict[str, list[str]]) -> list[Point]:
    """The rows of the table, in the order of the values. Raises UserError where two are one."""
    stems = [Path(file).stem for file in fixed if not file.startswith("--")]
    parent = "_".join(["out/sweep", *stems])
    has_folder = any(argument.startswith("--out_dir=") for argument in fixed)
    points: dict[str, Point] = {}
    folders: set[str] = set()
    for texts in itertools.product(*grid.values()):
        arguments = [*fixed, *(f"--{key}={text}" for key, text in zip(grid, texts, strict=True))]
        config = load_config(arguments)
        if config.dry_run:
            raise UserError("--dry_run: a sweep says with --plan what it would cost")
        values = {key: getattr(config, key) for key in grid}
        if not has_folder:
            parts = (v if isinstance(v, str) else f"{k}{shown(v)}" for k, v in values.items())
            arguments.append(f"--out_dir={parent}/{'_'.join(parts).replace('/', '-')}")
            config = load_config(arguments)
        if config.out_dir in folders:
            raise UserError(
                f"two runs of the sweep would be in {config.out_dir}: its values must be distinct, "
                "and --out_dir must name its settings, as in --out_dir=out/mine/p{p}_{seed}"
            )
        folders.add(config.out_dir)
        values.pop("seed", None)
        name = ", ".join(f"{key} = {shown(value)}" for key, value in values.items())
        name = name or config.variant_name
        point = points.setdefault(name, Point(name, values, []))
        point.runs.append(PlannedRun(name, config, arguments))
    return list(points.values())


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def request_of(config: Config, lengths: tuple[int, ...]) -> LossRequest:
    return LossRequest(lengths=lengths, device=config.device, dtype=config.dtype)


def evaluate(run: PlannedRun, lengths: tuple[int, ...]) -> dict[str, Any]:
    """A finished run's losses at the lengths; that of orbits is the last validation of training."""
    if run.config.task == "orbits":
        losses = [step["val_loss"] for step in read_metrics(run.folder) if "val_loss" in step]
        return {"loss": losses[-1:], "environment": read_json(run.folder / "environment.json")}
    request = request_of(run.config, lengths)
    return measure(open_run(run.folder, request), request)


# ---- several runs at a time ----


def train_together(runs: Sequence[PlannedRun], processes: int) -> dict[Path, str]:
    """Train the unfinished runs, `processes` at a time; returns a sentence for each that failed.

    Those that another process is training are left to it. Raises UserError where one is refused.
    """
    waiting = [run for run in runs if not run.finished and not is_locked(run.folder)]
    todo = {run.folder: run.config.max_iters - (run.step or 0) for run in waiting}
    running: dict[int, tuple[PlannedRun, subprocess.Popen]] = {}  # by place
    failures: dict[Path, str] = {}
    places = range(min(processes, len(waiting)))
    with tqdm(total=sum(todo.values()), unit="step", disable=not waiting) as bar:
        try:
            while waiting or running:
                for place in places:
                    if place not in running and waiting:
                        run = waiting.pop(0)
                        running[place] = run, start(run, environment_at(place, len(places), run))
                time.sleep(POLL_SECONDS)
                for place, (run, process) in list(running.items()):
                    code = process.poll()
                    left = min(run.config.max_iters - logged_step(run.folder), todo[run.folder])
                    bar.update(todo[run.folder] - left)
                    todo[run.folder] = left
                    if code is None:
                        continue
                    del running[place]
                    if code == EXIT_STOPPED:
                        sys.exit(EXIT_STOPPED)
                    if code == EXIT_MISTAKE and not is_locked(run.folder):
                        raise UserError(f"{run.folder} was refused: {last_line(log_of(run))}")
                    if code not in (0, EXIT_MISTAKE):
                        failures[run.folder] = (
                            f"{run.folder} stopped with exit code {code} at step "
                            f"{run.step}: {last_line(log_of(run))} ({log_of(run)})"
                        )
        finally:
            for _, process in running.values():
                process.terminate()  # train.py saves, then ends
            for _, process in running.values():
                process.wait()
    return failures


def start(run: PlannedRun, environment: dict[str, str]) -> subprocess.Popen:
    """Start the training of an unfinished run, its output going to the end of its log."""
    arguments = run.command(processes=1)
    assert arguments is not None
    log_of(run).parent.mkdir(parents=True, exist_ok=True)
    with open(log_of(run), "ab") as log:
        return subprocess.Popen(
            arguments, stdout=log, stderr=subprocess.STDOUT, env=child_environment() | environment
        )


def log_of(run: PlannedRun) -> Path:
    return run.folder.with_name(f"{run.folder.name}.log")


def environment_at(place: int, places: int, run: PlannedRun) -> dict[str, str]:
    """The variables that give a run one GPU or its share of the cores, unless they are set."""
    if run.config.device in ("auto", "cuda") and pick_device(run.config.device).type == "cuda":
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = given.split(",") if given else list(map(str, range(torch.cuda.device_count())))
        return {"CUDA_VISIBLE_DEVICES": gpus[place % len(gpus)]}
    cores = str(max(1, (os.cpu_count() or 1) // places))
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", cores)}


def logged_step(folder: Path) -> int:
    """The last step in a run's metrics.jsonl, of which only the end is read."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            return int(json.loads(file.read().splitlines()[-1])["step"])
    except (OSError, ValueError, LookupError):
        return 0


def last_line(path: Path) -> str:
    return (path.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]


# ---- the table and its picture ----


def build_table(points: Sequence[Point], lengths: tuple[int, ...], failures: list[str]) -> dict:
    """The table, in the format of scripts.common.tables; evaluates the finished runs.

    Raises UserError where there is none.
    """
    rows = {}
    for point in points:
        results = []
        for run in point.runs:
            if not run.finished:
                continue
            measured = evaluate(run, lengths)
            results.append(run.entry(measured["loss"], measured))
        if results:
            rows[point.name] = summarise(results) | {"paper": None, "compared": None}
    if not rows:
        raise UserError("no run has finished: " + "; ".join(failures))
    trained = {run.config.block_size for point in points for run in point.runs}
    multiples = [f"{n / min(trained):g}x, " if len(trained) == 1 else "" for n in lengths]
    runs = [run for row in rows.values() for run in row["runs"]]
    seeds = sorted({run["seed"] for run in runs})
    table = {
        "title": "Loss by length",
        "columns": [f"{text}{n:,}" for text, n in zip(multiples, lengths, strict=True)],
        "paper_columns": [None] * len(lengths),
        "better": ["lower"] * len(lengths),
        "compare": "difference",
        "digits": 4,
        "rows": rows,
    }
    table["caption"] = [
        f"Validation loss (nats per token) after {ranged(run['tokens'] for run in runs)} tokens of "
        f"training, by `python -m scripts.sweep {shlex.join(sys.argv[1:])}`; "
        f"{'mean over seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}.",
        *seed_sentences(table, seeds),
        how_measured(runs),
        *(f"{failure}." for failure in failures),
    ]
    return table


def plot(points: Sequence[Point], table: dict, lengths: tuple[int, ...]) -> Figure:
    """The loss over the first setting that is a number, with a curve for each length.

    The other settings then have a panel for each combination. Without such a setting, the loss is
    drawn over the length.
    """
    made = [point for point in points if point.name in table["rows"]]
    rows = {point.name: table["rows"][point.name] for point in made}
    numbers = [
        key for key in made[0].values if all(is_number(point.values[key]) for point in points)
    ]
    if not numbers:
        figure, (axes,) = panels(1)
        for i, (name, row) in enumerate(rows.items()):
            plot_band(axes, lengths, [row[side] for side in SIDES], name, row_style(i))
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_xlabel("length in tokens")
        axes.minorticks_off()
    else:
        key = numbers[0]
        families: dict[str, list[Point]] = {}
        for point in made:
            others = ", ".join(f"{k} = {shown(v)}" for k, v in point.values.items() if k != key)
            families.setdefault(others, []).append(point)
        figure, all_axes = panels(len(families), sharey=True)
        for (others, members), axes in zip(families.items(), all_axes, strict=True):
            members.sort(key=lambda point: point.values[key])
            places = [point.values[key] for point in members]
            for i, column in enumerate(table["columns"]):
                band = [[rows[point.name][side][i] for point in members] for side in SIDES]
                plot_band(axes, places, band, f"{column} tokens", row_style(i))
            if places[-1] >= 10 * places[0] > 0:
                axes.set_xscale("log")
            axes.set_xticks(places, [shown(place) for place in places])
            axes.minorticks_off()
            axes.set_xlabel(key)
            axes.set_title(others, fontsize="medium")
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        show_equal_curves(axes)
    figure.axes[0].set_ylabel("validation loss (nats per token)")
    add_legend(figure)
    return figure


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


if __name__ == "__main__":
    main()
