"""The commands that users run on a finished run, and the quickstart itself."""

import json
import math
import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch

import checkpoint
from data.shards import read_shard
from model import GPT
from scripts import eval_length, sample

ROOT = Path(__file__).parent.parent


def test_eval_length_is_the_mean_loss_over_the_same_tokens(train, call, shards, capsys):
    run = train("run", "configs/lssar_p15.py")
    call(eval_length, run, "--lengths", "16,32,128", "--rope", "dynamic_ntk")
    result = json.loads((run / "eval_length.json").read_text())
    assert result["variant"] == "lssar_p15" and result["rope"] == "dynamic_ntk"
    assert result["lengths"] == [16, 32, 128] and result["tokens"] == 256
    model = GPT(checkpoint.read_config(run)).eval()
    checkpoint.load_weights(model, run)
    tokens = torch.from_numpy(read_shard(shards / "text_val_000000.bin")[:257].astype(np.int64))
    for length, loss in zip(result["lengths"], result["loss"], strict=True):
        base = 10000 * max(1, length / 16) ** (16 / 14)
        model.scale_rope("none", theta=base)
        losses = []
        for start in range(0, 256, length):
            logits = model(tokens[None, start : start + length])[0].double()
            targets = tokens[start + 1 : start + length + 1]
            losses += (-logits.log_softmax(-1)[range(length), targets]).tolist()
        assert loss == pytest.approx(sum(losses) / 256, rel=1e-5)
    printed = capsys.readouterr().out
    assert all(f"{loss:.4f}" in printed for loss in result["loss"])
    assert matplotlib.image.imread(run / "eval_length.png").std() > 0


def test_eval_length_of_several_runs_draws_one_picture(train, call, tmp_path, monkeypatch, capsys):
    runs = [train(name, f"configs/{name}.py", "--max_iters=1") for name in ("softmax", "lssa")]
    call(eval_length, *runs, "--lengths", "16,64")
    assert (tmp_path / "loss_by_length.png").exists()
    printed = capsys.readouterr().out
    assert "softmax" in printed and "lssa" in printed
    # the same question again is answered from the file, another one is not
    monkeypatch.setattr(eval_length, "mean_loss", None)
    call(eval_length, *runs, "--lengths", "16,64")
    with pytest.raises(TypeError):
        call(eval_length, *runs, "--lengths", "16,64", "--rope", "yarn")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--lengths", "16,x"], "16,x"),
        (["--lengths", "0"], "positive"),
        (["--lengths", "16,1024"], "1024"),
        (["--data_dir", "nowhere"], "nowhere"),
        (["--checkpoint", "best", "--device", "gpu"], "gpu"),
    ],
)
def test_eval_length_refuses(train, call, capsys, arguments, message):
    run = train("run", "--max_iters=1")
    with pytest.raises(SystemExit) as stop:
        call(eval_length, run, *arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not (run / "eval_length.json").exists()


def test_a_folder_that_is_no_run_is_refused(call, tmp_path, capsys):
    for module in (eval_length, sample):
        with pytest.raises(SystemExit) as stop:
            call(module, tmp_path)
        assert stop.value.code == 2 and "no config.json" in capsys.readouterr().err


def test_sample_prints_text_that_goes_on_from_the_prompt(train, call, capsys):
    run = train("run", "configs/ssmax.py")
    capsys.readouterr()
    arguments = ("--prompt", "abc", "--max_new_tokens", 40, "--num_samples", 2)
    call(sample, run, *arguments)
    first = capsys.readouterr().out
    assert first.count("abc") >= 2 and first.count("-" * 80) == 2
    call(sample, run, *arguments)
    assert capsys.readouterr().out == first
    call(sample, run, *arguments, "--seed", 7)
    assert capsys.readouterr().out != first


@pytest.mark.parametrize("arguments", [["--max_new_tokens", "0"], ["--top_k", "0"]])
def test_sample_refuses(train, call, capsys, arguments):
    run = train("run", "--max_iters=1")
    with pytest.raises(SystemExit) as stop:
        call(sample, run, *arguments)
    assert stop.value.code == 2 and "must be" in capsys.readouterr().err


def test_quickstart(tmp_path):
    """The script itself in a copy of the repository, with less training."""
    if not (ROOT / ".venv").exists():
        pytest.skip("scripts/test.sh makes the .venv that the quickstart uses")
    ignored = shutil.ignore_patterns(
        ".venv", ".git", "out", "text_*", "fineweb*", ".*_cache", "wandb"
    )
    copy = shutil.copytree(ROOT, tmp_path / "repository", ignore=ignored)
    (copy / ".venv").symlink_to(ROOT / ".venv")
    command = ["bash", "scripts/quickstart.sh", "--max_iters=4", "--n_layer=1", "--val_tokens=4096"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    out = copy / "out/quickstart"
    assert (out / "loss_by_length.png").exists()
    for name in ("softmax", "lssar_p15"):
        result = json.loads((out / name / "eval_length.json").read_text())
        assert result["variant"] == name
        assert result["lengths"] == [128, 256, 512, 1024, 2048, 4096]
        assert all(3 < loss < 1.1 * math.log(257) for loss in result["loss"])
        assert f"{result['loss'][-1]:.4f}" in done.stdout
    checkpoints = {file: file.stat().st_mtime_ns for file in out.glob("*/step_*.pt")}
    assert len(checkpoints) == 4  # of each run the first and the last
    again = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert checkpoints == {file: file.stat().st_mtime_ns for file in out.glob("*/step_*.pt")}
    table = done.stdout[done.stdout.index("validation loss (nats") :]
    assert table == again.stdout[again.stdout.index("validation loss (nats") :]
