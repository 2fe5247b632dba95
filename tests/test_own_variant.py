"""README's "A variant of your own", followed to the letter in a copy of the repository."""

import json
import math
import os
import re
import subprocess
import sys

import pytest

from scripts.common.runner import code_hash
from scripts.eval_length import EVAL_LENGTH
from tests.helpers import SMALL, measured_losses
from tests.runs import ROOT, copy_of_repository, metrics

# The process imports torch once for all commands.
COMMANDS = """
import contextlib, io, json, runpy, sys
printed = []
for command in json.loads(sys.argv[1]):
    sys.argv = command
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(command[0], run_name="__main__")
    printed.append(output.getvalue())
print(json.dumps(printed))
"""
SIZES = ["--learning_rate=1e-2", "--max_iters=40", "--warmup_iters=4", "--eval_interval=20"]


def outputs(copy, *commands):
    """What `python COMMAND` prints in the copy of the repository, of each command."""
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_section_of_the_readme(tmp_path, shards):
    """It trains, and is evaluated and sampled beyond the training length."""
    readme = (ROOT / "README.md").read_text()
    section = re.search(r"^## A variant of your own\n(.*?)(?=^## )", readme, re.M | re.S)[1]
    code, settings = re.findall(r"```python\n(.*?)```", section, re.S)
    copy = copy_of_repository(tmp_path / "copy")
    with open(copy / "attention.py", "a") as file:
        file.write("\n" + code)
    (copy / "configs/elu1_p15.py").write_text(settings)

    command = re.search(r"`python (train\.py [^`]*)`", section)[1].split()
    run = copy / "out/run"
    asked = ["--prompt=abc", "--max_new_tokens=40", "--temperature=0"]
    _, sampled, table = outputs(
        copy,
        [*command, *SMALL, f"--data_dir={shards}", *SIZES, f"--out_dir={run}"],
        ["scripts/sample.py", str(run), *asked],
        ["scripts/eval_length.py", str(run), "--lengths", "16,64"],
    )
    settings = json.loads((run / "config.json").read_text())
    assert settings["attention"] == "elu1"
    assert settings["p"] == 15
    first, middle, last = metrics(run, "val_loss").values()
    assert first == pytest.approx(math.log(257), rel=0.02)
    assert last < middle < first - 1

    result, control = measured_losses(run)
    assert result["variant"] == "elu1_p15"
    assert result["step"] == 40
    assert control["window"] == 16
    assert result["lengths"] == [16, 64]
    assert result["trained_length"] == 16
    # measured by the same code, though its file was the main module of another process
    assert set(result["code"].values()) == {code_hash(EVAL_LENGTH)}
    short_loss, long_loss = result["loss"]
    assert short_loss == pytest.approx(last, rel=1e-5)
    assert long_loss < math.log(257) - 1
    assert f"{long_loss:.4f}" in table
    text, _ = sampled.split("\n" + "-" * 80 + "\n")
    assert text.startswith("abc")
    assert len(text) == 43  # the data are words, in ASCII
