"""What tests read of a run's folder, and how they start one."""

import json
import shutil
import sys
import time
from unittest.mock import patch

import pytest
import torch

from config import ROOT
from errors import command
from runtime import checkpoint, run_folder
from runtime.config_files import command_line

TIMES = {"ms", "tokens_per_s", "memory_mb", "mfu"}


def run_train(*arguments):
    """Do in this process what `python train.py` does with these arguments."""
    import train  # here, as many tests do without it

    with patch.object(sys, "argv", ["train.py", *map(str, arguments)]):
        train.main(command(command_line)())


def copy_of_repository(target):
    """The repository without hidden files, caches, runs and shards."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "out", "wandb", "text_*", "fineweb[!.]*")
    return shutil.copytree(ROOT, target, ignore=ignored)


def metrics(run, key="loss"):
    """The values of one metric, by step."""
    return {row["step"]: row[key] for row in read_rows(run) if key in row}


def read_rows(run):
    text = (run / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def saved(run):
    return torch.load(checkpoint.find(run).path, weights_only=True)


def checkpoint_bytes(run):
    """The content of each checkpoint file, by name."""
    return {path.name: path.read_bytes() for path in run.glob("*.pt")}


def weights(run):
    return saved(run)["model"]


def comparable_rows(folder):
    """All of metrics.jsonl but times and memory."""
    rows = read_rows(folder)
    for row in rows:
        for key in TIMES & row.keys():
            del row[key]
    return rows


def identical(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        same_keys = a.keys() == b.keys()
        return same_keys and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(identical, a, b))
    return a == b


def assert_same_run(run, expected):
    """Bitwise the same weights, optimizer state, best weights and metrics."""
    for runs in ((run, expected), (run / "best.pt", expected / "best.pt")):
        states = [saved(run) for run in runs]
        for state in states:
            del state["config"]["out_dir"]
            del state["config"]["resume"]
        assert identical(*states), runs
    assert comparable_rows(run) == comparable_rows(expected)


def agree(first, second, rel=1e-5):
    """The same run up to the order of sums."""
    for key in ("loss", "val_loss", "grad_norm"):
        expected = pytest.approx(metrics(second, key), rel=rel)
        assert metrics(first, key) == expected, key
    a = weights(first)
    b = weights(second)
    for name in a:
        if "c_attn.bias" in name:
            # keys' biases have no gradient but rounding errors, which Adam turns into whole steps
            a[name].view(3, -1)[1] = 0
            b[name].view(3, -1)[1] = 0
        assert torch.allclose(a[name], b[name], atol=10 * rel), name


def go_on(folder):
    """What a user adds to the same command: --resume once there is something to resume."""
    return ["--resume"] if run_folder.checkpoints(folder) else []


def wait_for(condition, timeout=60):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


def steps_logged(folder):
    file = folder / "metrics.jsonl"
    if not file.exists():
        return 0
    return file.read_text().count('"loss"')
