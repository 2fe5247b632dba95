"""The papers' tables from nothing: what is trained, what is not again, and what is written."""

import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch

from config import Config, load_config
from data.shards import write_shard
from errors import UserError
from runtime import checkpoint, device
from runtime.distributed import EXIT_STOPPED
from scripts import (
    attention_maps,
    benchmark,
    downstream,
    eval_length,
    needle,
)
from scripts.common.papers import LSSAR, PAPERS
from scripts.reproduce import __main__ as reproduce
from scripts.reproduce import report
from scripts.reproduce import tables as experiments
from scripts.reproduce import training as rows
from tests.helpers import CONFIGS, ROWS, SMALL

ROOT = Path(__file__).parent.parent


@pytest.fixture
def scale(tmp_path):
    """A scale file with conftest's SMALL settings."""
    settings = load_config([*SMALL, "--out_dir=unused"]).as_dict()
    changed = {k: v for k, v in settings.items() if v != getattr(Config, k) and k != "out_dir"}
    path = tmp_path / "small.py"
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in changed.items()))
    return path


@pytest.fixture
def commands(monkeypatch):
    """The commands that would be processes, run in this one; a list of them."""
    done = []

    def call(command):
        done.append(command)
        module = command[2] if command[1] == "-m" else command[1].removesuffix(".py")
        monkeypatch.setattr(sys, "argv", command[2 if command[1] == "-m" else 1 :])
        monkeypatch.delitem(sys.modules, module, raising=False)  # runpy warns of a second one
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=False)
        except SystemExit as stop:
            return stop.code or 0
        return 0

    monkeypatch.setattr(rows, "call", call)
    monkeypatch.setattr(experiments, "call", call)
    return done


@pytest.fixture
def run(call, commands, scale, shards, tmp_path):
    """`python -m scripts.reproduce NAME ...` at that scale; returns the table's folder."""

    def reproduced(name, *arguments):
        common = ["--wandb_mode=disabled", f"--data={shards}", f"--out={tmp_path / 'out'}"]
        common += [f"--scale={scale}", f"--results={tmp_path / 'results'}"]
        call(reproduce, name, *common, *arguments)
        return tmp_path / "results/small" / name

    return reproduced


def read(folder):
    return json.loads((folder / "table.json").read_text())


def test_table1_end_to_end(run, commands, tmp_path, monkeypatch, capsys):
    folder = run("table1", "--only=softmax,lssar_p15", "--seeds=2")
    printed = capsys.readouterr().out
    # 4 runs of 6 steps of 128 tokens, told before any of them
    assert "to train: 4 runs (0 of them continued), 3,072 tokens" in printed
    # lengths of 1, 2, 4 and 8 times 16, each over the 256 validation tokens
    assert "to evaluate: 4 runs, 4,096 tokens in all, each with python -m scripts.eval" in printed
    assert printed.index("to train: 4 runs") < printed.index("step 6/6")
    assert len(commands) == 8
    table, text = read(folder), (folder / "table.md").read_text()
    assert list(table["rows"]) == ["softmax", "lssar_p15"]
    assert set(table["not_run"]) == set(LSSAR["table1"]["rows"]) - set(table["rows"])
    for name, row in table["rows"].items():
        losses = []
        for seed in (1337, 1338):
            saved = tmp_path / f"out/small/{name}/seed{seed}"
            assert checkpoint.read_config(saved).seed == seed
            measured = json.loads((saved / "eval_length.json").read_text())
            assert [one["lengths"] for one in measured] == [[16, 32, 64, 128]]
            losses.append(measured[0]["loss"])
        for i, both in enumerate(zip(*losses, strict=True)):
            paper = LSSAR["table1"]["rows"][name][i]
            mean, half = sum(both) / 2, abs(both[0] - both[1]) / 2
            assert row["mean"][i] == pytest.approx(mean) and row["paper"][i] == paper
            assert row["compared"][i] == pytest.approx(mean - paper)
            shown = f"{mean:.4f} ± {half:.4f} ({paper:.4f}; {mean - paper:+.4f})"
            assert shown in text.replace("**", "")
        for one in row["runs"]:
            assert (one["step"], one["tokens"]) == (6, 768)
            assert one["environment"]["commit"] and one["evaluation"]["environment"]["torch"]
    assert "8x, 128 (paper 8,192)" in text and "no errors" in text and "seeds 1337, 1338" in text
    assert matplotlib.image.imread(folder / "table1.png").std() > 0
    # the same again: nothing is trained or measured, and the files say the same
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    commands.clear()
    assert read(run("table1", "--only=softmax,lssar_p15", "--seeds=2")) == table
    assert "all 4 runs are done" in capsys.readouterr().out and not commands
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    # fewer seeds or rows do not take the table's place
    capsys.readouterr()
    for fewer in (["--only=softmax"], ["--only=softmax", "--seeds=2", f"--out={tmp_path}/new"]):
        with pytest.raises(SystemExit) as stop:
            run("table1", *fewer)
        message = capsys.readouterr().err
        assert stop.value.code == 2 and "seed 1338 of lssar_p15" in message and not commands
        assert "a table of 4 runs" in message and "--results" in message
    assert read(folder) == table
    # one seed: nothing is ranked; another table shares the runs
    run("table1", "--only=softmax", f"--results={tmp_path / 'one'}")
    folder = tmp_path / "one/small/table1"
    assert list(read(folder)["rows"]) == ["softmax", "lssar_p15"] and not commands
    text = (folder / "table.md").read_text()
    assert "nothing is ranked" in text and "**" not in text and "±" not in text
    folder = run("loss_by_length")
    assert len(read(folder)["rows"]["softmax"]["mean"]) == 5
    assert "The paper's values are those of its Table 1" in (folder / "table.md").read_text()
    assert [command[2] for command in commands] == ["scripts.eval_length"] * 2


@pytest.mark.parametrize(
    "name, script, other",
    [
        ("table_a4", eval_length, ["--lengths=16", "--data_dir={other}"]),
        ("table_a4", eval_length, ["--lengths=16", "--dtype=bfloat16"]),
        ("attention_maps", attention_maps, ["--tokens=0", "--text=Another text."]),
        ("attention_maps", attention_maps, ["--tokens=0", "--layer=0"]),
    ],
)
def test_a_measurement_of_something_else_is_not_taken(
    run, call, commands, shards, tmp_path, name, script, other
):
    table = read(run(name, "--only=softmax"))
    folder, other_shards = tmp_path / "out/small/softmax/seed1337", tmp_path / "other"
    shutil.copytree(shards, other_shards)
    results = folder / f"{script.__name__.removeprefix('scripts.')}.json"
    results.unlink()
    call(script, folder, *(part.format(other=other_shards) for part in other))
    commands.clear()
    again = read(run(name, "--only=softmax"))
    assert (
        len(commands) == 1 and again["rows"]["softmax"]["mean"] == table["rows"]["softmax"]["mean"]
    )


def test_the_maps_are_those_of_the_table(run, call, commands, tmp_path):
    """Drawn over by another text's, they are drawn again."""
    folder, picture = tmp_path / "out/small/softmax/seed1337", "attention_maps.png"
    table = run("attention_maps", "--only=softmax")
    drawn = (table / "softmax.png").read_bytes()
    call(attention_maps, folder, "--tokens=0", "--text=Another text.")
    assert (folder / picture).read_bytes() != drawn
    run("attention_maps", "--only=softmax")
    assert (table / "softmax.png").read_bytes() == drawn == (folder / picture).read_bytes()
    commands.clear()
    run("attention_maps", "--only=softmax")
    assert not commands


def test_killed_and_resumed_it_ends_as_if_it_had_not_been(run, scale, shards, tmp_path):
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
    done = read(run("table_a4", "--only=softmax", f"--out={killed}"))
    whole = read(run("table_a4", "--only=softmax"))
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
        reproduce.stop_on_signals()
        assert signal.getsignal(number) != before[number]
        threading.Thread(target=send).start()
        with pytest.raises(SystemExit) as stop:
            rows.call([sys.executable, "-c", CHILD])
        assert stop.value.code == EXIT_STOPPED and Path("ended").exists()
        signal.signal(number, signal.SIG_IGN)
        reproduce.stop_on_signals()
        assert signal.getsignal(number) == signal.SIG_IGN  # as nohup left it
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def test_the_swaps_of_ssmax(run, scale, shards, tmp_path, monkeypatch, capsys):
    """(e) is softmax's weights with s = 1 / mean log n; (f) goes on from softmax after 7/8."""
    with open(scale, "a") as file:
        file.write("schedule = 'cosine'\n")
    swapped = experiments.EXPERIMENTS["loss_by_length"]
    changed = {**vars(swapped), "rows": ("ssmax_e", "ssmax_f")}
    monkeypatch.setitem(experiments.EXPERIMENTS, "swaps", experiments.Experiment(**changed))
    table = read(run("swaps", "--set=log_interval=3"))
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
        run("swaps")
    assert stop.value.code == 2 and "ssmax_e/seed1337 was trained with" in capsys.readouterr().err
    assert not (small / "softmax").exists()
    shutil.copytree(small / "softmax_before_f", small / "softmax")
    with pytest.raises(SystemExit) as stop:
        run("swaps")
    message = capsys.readouterr().err
    assert "initial weights other" in message and f"{small}/softmax/seed1337" in message
    # under a constant rate (f) begins with softmax's own checkpoint, which is the same
    with open(scale, "a") as file:
        file.write("schedule = 'constant'\nmax_iters = 16\ncheckpoint_interval = 7\n")
    table = read(run("swaps", f"--out={tmp_path / 'constant'}"))
    constant = tmp_path / "constant/small"
    assert sorted(path.name for path in constant.iterdir()) == ["softmax", "ssmax_e", "ssmax_f"]
    (f,) = table["rows"]["ssmax_f"]["runs"]
    assert f["began_with"] == f"{constant}/softmax/seed1337/step_000014.pt"
    assert (f["step"], f["tokens"]) == (2, 16 * 128)
    opened = rows.open_scale(str(scale), str(constant), str(shards), "disabled", [])
    before = opened.run("softmax_before_f", 1337)
    rows.train([before], opened)
    kept, trained = (
        checkpoint.load(path / "step_000014.pt")["model"]
        for path in (constant / "softmax/seed1337", before.folder)
    )
    assert all(torch.equal(kept[name], trained[name]) for name in kept | trained)
    full = rows.open_scale("ssmax_paper", "out", None, "disabled", [])
    f = full.run("ssmax_f", 1337).config
    assert (f.max_iters, f.warmup_iters, round(f.s_init, 4)) == (25000, 1000, 0.1685)
    assert full.run("softmax_before_f", 1337).config.max_iters == 175000
    assert full.run("softmax", 1337).config.keep_every == 175000
    assert full.run("ssmax_f", 1337).config.init_from.endswith("softmax/seed1337/step_175000.pt")


def test_passkeys_where_a_prompt_is_longer_than_the_training_length(
    run, tmp_path, monkeypatch, capsys
):
    """264 bytes take 17 times the 16 of training: all lengths are 17 times the paper's multiples,
    and its values, of other multiples, are not shown."""
    monkeypatch.setattr(experiments, "TRIALS", 2)
    folder = run("passkey", "--only=softmax")
    table, text = read(folder), (folder / "table.md").read_text()
    (measured,) = json.loads((tmp_path / "out/small/softmax/seed1337/passkey.json").read_text())
    assert list(measured["parts"]) == ["272", "408", "544", "1088", "2176"]
    assert table["columns"][:2] == ["17x, 272", "25.5x, 408"] and table["multiples"][-1] == 136
    assert table["rows"]["softmax"]["paper"] is None and "paper 1" not in text
    assert "begin at 17 times that" in text and "takes 264 tokens" in text
    assert f"1 runs, {2 * (272 + 408 + 544 + 1088 + 2176):,} tokens" in capsys.readouterr().out
    config = load_config(["--out_dir=unused"])
    passkeys = experiments.EXPERIMENTS["passkey"].evaluation
    assert passkeys.columns(config) == (1, 1.5, 2, 4, 8) and passkeys.notes(config) == ()


def test_needle_scores_after_fine_tuning(run, commands, scale, tmp_path, monkeypatch, capsys):
    """SSMax Figs. 6 to 8: three tables of one measurement of the fine-tuned run."""
    monkeypatch.setitem(PAPERS["ssmax"]["figure6"], "samples", 1)
    monkeypatch.setitem(PAPERS["ssmax"]["figure8"], "trials", 2)
    with open(scale, "a") as file:
        file.write("n_layer = 1\nblock_size = 192\ntotal_batch_size = 1536\nval_tokens = 1920\n")
    data, rng = tmp_path / "text", np.random.default_rng(0)
    data.mkdir()
    for name in ("text_val_000000", "text_train_000001"):
        write_shard(data / f"{name}.bin", rng.integers(97, 123, 4000, np.uint16))
    questions = [
        {"question": f"Who is {i}?", "answers": [{"text": "Ann", "answer_start": 8}]}
        for i in range(3)
    ]
    articles = [{"paragraphs": [{"context": "This is Ann of Rome.", "qas": questions}]}]
    (tmp_path / "squad.json").write_text(json.dumps({"data": articles}))
    arguments = ("--only=ssmax", f"--data={data}", f"--squad={tmp_path / 'squad.json'}")
    tables = [read(run(f"ssmax_figure{i}", *arguments)) for i in (6, 7, 8)]
    scripts = [command[2 if command[1] == "-m" else 1] for command in commands]
    assert scripts == ["train.py", "scripts.finetune_squad", "scripts.needle"]
    tuned = tmp_path / "out/small/ssmax/seed1337/squad"
    (measured,) = json.loads((tuned / "needle.json").read_text())
    assert measured["rope"] == "none" and measured["rope_theta"] == 500000
    cells = [part for part in measured["parts"].values() if "depth" in part]
    (scores,) = [part for part in measured["parts"].values() if "one needle" in part]
    assert {cell["length"] for cell in cells} == {192, 384, 768, 1536, 1920}
    at_8x = [100 * cell["correct"] for cell in cells if cell["length"] == 1536]
    assert tables[0]["rows"]["ssmax"]["mean"][3] == pytest.approx(sum(at_8x) / 5)
    best = max(head["score"] for head in scores["one needle"]["heads"])
    assert tables[1]["rows"]["ssmax"]["mean"][0] == best and scores["length"] == 1500
    tops = [trial["top_score"] for trial in scores["trials"]]
    assert tables[2]["rows"]["ssmax"]["mean"][0] == pytest.approx(sum(tops) / 2)
    # fine-tuned on other questions, or otherwise, it is not taken
    questions[0]["question"] = "Who is he?"
    (tmp_path / "other.json").write_text(json.dumps({"data": articles}))
    settings = json.loads((tuned / "config.json").read_text())
    for more, changed, part in (
        (f"--squad={tmp_path / 'other.json'}", {}, "sha256 = "),
        ("--plan", {"learning_rate": 1e-3}, "learning_rate = 0.001, not 2e-05"),
    ):
        (tuned / "config.json").write_text(json.dumps(settings | changed))
        with pytest.raises(SystemExit) as stop:
            run("ssmax_figure6", *arguments, more)
        message = capsys.readouterr().err
        assert stop.value.code == 2 and f"{tuned} was fine-tuned with {part}" in message
    (tuned / "config.json").write_text(json.dumps(settings))
    opened = rows.open_scale(str(scale), str(tmp_path / "out"), str(data), "disabled", [])
    evaluation, made = (
        experiments.EXPERIMENTS["ssmax_figure7"].evaluation,
        opened.run("ssmax", 1337),
    )
    squads = (str(tmp_path / f"{name}.json") for name in ("squad", "other"))
    works = [experiments.Work(opened, (), range(1337, 1338), tmp_path, squad) for squad in squads]
    assert [len(evaluation.results(work, "ssmax")) for work in works] == [1, 0]
    # with other needles, or without all depths and the very scores, it would have to be made again
    assert evaluation.find(made)
    for name in (needle.cell(384, 0.9), needle.scores_name(1500, 2)):
        parts = {key: part for key, part in measured["parts"].items() if key != name}
        parts[needle.scores_name(1500, 3)] = scores
        (tuned / "needle.json").write_text(json.dumps([measured | {"parts": parts}]))
        assert evaluation.find(made) is None
    (tuned / "needle.json").write_text(json.dumps([measured | {"sample_seed": 1}]))
    assert evaluation.find(made) is None
    for i in (6, 7, 8):
        picture = tmp_path / f"results/small/ssmax_figure{i}/ssmax_figure{i}.png"
        assert matplotlib.image.imread(picture).std() > 0


def test_the_cost_of_a_step_is_a_ratio_to_softmax(run, call, monkeypatch):
    """Table A7, measured again where the settings are others than before."""
    measured = json.loads((ROOT / "results/benchmark_cpu_table_a7.json").read_text())["rows"]
    monkeypatch.setattr(benchmark, "measure", lambda *_: measured)
    commands = []

    def called(command):
        commands.append(command)
        call(benchmark, *command[3:])

    monkeypatch.setattr(experiments, "call", called)
    text = (run("table_a7") / "table.md").read_text()
    softmax, lssa = measured["softmax"]["train_ms"], measured["lssa"]["train_ms"]
    # the paper's 169.92 and 120.48 ms
    assert f"{lssa:,.1f}, {lssa / softmax:.2f}x (169.9, 1.41x)" in text and "unfused" not in text
    run("table_a7", "--wandb_mode=offline")
    assert len(commands) == 1
    text = (run("table_a7", "--set=attention_impl=reference") / "table.md").read_text()
    assert len(commands) == 2 and "attention_impl reference" in text and "unfused" in text
    monkeypatch.setattr(device, "processor", lambda: "another machine")
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    text = (run("table_a7", "--set=attention_impl=reference") / "table.md").read_text()
    assert len(commands) == 3 and "another machine" in text


def test_a_table_keeps_the_rows_of_runs_that_fail(run, commands, tmp_path, monkeypatch, capsys):
    folder = run("table1", "--only=softmax,lssar_p15")
    table, call = read(folder), rows.call
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setattr(rows, "call", lambda c: 1 if "lssar_p15.py" in " ".join(c) else call(c))
    with pytest.raises(SystemExit) as stop:
        run("table1", "--only=softmax,lssar_p15")
    message = capsys.readouterr().err
    assert stop.value.code == 2 and read(folder) == table
    assert "without seed 1337 of lssar_p15; " in message and "stopped with exit code 1" in message


def test_a_run_that_fails_does_not_keep_the_others(run, commands, scale, monkeypatch, capsys):
    call = rows.call

    def fails(command):
        return 1 if any("lssar_p15.py" in part for part in command) else call(command)

    monkeypatch.setattr(rows, "call", fails)
    with pytest.raises(SystemExit) as stop:
        run("table1", "--only=lssar_p15,softmax")
    printed = capsys.readouterr().out
    assert stop.value.code == 1
    assert "lssar_p15/seed1337 stopped with exit code 1 at step None" in printed
    assert "| `softmax` |" in printed and "| `lssar_p15` |" not in printed


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["table9"], ["'table9'", "table1, table2"]),
        (["table1", "--only=softmax,lssar_p16"], ["'lssar_p16'", "lssar_p15"]),
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
        (["ssmax_figure5"], ["312"]),
    ],
)
def test_refusals_come_before_any_work(run, commands, capsys, arguments, parts):
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    message = capsys.readouterr().err
    assert stop.value.code == 2 and not commands
    assert all(part in message for part in parts), message


def test_tasks_are_loaded_before_training(run, commands, monkeypatch, capsys):
    def offline(names, folder):
        raise UserError(f"{names}: their data are not on this machine")

    monkeypatch.setattr(downstream, "import_harness", lambda: None)
    monkeypatch.setattr(downstream, "load_tasks", offline)
    downstream.count_samples.cache_clear()
    with pytest.raises(SystemExit) as stop:
        run("table_a2")
    assert stop.value.code == 2 and not commands
    assert "['lambada_openai']: their data" in capsys.readouterr().err


def test_the_plan_prices_the_evaluations(run, scale, commands, tmp_path, monkeypatch, capsys):
    tasks = {"a": {"samples": 30}, "b": {"samples": 12}}
    monkeypatch.setattr(downstream, "import_harness", lambda: None)
    monkeypatch.setattr(downstream, "load_tasks", lambda names, folder: tasks)
    downstream.count_samples.cache_clear()
    run("table_a2", "--plan")
    downstream.count_samples.cache_clear()
    assert "to evaluate: 2 runs, 84 samples in all" in capsys.readouterr().out
    run("attention_maps", "--plan", "--only=softmax")  # 599 validation tokens: 4 windows of 128
    tokens = len(attention_maps.TEXT) + 2 * 512
    assert f"to evaluate: 1 runs, {tokens:,} tokens in all" in capsys.readouterr().out
    with open(scale, "a") as file:
        file.write("block_size = 192\ntotal_batch_size = 1536\nval_tokens = 192\n")
    data = tmp_path / "text"
    data.mkdir()
    for name in ("text_val_000000", "text_train_000001"):
        write_shard(data / f"{name}.bin", np.full(4000, 97, np.uint16))
    run("ssmax_figure6", f"--data={data}", "--only=ssmax", "--plan", f"--squad={__file__}")
    tokens = 5 * 1000 * 192 * (1 + 2 + 4 + 8 + 10) + 101 * 1500
    assert f"1 runs, {tokens:,} tokens in all, each fine-tuned" in capsys.readouterr().out
    assert not commands


def test_table_a1_is_of_fineweb_edu(run, commands, shards, tmp_path, capsys):
    shutil.copytree(shards, tmp_path / "fineweb10B")
    with pytest.raises(SystemExit) as stop:
        run("table_a1", f"--data={tmp_path / 'fineweb10B'}")
    message = capsys.readouterr().err
    assert (
        stop.value.code == 2 and not commands and "FineWeb-Edu" in message and "124m_edu" in message
    )
    table = experiments.EXPERIMENTS["table_a1"]
    for scale, wanted in (("355m", "355m"), ("124m_edu", "124m_edu"), ("tiny", "124m_edu")):
        opened = rows.open_scale(scale, "out", None, "disabled", [])
        assert reproduce.paper_values(table, opened)[1] == wanted


def test_a_run_with_other_settings_is_refused(run, scale, capsys):
    run("table_a4", "--only=softmax")
    scale.write_text(scale.read_text().replace("learning_rate = 0.01", "learning_rate = 0.02"))
    with pytest.raises(SystemExit) as stop:
        run("table_a4", "--only=softmax")
    message = capsys.readouterr().err
    assert stop.value.code == 2 and "learning_rate = 0.01, not 0.02" in message


def table_of(**seeds):
    """A table of one column: the values of each row's seeds."""
    made = {
        name: report.summarise([{"values": [value]} for value in values])
        for name, values in seeds.items()
    }
    return {"rows": made, "better": ["lower"]}


def test_rows_that_the_seeds_cannot_tell_apart_are_not_ranked():
    assert report.best_rows(table_of(a=[1.0, 1.2], b=[1.05, 1.3], c=[1.5, 1.6]), 0) == {"a", "b"}
    assert report.best_rows(table_of(a=[1.0, 1.02], b=[1.1, 1.13]), 0) == {"a"}
    # a row that varies much cannot be told from a better one that does not
    assert report.best_rows(table_of(a=[1.0, 1.02], b=[1.0, 1.9]), 0) == {"a", "b"}
    assert report.best_rows(table_of(a=[0.0, 0.0], b=[0.0, 0.0], c=[1.0, 1.0]), 0) == {"a", "b"}
    assert report.best_rows(table_of(a=[1.0], b=[2.0]), 0) == set()
    higher = table_of(a=[1.0, 1.1], b=[2.0, 2.1]) | {"better": ["higher"]}
    assert report.best_rows(higher, 0) == {"b"}


@pytest.mark.parametrize("row", ROWS)
def test_first_line_of_every_config_has_the_papers_numbers(row):
    line, name = (CONFIGS / row).read_text().splitlines()[0], Path(row).stem
    if name.startswith("ssmax"):
        assert PAPERS["ssmax"] and not re.search(r"\d\.\d{3}", line)  # curves only
        return
    table = re.search(r"LSSAR Table (\w+)", line)[1].lower()
    section = LSSAR["table1" if table == "1" else f"table_{table}"]
    numbers = [float(number) for number in re.findall(r"\d+\.\d{3,}", line)]
    if table != "1":
        assert numbers.pop() == section["rows"]["softmax"][0]
    assert numbers == section["rows"][name]


def test_every_row_of_the_papers_has_a_config():
    for name, experiment in experiments.EXPERIMENTS.items():
        for row in experiment.rows:
            assert rows.find_row(row).file.is_file(), (name, row)
        if experiment.paper:
            scales = experiment.paper.get("scales", {"": experiment.paper.get("rows")})
            assert all(set(there) & set(experiment.rows) for there in scales.values()), name
    assert rows.find_row("lssar_p5").changes(Config()) == {"p": 5.0}


def test_tables_that_the_papers_print_twice_agree():
    """Softmax, ReLU (Li et al.) and Sigmoid (Tab. A6) are in several tables."""
    losses = {}
    for key in ("table1", "table_a4", "table_a5", "table_a6"):
        for row, values in LSSAR[key]["rows"].items():
            assert losses.setdefault(row, values[0]) == values[0], (key, row)
    assert len(losses) == 26
