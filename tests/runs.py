"""What tests read of a run's folder, and how they start one."""

import json
import shutil
import time

import pytest
import torch

from config import ROOT
from runtime import checkpoint

TIMES = {"ms", "tokens_per_s", "memory_mb", "mfu"}


def copy_of_repository(target):
    """The repository without hidden files, caches, runs and shards."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "out", "wandb", "text_*", "fineweb[!.]*")
    return shutil.copytree(ROOT, target, ignore=ignored)


def metrics(run, key="loss"):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def saved(run, which="latest"):
    return torch.load(checkpoint.find(run, which).path, weights_only=True)


def weights(run):
    return saved(run)["model"]


def lines(folder):
    """All of metrics.jsonl but times and memory."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def identical(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(identical, a, b))
    return a == b


def assert_same_run(one, other):
    """Bitwise the same weights, optimizer state, best weights and metrics."""
    for which in ("latest", "best"):
        a, b = saved(one, which), saved(other, which)
        for state in (a, b):
            del state["config"]["out_dir"], state["config"]["resume"]
        assert identical(a, b), which
    assert lines(one) == lines(other)


def agree(one, other):
    """The same run up to the order of sums."""
    for key in ("loss", "val_loss", "grad_norm"):
        assert metrics(one, key) == pytest.approx(metrics(other, key), rel=1e-5), key
    a, b = weights(one), weights(other)
    # the keys' biases have no gradient but rounding, of which Adam makes whole steps
    for bias in (x for state in (a, b) for name, x in state.items() if "c_attn.bias" in name):
        bias.view(3, -1)[1] = 0
    assert all(torch.allclose(a[name], b[name], atol=1e-4) for name in a)


def go_on(folder):
    """What a user adds to the same command: --resume once there is something to resume."""
    return ["--resume"] if checkpoint.checkpoints(folder) else []


def wait_for(condition, timeout=60):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


def steps_logged(folder):
    file = folder / "metrics.jsonl"
    return file.read_text().count('"loss"') if file.exists() else 0
