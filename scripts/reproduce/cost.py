"""What --plan prints besides runs and tokens: the paper's values, missing data, disk, hours."""

import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from config import Config
from layers.build import build_model
from runtime.describe import describe_warm_up
from runtime.device import PEAK_FLOPS, open_device
from runtime.memory import fitting_batch_size
from scripts.benchmark import prepare, timed_step
from scripts.common.tables import print_table
from scripts.reproduce.planned import PlannedRun, processes_of

# FLOP of the step timed on a CPU: 512 tokens at 124M parameters. A small model gets more tokens:
# with 512 the optimizer would dominate, as it does not in training.
CPU_FLOP = 4e11
MEASURED_SECONDS = 3  # the fastest step within them counts
# A float32 weight, and with AdamW's two moments; Muon has a moment less.
BEST_BYTES = 4
CHECKPOINT_BYTES = 12


def print_entries(names: Sequence[str], columns: Sequence[str], paper: dict[str, list]) -> None:
    """Print the entries with the paper's values, in the columns where it has any."""
    shown = [["entry", *names]]
    for i, column in enumerate(columns):
        values = [paper[name][i] if name in paper else None for name in names]
        if any(value is not None for value in values):
            cells = ["–" if value is None else f"{value:g}" for value in values]
            heading = re.sub("x, .*", "x", column)  # without the number of tokens here
            shown.append([f"the paper's {heading}", *cells])
    print_table(list(zip(*shown, strict=True)))


def print_cost(runs: Sequence[PlannedRun], out: Path) -> None:
    """Print which data are missing, and the disk and the hours of the runs that are left."""
    left = [run for run in runs if not run.finished]
    if not left:
        return
    folders = [run.config.data_dir for run in left if "language" in run.config.tasks]
    for folder in dict.fromkeys(folders):
        if not Path(folder).exists():
            print(f"data missing: {folder}; data.fineweb or data.text makes such a folder")
    disk = 0.0
    flop = 0.0
    warnings: set[str] = set()
    for run in left:
        warnings |= set(describe_warm_up(run.config))
        with torch.device("meta"):
            model = build_model(run.config)
        parameters = model.count_parameters()
        checkpoints = 1 + run.config.keep_last  # while the newest is written
        if run.config.keep_every:
            checkpoints += 1 + run.config.max_iters // run.config.keep_every  # step 0 too
        disk += parameters * (checkpoints * CHECKPOINT_BYTES + BEST_BYTES)
        flop += model.flops_per_token() * run.tokens_left
    for warning in sorted(warnings):
        print(warning)
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    print(f"disk: at most {disk / 1e9:,.3g} GB of checkpoints; {free / 1e9:,.3g} GB are free")
    sentence = f"training takes {flop:.1e} FLOP: "
    if left[0].config.task != "orbits":
        hours = flop / measured_flops(left[0].config) / 3600
        sentence += f"{duration(hours)} of this machine, by a step of {left[0].config.name}; "
    else:
        sentence += "no step of this task is timed here; "
    a100_hours = flop / (0.4 * PEAK_FLOPS["A100"]) / 3600
    print(f"{sentence}{duration(a100_hours)} of an A100, assuming 40% of its peak")
    print("the evaluations after the training are not included")


def duration(hours: float) -> str:
    """The hours in words: 12 hours, 1.3 hours, 4.5 minutes, 0.02 seconds."""
    if hours >= 10:
        return f"{hours:,.0f} hours"
    if hours >= 1:
        return f"{hours:.2g} hours"
    if hours >= 1 / 60:
        return f"{60 * hours:.2g} minutes"
    return f"{3600 * hours:.2g} seconds"


def measured_flops(config: Config) -> float:
    """Measure the FLOP per second of a training step on all devices that would train."""
    device = open_device(config.device)
    processes = processes_of(config)
    sequences = fitting_batch_size(config, processes, device)
    length = config.block_size
    if device.type == "cpu":
        tokens = max(1, int(CPU_FLOP / flops_per_token(config)))
        length = min(length, tokens)
        sequences = min(sequences, tokens // length)
    config = config.replace(
        block_size=length,
        batch_size=sequences,
        total_batch_size=processes * sequences * length,
    )
    print("measuring a training step", flush=True)
    prepare(config, "train", plain=False)
    timings: list[float] = []
    started = time.perf_counter()
    while not timings or time.perf_counter() - started < MEASURED_SECONDS:
        ms, _ = timed_step()
        timings.append(ms)
    return config.total_batch_size * flops_per_token(config) / (min(timings) / 1000)


def flops_per_token(config: Config) -> float:
    with torch.device("meta"):
        return build_model(config).flops_per_token()
