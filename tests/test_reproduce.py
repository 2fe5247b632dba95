"""The papers' tables from nothing: what is trained and measured, and what is written."""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from errors import UserError
from runtime import run_folder
from runtime.config_files import load_config
from runtime.distributed import EXIT_STOPPED
from runtime.files import lock_folder
from scripts import eval_length
from scripts.common.papers import LSSAR, SSMAX
from scripts.reproduce import planned, tables
from scripts.reproduce.cost import duration
from scripts.reproduce.entries import (
    SOFTMAX_BEFORE_F,
    SSMAX_E,
    SSMAX_F,
    SSMAX_PROBE,
    config_entry,
    hybrid,
    open_scale,
    with_p,
)
from tests.helpers import CONFIGS, ROWS, SMALL, not_blank, read_table, small_config
from tests.runs import ROOT, wait_for


def test_table1_end_to_end(reproduced, commands, tmp_path, capsys):
    folder = reproduced("table1", "--only=softmax,lssar_p15", "--seeds=2")
    printed = capsys.readouterr().out
    # 4 runs of 6 steps of 128 tokens
    assert printed.index("to train: 4 runs, 3,072 tokens\n") < printed.index("step 6/6")
    assert len(commands) == 4
    table = read_table(folder)
    text = (folder / "table.md").read_text().replace("**", "")
    paper_rows = LSSAR["table1"]["rows"]
    assert {*table["rows"], *table["not_run"]} == {*paper_rows}
    for name, row in table["rows"].items():
        assert row["paper"][:4] == paper_rows[name]
        for paper in paper_rows[name]:
            assert f" ({paper:.4f})" in text
        for run in row["runs"]:
            assert run["step"] == 6
            assert run["tokens"] == 768
    assert not_blank(folder / "table1.png")
    # the same again: nothing is trained or measured, and the files say the same
    before = modification_times(tmp_path / "out")
    commands.clear()
    assert read_table(reproduced("table1", "--only=softmax,lssar_p15", "--seeds=2")) == table
    assert "to train: nothing, all runs are done" in capsys.readouterr().out
    assert not commands
    assert modification_times(tmp_path / "out") == before
    caption = read_table(reproduced("table1", "--only=softmax", "--seeds=3"))["caption"]
    assert caption[0].endswith("mean over 2 to 3 of the seeds 1337, 1338, 1339.")


def modification_times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_signal_ends_the_training(scale, shards, tmp_path):
    """The child saves its state before both end."""
    with open(scale, "a") as file:
        file.write("max_iters = 5000\ncheckpoint_interval = 50\neval_interval = 5000\n")
    command = [
        sys.executable,
        "-m",
        "scripts.reproduce",
        "table_a4",
        "--only=softmax",
        f"--scale={scale}",
        f"--data_dir={shards}",
        f"--out={tmp_path / 'out'}",
        f"--results={tmp_path / 'results'}",
        "--wandb_mode=disabled",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    folder = tmp_path / "out/small/softmax/seed1337"
    try:
        wait_for(lambda: (run_folder.latest_step(folder) or 0) > 0, timeout=120)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == EXIT_STOPPED
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert 0 < run_folder.latest_step(folder) < 5000


def test_runs_of_other_processes_are_left_to_them(tmp_path, monkeypatch, capsys):
    """The first run is being trained elsewhere, and the fifth starts from it.

    The third starts from the second, which fails.
    """

    def run(name, base=None):
        config = small_config("softmax.py", f"--out_dir={tmp_path / name}")
        return planned.PlannedRun(config, [name], base)

    trained = []

    def call(command):
        name = command[-2]
        trained.append(name)
        return 1 if name == "second" else 0

    monkeypatch.setattr(planned, "call", call)
    monkeypatch.setattr(planned, "POLL_SECONDS", 0.01)
    finished = property(lambda self: self.folder.name in trained and self.folder.name != "second")
    monkeypatch.setattr(planned.PlannedRun, "finished", finished)
    failures = []
    first = run("first")
    runs = [first, run("third", run("second")), run("fourth"), run("fifth", first)]
    runs = planned.with_bases(runs)
    with lock_folder(first.folder, "training"):
        thread = threading.Thread(target=lambda: failures.extend(planned.train(runs)))
        thread.start()
        wait_for(lambda: trained == ["second", "fourth"])
        wait_for(lambda: "first: another process is training" in capsys.readouterr().out)
    thread.join(timeout=10)
    assert trained == ["second", "fourth", "first", "fifth"]
    assert not thread.is_alive()
    assert len(failures) == 2
    assert "second stopped with exit code 1" in failures[0]
    assert "third starts from" in failures[1]


def test_what_fails_does_not_stop_the_others(reproduced, tmp_path, monkeypatch):
    call = planned.call
    losses = eval_length.mean_losses

    def failing_call(command):
        return 1 if "relu_li.py" in " ".join(command) else call(command)

    def without_memory(run, *arguments):
        if "phi_gelu" in str(run.path):
            raise torch.OutOfMemoryError("the GPU is full\nmore")
        return losses(run, *arguments)

    monkeypatch.setattr(planned, "call", failing_call)
    monkeypatch.setattr(eval_length, "mean_losses", without_memory)
    with pytest.raises(SystemExit) as stop:
        reproduced("table_a6", "--only=relu_li,phi_gelu,softmax")
    table = read_table(tmp_path / "results/small/table_a6")
    assert stop.value.code == 1
    assert list(table["rows"]) == ["softmax"]
    training, evaluation = table["failures"]
    assert "relu_li/seed1337 stopped with exit code 1" in training
    assert "phi_gelu" in evaluation
    assert "the GPU is full" in evaluation


def test_a_table_leaves_out_runs_with_other_settings(reproduced, scale):
    """The run of softmax is not chosen the second time, so that it is not refused either."""
    reproduced("table_a4", "--only=softmax")
    scale.write_text(scale.read_text().replace("learning_rate = 0.01", "learning_rate = 0.02"))
    table = read_table(reproduced("table_a4", "--only=softmax_inverse"))
    assert list(table["rows"]) == ["softmax_inverse"]
    assert "softmax" in table["not_run"]


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["table1", "--only=softmax,ssmax"], ["--only = 'ssmax'", "lssar_p15"]),
        (["table1", "--scale=tinny"], ["'tinny'; did you mean tiny?", "124m", "FILE.py"]),
        (["recall", "--scale=124m"], ["'124m'", "tiny_mqar"]),
        (
            ["table1", "--scale=configs/scales/orbits/tiny.py"],
            ["task = 'orbits', but this needs 'language'"],
        ),
        (["table1", "--seed=3"], ["--seed cannot be set", "--seeds 3"]),
        (["table1", "--p=3"], ["--p cannot be set here", "--scale FILE.py", "batch_size"]),
        (["table1", "configs/lssar_p3.py"], ["lssar_p3.py is not a setting --key=value"]),
        (["table1", "--data_dir=nowhere"], ["nowhere", "python -m data.text"]),
        # which reads no text, but whose table records the data
        (["passkey", "--data_dir=nowhere"], ["nowhere", "python -m data.text"]),
        (
            ["table1", "--plans"],
            ["--plans is neither an option (python -m scripts.reproduce", "did you mean plan?"],
        ),
        (["ssmax_figure5", "--scale=tiny"], ["599 validation tokens", "2500"]),
    ],
)
def test_refusals_come_before_any_work(reproduced, commands, tmp_path, arguments, parts, refused):
    refused(reproduced, *arguments, says=parts)
    assert not commands
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "results").exists()


def test_a_plan_needs_no_data(reproduced, commands, tmp_path, capsys):
    reproduced("table1", f"--data_dir={tmp_path / 'fineweb10B'}", "--plan")
    printed = capsys.readouterr().out
    assert re.search(r"^entry +the paper's 1x +the paper's 2x +the paper's 4x", printed, re.M)
    for name, row in LSSAR["table1"]["rows"].items():
        assert re.search(rf"^{name} .* {row[0]:g} .* {row[3]:g}$", printed, re.M)
    assert f"data missing: {tmp_path / 'fineweb10B'}; " in printed
    assert re.search(
        r"to train: 15 runs.*disk: at most \S+ GB of checkpoints; \S+ GB", printed, re.S
    )
    cost = (
        r"(\S+) FLOP: (\S+) (\w+) of this machine, by a step of softmax; "
        r"(\S+) (\w+) of an A100"
    )
    flop, here, here_unit, a100, a100_unit = re.search(cost, printed).groups()
    seconds = {"hours": 3600, "minutes": 60, "seconds": 1}
    a100_seconds = float(a100) * seconds[a100_unit]
    assert a100_seconds == pytest.approx(float(flop) / (0.4 * 312e12), rel=0.1)
    assert float(here) * seconds[here_unit] > a100_seconds
    assert not commands
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "hours, words",
    [(1234.5, "1,234 hours"), (1.26, "1.3 hours"), (0.5, "30 minutes"), (0.001, "3.6 seconds")],
)
def test_a_duration_has_a_unit_that_suits_it(hours, words):
    assert duration(hours) == words


# ---- entries and scales ----


def test_the_swaps_of_ssmax(reproduced, scale, tmp_path, monkeypatch, refused):
    """(e) is softmax's weights with s = 1 / mean log n; (f) goes on from softmax after 7/8."""
    swaps = replace(tables.EXPERIMENTS["loss_by_length"], entries=(SSMAX_E, SSMAX_F))
    monkeypatch.setitem(tables.EXPERIMENTS, "swaps", swaps)
    with open(scale, "a") as file:
        file.write("max_iters = 16\n")
    table = read_table(reproduced("swaps", "--log_interval=3"))
    small = tmp_path / "out/small"
    steps = {path.name: run_folder.latest_step(path / "seed1337") for path in small.iterdir()}
    assert steps == {"softmax": 16, "softmax_before_f": 14, "ssmax_e": 0, "ssmax_f": 2}
    config = run_folder.read_config(small / "ssmax_e/seed1337")
    mean_log = sum(math.log(n) for n in range(1, 17)) / 16
    assert config.s_init == pytest.approx(1 / mean_log)
    e = table["rows"]["ssmax_e"]["runs"][0]
    assert e["began_with"].endswith("softmax/seed1337")
    assert e["tokens"] == 16 * 128
    f = table["rows"]["ssmax_f"]["runs"][0]
    assert f["began_with"].endswith("softmax_before_f/seed1337")
    assert f["tokens"] == 16 * 128
    assert run_folder.read_config(small / "ssmax_f/seed1337").first_batch == 14
    # a run that began with other weights is refused, and so is a run with other settings
    shutil.rmtree(small / "softmax")
    shutil.copytree(small / "softmax_before_f", small / "softmax")
    refused(reproduced, "swaps", says=("initial weights that differ", f"{small}/softmax/seed"))
    scale.write_text(scale.read_text().replace("learning_rate = 0.01", "learning_rate = 0.02"))
    refused(reproduced, "swaps", says="learning_rate = 0.01, not 0.02")


def test_the_swaps_at_the_papers_scale():
    scale = open_scale("ssmax_paper", "out")
    paper = SSMAX["swap"]
    config = scale.run(SSMAX_F, 1337).config
    assert config.first_batch == paper["softmax_steps"]
    assert config.max_iters == paper["ssmax_steps"]
    assert config.warmup_iters == paper["warmup_steps"]
    assert int(config.s_init * 1000) / 1000 == paper["s_init"]  # 0.16851, which it truncates
    assert scale.run(SOFTMAX_BEFORE_F, 1337).config.max_iters == paper["softmax_steps"]


def test_the_steps_of_the_probe_of_ssmax():
    for name, steps in (("ssmax_paper", SSMAX["figure2"]["steps"]), ("tiny", 800)):
        assert open_scale(name, "out").run(SSMAX_PROBE, 1337).config.max_iters == steps


def test_t6_has_its_own_heads_at_each_scale():
    for name, heads in {"124m": 34, "355m": 47, "45m": 19, "tiny": 5}.items():
        scale = open_scale(name, "out")
        config = scale.run(with_p("t6_lssar", 7), 1337).config
        assert config.n_head == heads
        assert config.n_layer == scale.config.n_layer
        assert config.p == 7
        assert config.d_head == scale.config.d_head


def test_an_entry_called_as_a_config_is_this_config():
    for row in (*ROWS, "t6.py", "t6_lssar_p15.py"):
        name = Path(row).stem
        assert config_entry(name).name == name
        assert config_entry(name).config == load_config([str(CONFIGS / row)])
    scale = open_scale("tiny", "out")
    for entry in (
        tables.RECALL["no positions"]["softmax"],
        tables.RECALL["ALiBi"]["softmax"],
        hybrid("ssmax"),
        with_p("lssar", 3),
        with_p("softmax", 15),
    ):
        assert scale.plan(entry, 1337).config == scale.plan(config_entry(entry.run), 1337).config


def test_copies_beyond_learned_positions_are_refused_before_training(
    reproduced, commands, scale, capsys
):
    with open(scale, "a") as file:
        file.write('positions = "learned"\n')
    with pytest.raises(SystemExit):
        reproduced("copying", "--only=softmax")
    says = "a length of 260 is beyond its learned positions, which end at block_size = 16"
    assert says in capsys.readouterr().err
    assert not commands


def test_a_refusal_under_torchrun_ends_the_command(monkeypatch, tmp_path):
    """torchrun exits with 1, as of a run that diverged."""
    monkeypatch.setattr(planned, "processes_of", lambda config: 2)
    arguments = [*SMALL, "--batch_size=1", "--total_batch_size=48", f"--out_dir={tmp_path / 'run'}"]
    run = planned.PlannedRun(load_config(arguments), arguments)
    with pytest.raises(UserError, match="run was refused; the message is above"):
        planned.train([run])


def test_a_run_takes_as_many_gpus_as_divide_its_batch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    for name, gpus in {"124m": 4, "45m": 4, "tiny": 1}.items():
        config = open_scale(name, "out").config
        assert planned.processes_of(config) == gpus, name
        assert planned.processes_of(config.replace(device="cpu")) == 1
