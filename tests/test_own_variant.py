"""README's "A variant of your own", followed to the letter in a copy of the repository."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers import SMALL, measured_losses

ROOT = Path(__file__).parent.parent
SIZES = ["--learning_rate=1e-2", "--max_iters=40", "--warmup_iters=4", "--eval_interval=20"]


def not_copied(folder, names):
    """Caches, runs, and the folders of data/, which hold shards."""
    skipped = {".git", ".venv", "out", "wandb", "results", "__pycache__"} & set(names)
    if Path(folder) == ROOT / "data":
        skipped |= {name for name in names if (ROOT / "data" / name).is_dir()}
    return skipped | {name for name in names if name.startswith(".")}


def section(title):
    text = (ROOT / "README.md").read_text()
    return re.search(rf"^## {title}\n(.*?)(?=^## )", text, re.M | re.S)[1]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The repository with the section's code at the end of attention.py and in a config."""
    copy = shutil.copytree(ROOT, tmp_path_factory.mktemp("own") / "copy", ignore=not_copied)
    code, settings = re.findall(r"```python\n(.*?)```", section("A variant of your own"), re.S)
    with open(copy / "attention.py", "a") as file:
        file.write("\n" + code)
    (copy / "configs/elu1_p15.py").write_text(settings)
    return copy


@pytest.fixture(scope="module")
def run(copy, shards):
    """The run's folder, trained by the section's command."""
    command = re.search(r"`python (train\.py [^`]*)`", section("A variant of your own"))[1].split()
    call(copy, *command, *SMALL, f"--data_dir={shards}", *SIZES)
    return copy / "out/elu1_p15_tiny"


@pytest.fixture(scope="module")
def printed(copy, run):
    """The output of three commands, each a process: they run side by side."""
    (copy / "configs/elu1.py").write_text('attention = "elu1"\n')
    sizes = "n_layer=1 n_head=2 n_embd=32 block_size=16 batch_size=2 total_batch_size=32"
    settings = [f"--{size}" for size in (*sizes.split(), "tokenizer=bytes", "device=cpu")]
    commands = {
        "eval_length": ["out/elu1_p15_tiny", "--lengths", "16,64"],
        "sample": ["out/elu1_p15_tiny", "--prompt=abc", "--max_new_tokens=40", "--temperature=0"],
        "benchmark": ["configs/elu1.py", "--rounds=1", *settings, "--out=elu1.json"],
    }
    with ThreadPoolExecutor() as pool:
        return {
            name: pool.submit(call, copy, "-m", f"scripts.{name}", *arguments)
            for name, arguments in commands.items()
        }


def call(copy, *arguments):
    """The output of `python ARGUMENTS` in the copy."""
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=copy, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_trains(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["val_loss"] for line in lines if "val_loss" in line]
    assert len(losses) == 3 and losses[0] == pytest.approx(math.log(257), rel=0.02)
    assert losses[2] < losses[1] < losses[0] - 1
    settings = json.loads((run / "config.json").read_text())
    assert settings["attention"] == "elu1" and settings["p"] == 15


def test_is_evaluated_beyond_the_training_length(printed, run):
    output = printed["eval_length"].result()
    result, control = measured_losses(run)
    assert control["window"] == 16
    assert result["variant"] == "elu1_p15" and result["step"] == 40
    assert result["lengths"] == [16, 64] and result["trained_length"] == 16
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (last,) = [entry["val_loss"] for line in lines if "val_loss" in (entry := json.loads(line))][
        -1:
    ]
    assert result["loss"][0] == pytest.approx(last, rel=1e-5)
    assert result["loss"][1] < math.log(257) - 1
    (row,) = [line.split() for line in output.splitlines() if line.startswith("elu1_p15  ")]
    assert row[1:3] == [f"{loss:.4f}" for loss in result["loss"]]


def test_is_sampled_beyond_the_training_length(printed):
    text, rule, rest = printed["sample"].result().partition("\n" + "-" * 80 + "\n")
    assert text.startswith("abc") and len(text) == 43  # the data are words, in ASCII
    assert rule and rest.startswith("cache: ")


def test_is_benchmarked(printed, copy):
    output = printed["benchmark"].result()
    figures = json.loads((copy / "elu1.json").read_text())
    assert figures["settings"]["attention"] == "elu1" and figures["baselines"]["elu1"] == "elu1"
    assert all(figures["rows"]["elu1"][f"{phase}_ms"] > 0 for phase in ("train", "eval"))
    assert "\nelu1  " in output
