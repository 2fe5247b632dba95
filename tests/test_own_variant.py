"""The examples of attention of one's own, followed to the letter in a copy of the repository."""

import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch

from scripts.common.runner import code_hash
from scripts.eval_length import LossByLength
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
    assert middle < first - 1
    assert last < middle + 0.01  # on an Intel Xeon it is 0.003 above

    result, control = measured_losses(run)
    assert result["variant"] == "elu1_p15"
    assert result["step"] == 40
    assert control["window"] == 16
    assert result["lengths"] == [16, 64]
    assert result["trained_length"] == 16
    # measured by the same code, though its file was the main module of another process
    assert set(result["code"].values()) == {code_hash(LossByLength())}
    short_loss, long_loss = result["loss"]
    assert short_loss == pytest.approx(last, rel=1e-5)
    assert long_loss < math.log(257) - 1
    assert f"{long_loss:.4f}" in table
    text, _ = sampled.split("\n" + "-" * 80 + "\n")
    assert text.startswith("abc")
    assert len(text) == 43  # the data are words, in ASCII


def test_the_subclass_of_attention_in_the_documentation(tmp_path, shards):
    """It trains, also in a hybrid, is evaluated, sampled and mapped, and has a control."""
    page = (ROOT / "docs/variants.md").read_text()
    section = re.search(r"^### A subclass of Attention\n(.*?)(?=^### )", page, re.M | re.S)[1]
    module, edit = re.findall(r"```python\n(.*?)```", section, re.S)
    entry = re.search(r"`(VARIANTS[^`]*)`", section)[1]
    copy = copy_of_repository(tmp_path / "copy")
    with open(copy / "attention.py", "a") as file:
        file.write(f"\n{entry}\n")
    (copy / "layers/differential.py").write_text(module)
    heads = (copy / "layers/heads.py").read_text()
    imported, _, body = edit.partition("\n\n\ndef build_heads")
    new_lines = body.partition("\n")[2]
    assert heads.count("    return Attention(\n") == 1
    heads = imported + "\n" + heads.replace("    return Attention(\n", new_lines)
    (copy / "layers/heads.py").write_text(heads)

    run = copy / "out/run"
    settings = [*SMALL, f"--data_dir={shards}", *SIZES]
    hybrid = ["--nope_share=0.5", "--local_window=4", "--dry_run"]
    lengths = ["--lengths", "16,64"]
    _, softmax, differential, _, table, maps = outputs(
        copy,
        ["train.py", "--attention=differential", *settings, f"--out_dir={run}"],
        ["train.py", *settings, *hybrid],
        ["train.py", "--attention=differential", *settings, *hybrid],
        ["scripts/sample.py", str(run), "--prompt=abc", "--max_new_tokens=40"],
        ["scripts/eval_length.py", str(run), *lengths],
        ["scripts/attention_maps.py", str(run), "--text=", "--tokens=256", *lengths],
    )
    first, middle, last = metrics(run, "val_loss").values()
    assert last < middle < first - 1
    result, control = measured_losses(run)
    assert result["loss"][0] == pytest.approx(last, rel=1e-5)
    assert control["window"] == 16
    assert f"{result['loss'][1]:.4f}" in table
    # a row's weights sum to 1 - share, so that the sum of their sizes is from there to 1 + share
    share = torch.load(run / "best.pt")["model"]["trunk.blocks.1.attn.attention.share"].mean()
    size = float(maps.split()[-1])
    assert 1 - share <= size <= 1 + share
    assert size != 1
    counts = []
    for text in (softmax, differential):
        counts.append(int(re.search(r"([\d,]+) parameters", text)[1].replace(",", "")))
    assert counts[1] - counts[0] == 2  # a share for the global head of both layers
