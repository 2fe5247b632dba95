"""The papers' tables from nothing: what is trained, what is not again, and what is written."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import matplotlib.image
import pytest

from runtime import checkpoint
from runtime.distributed import EXIT_STOPPED
from runtime.files import is_locked
from scripts.common import planned
from scripts.common.papers import LSSAR
from scripts.reproduce import __main__ as reproduce
from tests.helpers import read_table
from tests.runs import ROOT, metrics, wait_for


def test_table1_end_to_end(reproduced, commands, tmp_path, monkeypatch, capsys):
    folder = reproduced("table1", "--only=softmax,lssar_p15", "--seeds=2")
    printed = capsys.readouterr().out
    # 4 runs of 6 steps of 128 tokens, told before any of them
    assert "to train: 4 runs (0 of them continued), 3,072 tokens" in printed
    # lengths of 1, 2, 4 and 8 times 16, each over the 256 validation tokens, and their control
    assert "to evaluate: 4 runs, 8,192 tokens in all, each with python -m scripts.eval" in printed
    assert printed.index("to train: 4 runs") < printed.index("step 6/6")
    assert len(commands) == 8
    table, text = read_table(folder), (folder / "table.md").read_text()
    assert list(table["rows"]) == ["softmax", "lssar_p15"]
    assert set(table["not_run"]) == set(LSSAR["table1"]["rows"]) - set(table["rows"])
    for name, row in table["rows"].items():
        losses, gains = [], []
        for seed in (1337, 1338):
            saved = tmp_path / f"out/small/{name}/seed{seed}"
            assert checkpoint.read_config(saved).seed == seed
            measured = json.loads((saved / "eval_length.json").read_text())
            assert [one["lengths"] for one in measured] == [[16, 32, 64, 128]] * 2
            loss, control = (one["loss"] for one in measured)
            assert (measured[1]["window"], measured[1]["rope"]) == (16, "none")
            losses.append([*loss, control[-1]])
            gains.append(min(control[0], control[-1]) - loss[-1])
        assert row["mean"][-1] == pytest.approx(sum(gains) / 2)
        *losses, windows = zip(*losses, strict=True)
        assert row["mean"][-2] == pytest.approx(sum(windows) / 2)
        for i, both in enumerate(losses):
            paper = LSSAR["table1"]["rows"][name][i]
            mean, half = sum(both) / 2, abs(both[0] - both[1]) / 2
            assert row["mean"][i] == pytest.approx(mean) and row["paper"][i] == paper
            assert row["compared"][i] == pytest.approx(mean - paper)
            shown = f"{mean:.4f} ± {half:.4f} ({paper:.4f}; {mean - paper:+.4f})"
            assert shown in text.replace("**", "")
        for one in row["runs"]:
            assert (one["step"], one["tokens"]) == (6, 768)
            assert one["environment"]["commit"] and one["evaluation"]["environment"]["torch"]
    assert "8x, sliding window of 1x | gain from context |" in text and "hurt by it" in text
    assert (
        "8x, 128 (paper 8,192)" in text
        and "differ, so compare" in text
        and "seeds 1337, 1338" in text
    )
    assert matplotlib.image.imread(folder / "table1.png").std() > 0
    # the same again: nothing is trained or measured, and the files say the same
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    commands.clear()
    assert read_table(reproduced("table1", "--only=softmax,lssar_p15", "--seeds=2")) == table
    assert "all 4 runs are done" in capsys.readouterr().out and not commands
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    # one seed does not take the table's place, and nothing is ranked; --plan says the same
    capsys.readouterr()
    where = f"the table goes to {folder}_2; {folder} has other runs or seeds"
    for last in (["--plan"], []):
        reproduced("table1", "--only=softmax", *last)
        assert where in capsys.readouterr().out and not commands
        assert Path(f"{folder}_2").exists() == (not last)
    assert read_table(folder) == table
    beside = Path(f"{folder}_2")
    assert list(read_table(beside)["rows"]) == ["softmax", "lssar_p15"]
    # neither do fewer rows, as in a fresh clone; a third table is none's
    reproduced("table1", "--only=softmax", "--plan", f"--out={tmp_path}/new")
    assert f"the table goes to {folder}_3" in capsys.readouterr().out and not commands
    # another p takes its place among the rows, and stays there
    reproduced("table1", "--only=lssar_p7")
    assert len(commands) == 2
    reproduced("table1", "--only=softmax")
    assert len(commands) == 2
    again = read_table(beside)
    assert list(again["rows"]) == ["softmax", "lssar_p7", "lssar_p15"]
    assert again["rows"]["lssar_p7"]["paper"] is None
    assert checkpoint.read_config(tmp_path / "out/small/lssar_p7/seed1337").p == 7
    text = (beside / "table.md").read_text()
    assert "nothing is ranked" in text and "**" not in text and "±" not in text
    commands.clear()
    folder = reproduced("loss_by_length")
    assert len(read_table(folder)["rows"]["softmax"]["mean"]) == 7
    assert "of its Table 1, of 124M trained on FineWeb-10B" in (folder / "table.md").read_text()
    assert [command[2] for command in commands] == ["scripts.eval_length"] * 2


def test_help_lists_every_name_and_what_it_costs(call, capsys):
    with pytest.raises(SystemExit):
        call(reproduce, "--help")
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in reproduce.EXPERIMENTS)
    assert "loss by length: 15 runs, 148B tokens" in printed
    assert "attention fading: no training" in printed


def test_killed_and_resumed_it_ends_as_if_it_had_not_been(reproduced, scale, shards, tmp_path):
    with open(scale, "a") as file:
        file.write("max_iters = 150\ncheckpoint_interval = 10\neval_interval = 150\n")
    killed = tmp_path / "killed"
    common = ["table_a4", "--only=softmax", f"--scale={scale}", "--wandb_mode=disabled"]
    arguments = [*common, f"--data={shards}", f"--out={killed}", f"--results={tmp_path / 'two'}"]
    command = [sys.executable, "-m", "scripts.reproduce", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
    folder = killed / "small/softmax/seed1337"
    for _ in range(1200):
        if (checkpoint.step(folder) or 0) > 0 or process.poll() is not None:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    stopped = checkpoint.step(folder)
    assert 0 < stopped < 150 and process.returncode == EXIT_STOPPED
    time.sleep(0.3)
    assert checkpoint.step(folder) == stopped  # the training has ended too
    done = read_table(reproduced("table_a4", "--only=softmax", f"--out={killed}"))
    whole = read_table(reproduced("table_a4", "--only=softmax"))
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == list(range(1, 151))
    assert done["rows"]["softmax"]["mean"] == whole["rows"]["softmax"]["mean"]


CHILD = """
import signal, sys
from pathlib import Path

def end(*_):
    Path("ended").touch()
    sys.exit()

signal.signal(signal.SIGTERM, end)
Path("there").touch()
signal.pause()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_ends_the_child_too(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    number = getattr(signal, name)
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}

    def send():
        while not Path("there").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    try:
        planned.stop_on_signals()
        assert signal.getsignal(number) != before[number]
        threading.Thread(target=send).start()
        with pytest.raises(SystemExit) as stop:
            planned.call([sys.executable, "-c", CHILD])
        assert stop.value.code == EXIT_STOPPED and Path("ended").exists()
        signal.signal(number, signal.SIG_IGN)
        planned.stop_on_signals()
        assert signal.getsignal(number) == signal.SIG_IGN  # as nohup left it
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def test_a_table_keeps_the_rows_of_runs_that_fail(
    reproduced, commands, tmp_path, monkeypatch, capsys
):
    folder = reproduced("table_a6", "--only=softmax,relu_li")
    table, call = read_table(folder), planned.call
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setattr(planned, "call", lambda c: 1 if "relu_li.py" in " ".join(c) else call(c))
    with pytest.raises(SystemExit) as stop:
        reproduced("table_a6", "--only=softmax,relu_li")
    beside = read_table(Path(f"{folder}_2"))
    assert stop.value.code == 1 and read_table(folder) == table
    assert list(beside["rows"]) == ["softmax"]
    assert "stopped with exit code 1" in beside["failures"][0]
    assert f"written: {folder}_2" in capsys.readouterr().out


def test_a_run_that_fails_does_not_keep_the_others(
    reproduced, commands, scale, monkeypatch, capsys
):
    call = planned.call

    def fails(command):
        return 1 if any("lssar_p15.py" in part for part in command) else call(command)

    monkeypatch.setattr(planned, "call", fails)
    with pytest.raises(SystemExit) as stop:
        reproduced("table1", "--only=lssar_p15,softmax")
    printed = capsys.readouterr().out
    assert stop.value.code == 1
    assert "lssar_p15/seed1337 stopped with exit code 1 at step None" in printed
    assert "| `softmax` |" in printed and "| `lssar_p15` |" not in printed


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["table9"], ["'table9'", "table1, table2"]),
        (["table1", "--only=softmax,ssmax_p16"], ["'ssmax_p16'", "lssar_p15", "any p"]),
        (["table1", "--only=sigmoid_p3"], ["'sigmoid'", "takes no p"]),
        (["table_a7", "--only=softmax_p3"], ["'softmax_p3'"]),
        (["table1", "--seeds=0"], ["--seeds 0", "at least 1"]),
        (["table1", "--scale=huge"], ["'huge'", "124m", "tiny"]),
        (["table1", "--scale=nowhere.py"], ["nowhere.py", "does not exist"]),
        (["table1", "--data=nowhere"], ["nowhere", "python -m data.text"]),
        (["table1", "--data=fineweb10B"], ["fineweb10B", "python -m data.fineweb"]),
        (["table1", "--results=README.md"], ["README.md/small/table1", "Not a directory"]),
        (["table1", "--out=README.md/new"], ["README.md/new", "Not a directory"]),
        (["table1", "--set=n_layer=3"], ["n_layer=3", "batch_size"]),
        (["table1", "--set=device", "--set=dtype=float32"], ["'device'", "KEY=VALUE"]),
        (["table1", "--set=compile"], ["'compile'", "KEY=VALUE"]),
        (["table1", "--set=batch_size=7"], ["batch_size", "would work"]),
        (["ssmax_figure6", "--squad=nowhere.json"], ["--squad nowhere.json"]),
        (
            ["ssmax_figure6", f"--squad={__file__}"],
            ["length 1440 needs a haystack", "600 validation tokens"],
        ),
        (["ssmax_figure5", "--scale=tiny"], ["600 validation tokens", "sequence of 2500"]),
    ],
)
def test_refusals_come_before_any_work(reproduced, commands, capsys, arguments, parts):
    with pytest.raises(SystemExit) as stop:
        reproduced(*arguments)
    message = capsys.readouterr().err
    assert stop.value.code == 2 and not commands
    assert all(part in message for part in parts), message


@pytest.fixture
def start(scale, shards, tmp_path):
    """Start `python -m scripts.reproduce table_a4` as a process; all of them share the run."""
    with open(scale, "a") as file:
        file.write("max_iters = 1200\ncheckpoint_interval = 50\neval_interval = 1200\n")
    started = []

    def process(name):
        command = [sys.executable, "-m", "scripts.reproduce", "table_a4", "--only=softmax"]
        command += [f"--scale={scale}", f"--data={shards}", f"--out={tmp_path / 'out'}"]
        command += [f"--results={tmp_path / name}", "--wandb_mode=disabled"]
        with open(tmp_path / f"{name}.txt", "w") as output:
            one = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        started.append(one)
        return one

    yield process
    for one in started:
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()


@pytest.mark.parametrize("killed", [False, True])
def test_two_at_the_same_time(start, tmp_path, killed):
    """The second says who trains the run and waits; where the first is killed, it goes on."""
    folder = tmp_path / "out/small/softmax/seed1337"
    first = start("first")
    wait_for(lambda: is_locked(folder))
    second, impatient = start("second"), start("impatient")
    waiting = f"{folder}: another process is training this run"
    for name in ("second", "impatient"):
        wait_for(lambda name=name: waiting in (tmp_path / f"{name}.txt").read_text())
    impatient.send_signal(signal.SIGINT)
    assert impatient.wait(timeout=30) == 130
    if killed:
        wait_for(lambda: (checkpoint.step(folder) or 0) > 0)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        assert 0 < checkpoint.step(folder) < 1200
    assert second.wait(timeout=120) == 0
    printed = (tmp_path / "second.txt").read_text()
    assert "error:" not in printed and ("step 1200/1200" in printed) == killed
    steps = list(metrics(folder))
    assert steps == list(range(1, 1201))
    table = read_table(tmp_path / "second/small/table_a4")
    if not killed:
        assert first.wait(timeout=120) == 0
        assert read_table(tmp_path / "first/small/table_a4")["rows"] == table["rows"]
    assert list(table["rows"]) == ["softmax"]


def test_the_plan_without_shards(reproduced, commands, tmp_path, capsys):
    """Tokens that only the shards tell are unknown; what is wrong is still refused."""
    data = f"--data={tmp_path / 'fineweb10B'}"
    missing = f"{tmp_path / 'fineweb10B'}: no such folder"
    for name, runs in (("table1", 15), ("attention_maps", 2)):
        reproduced(name, data, "--plan")
        printed = capsys.readouterr().out
        assert f"to train: {runs} runs" in printed
        assert f"{runs} runs at most, tokens unknown ({missing}" in printed
        assert "python -m data.fineweb" in printed
    reproduced("passkey", data, "--plan")
    assert "tokens in all" in capsys.readouterr().out  # prompts take no shards
    with pytest.raises(SystemExit) as stop:
        reproduced("table1", data, "--plan", "--set=batch_size=7")
    assert stop.value.code == 2 and "would work" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        reproduced("table1", data)
    assert stop.value.code == 2 and missing in capsys.readouterr().err
    assert not commands and not (tmp_path / "out").exists()
