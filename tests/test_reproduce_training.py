"""The rows of the papers' tables, and the runs that they are."""

import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from errors import UserError
from runtime import checkpoint
from scripts.common import planned
from scripts.common.papers import SSMAX
from scripts.reproduce import tables, training
from tests.helpers import read_table
from tests.runs import ROOT, metrics


def test_the_swaps_of_ssmax(reproduced, scale, shards, tmp_path, monkeypatch, capsys):
    """(e) is softmax's weights with s = 1 / mean log n; (f) goes on from softmax after 7/8."""
    with open(scale, "a") as file:
        file.write("schedule = 'cosine'\n")
    swapped = tables.EXPERIMENTS["loss_by_length"]
    changed = {**vars(swapped), "rows": ("ssmax_e", "ssmax_f")}
    monkeypatch.setitem(tables.EXPERIMENTS, "swaps", tables.Experiment(**changed))
    table = read_table(reproduced("swaps", "--set=log_interval=3"))
    small = tmp_path / "out/small"
    assert sorted(path.name for path in small.iterdir()) == [
        "softmax", "softmax_before_f", "ssmax_e", "ssmax_f"
    ]  # fmt: skip
    steps = {path.name: checkpoint.step(path / "seed1337") for path in small.iterdir()}
    assert steps == {"softmax": 6, "softmax_before_f": 6, "ssmax_e": 0, "ssmax_f": 0}
    s = 16 / sum(math.log(n) for n in range(1, 17))
    config = checkpoint.read_config(small / "ssmax_e/seed1337")
    assert config.s_init == pytest.approx(s) and config.attention == "ssmax"
    assert table["rows"]["ssmax_e"]["runs"][0]["began_with"].endswith("softmax/seed1337")
    # where softmax is trained again to other weights, what began with the old ones is refused
    shutil.rmtree(small / "softmax")
    with pytest.raises(SystemExit) as stop:
        reproduced("swaps")
    assert stop.value.code == 2 and "ssmax_e/seed1337 was trained with" in capsys.readouterr().err
    assert not (small / "softmax").exists()
    shutil.copytree(small / "softmax_before_f", small / "softmax")
    with pytest.raises(SystemExit) as stop:
        reproduced("swaps")
    message = capsys.readouterr().err
    assert "initial weights other" in message and f"{small}/softmax/seed1337" in message
    # under a constant rate (f) begins with softmax's own checkpoint, which is the same
    with open(scale, "a") as file:
        file.write("schedule = 'constant'\nmax_iters = 16\ncheckpoint_interval = 7\n")
    table = read_table(reproduced("swaps", f"--out={tmp_path / 'constant'}"))
    constant = tmp_path / "constant/small"
    assert sorted(path.name for path in constant.iterdir()) == ["softmax", "ssmax_e", "ssmax_f"]
    (f,) = table["rows"]["ssmax_f"]["runs"]
    assert f["began_with"] == f"{constant}/softmax/seed1337/step_000014.pt"
    assert (f["step"], f["tokens"]) == (2, 16 * 128)
    assert checkpoint.read_config(constant / "ssmax_f/seed1337").first_batch == 14
    opened = training.open_scale(str(scale), str(constant), str(shards), "disabled", [])
    before = opened.run("softmax_before_f", 1337)
    planned.train([before], lambda: "")
    kept, trained = (
        checkpoint.load(path / "step_000014.pt", checkpoint.Weights).model
        for path in (constant / "softmax/seed1337", before.folder)
    )
    assert all(torch.equal(kept[name], trained[name]) for name in kept | trained)
    full = training.open_scale("ssmax_paper", "out", None, "disabled", [])
    f = full.run("ssmax_f", 1337).config
    swap = SSMAX["swap"]
    before = swap["softmax_steps"]
    assert (f.first_batch, f.max_iters) == (before, swap["ssmax_steps"])
    # the paper truncates 0.16851 to 0.168
    assert f.warmup_iters == swap["warmup_steps"] and int(f.s_init * 1000) / 1000 == swap["s_init"]
    assert full.run("softmax_before_f", 1337).config.max_iters == before
    assert full.run("softmax", 1337).config.keep_every == before
    assert f.init_from.endswith(f"softmax/seed1337/step_{before}.pt")


def test_a_run_with_other_settings_is_refused(reproduced, scale, capsys):
    reproduced("table_a4", "--only=softmax")
    scale.write_text(scale.read_text().replace("learning_rate = 0.01", "learning_rate = 0.02"))
    with pytest.raises(SystemExit) as stop:
        reproduced("table_a4", "--only=softmax")
    message = capsys.readouterr().err
    assert stop.value.code == 2 and "learning_rate = 0.01, not 0.02" in message


KILLED = """
import os, signal, sys
from runtime.checkpoint import Saver
Saver._write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
from train import main
main()
"""


def test_a_run_killed_before_its_first_checkpoint_begins_again(
    reproduced, commands, scale, shards, tmp_path
):
    opened = training.open_scale(str(scale), str(tmp_path / "out"), str(shards), "disabled", [])
    run = opened.run("softmax", 1337)
    command = [sys.executable, "-c", KILLED, *run.arguments]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    assert (run.folder / "metrics.jsonl").read_text() and run.step is None
    table = read_table(reproduced("table_a4", "--only=softmax"))
    assert run.finished and list(table["rows"]) == ["softmax"]
    assert [Path(command[1]).name for command in commands] == ["train.py", "-m"]
    assert list(metrics(run.folder)) == list(range(1, 7))


def test_t6_has_its_own_heads_at_each_scale():
    for name, heads in {"124m": 34, "355m": 47, "45m": 19, "tiny": 5}.items():
        scale = training.open_scale(name, "out", None, "disabled", [])
        for row in ("t6", "t6_lssar_p15", "t6_lssar_p7"):
            config = scale.run(row, 1337).config
            assert (config.n_head, config.n_layer) == (heads, scale.config.n_layer)
            assert (
                config.d_head == scale.config.d_head and config.max_iters == scale.config.max_iters
            )
        assert config.p == 7 and scale.run("softmax", 1337).config.head_size is None


def test_a_row_may_have_any_p():
    for name, file in (("lssar_p7", "lssar_p15"), ("relu_li_p2.5", "relu_li")):
        row = training.find_row(name)
        assert row.file.stem == file
        assert row.changes(None) == {"p": float(name.rpartition("_p")[2])}
    assert training.find_row("lssar_p15").changes(None) == {}
    for name in ("lssar_p7.0", "lssar_p-1", "lssar_pi", "nothing_p3"):
        with pytest.raises(UserError, match=name):
            training.find_row(name)
