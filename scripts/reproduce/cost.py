"""What --plan prints besides runs and tokens: missing data, disk and FLOP."""

import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch

from layers.build import build_model
from runtime.describe import describe_warm_up
from runtime.device import PEAK_FLOPS
from scripts.reproduce.planned import PlannedRun

# A float32 weight, and with AdamW's two moments; Muon has a moment less.
BEST_BYTES = 4
CHECKPOINT_BYTES = 12


def print_cost(runs: Sequence[PlannedRun], out: Path) -> None:
    """Print which data are missing, and the disk and the FLOP of the runs that are left."""
    left = [run for run in runs if not run.finished]
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
        checkpoints = run.config.keep_last
        if run.config.keep_every:
            checkpoints += run.config.max_iters // run.config.keep_every
        disk += parameters * (checkpoints * CHECKPOINT_BYTES + BEST_BYTES)
        flop += model.flops_per_token() * run.tokens_left
    for warning in sorted(warnings):
        print(warning)
    if not left:
        return
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    print(f"disk: at most {disk / 1e9:,.3g} GB of checkpoints; {free / 1e9:,.3g} GB are free")
    a100_seconds = flop / (0.4 * PEAK_FLOPS["A100"])
    time = timedelta(seconds=round(a100_seconds))
    print(
        f"training takes {flop:.1e} FLOP: {time} of an A100, assuming 40% of its peak; train.py "
        "prints the time that is left on this machine"
    )
    print("the evaluations after the training are not included")
