"""A grid of settings: its runs, what is trained again, the table and the picture."""

import json
import re
from pathlib import Path

import pytest

from runtime import checkpoint
from scripts import sweep
from tests.helpers import SMALL, measured_losses, not_blank
from tests.runs import metrics, refused


@pytest.fixture
def swept(call, commands, shards, tmp_path):
    """`python -m scripts.sweep configs/lssar_p15.py ...` for small runs; returns their folder."""

    def run(*arguments):
        out = f"--out_dir={tmp_path}/of/p{{p}}_{{seed}}"
        call(sweep, "configs/lssar_p15.py", *SMALL, f"--data_dir={shards}", out, *arguments)
        return tmp_path / "of"

    return run


def test_a_grid_of_orbits(call, commands, tmp_path):
    settings = ["--task=orbits", "--tie_embeddings=False", "--planets=1", "--systems=20",
                "--bins=50", f"--out_dir={tmp_path}/of/p{{p}}", "--p=1,3"]  # fmt: skip
    call(sweep, "configs/lssar_p15.py", *SMALL, *settings)
    (table,) = (tmp_path / "of").glob("*.json")
    for p, entry in zip((1, 3), json.loads(table.read_text())["rows"].values(), strict=True):
        assert entry["mean"] == [metrics(tmp_path / f"of/p{p}", "val_loss")[6]]


def test_a_grid_end_to_end(swept, commands, capsys):
    folder = swept("--p=3,15", "--seed=1,2", "--lengths=64")
    printed = capsys.readouterr().out
    assert "4 runs" in printed and "p = 3, 15; seed = 1, 2" in printed
    assert printed.index("3,072 tokens") < printed.index("step 6/6") < printed.index("| `p = 3` |")
    # a first table is complete early: all values of one seed before the next
    names = [re.search(r"p=(\d+) --seed=(\d)", " ".join(command)).groups() for command in commands]
    assert names == [("3", "1"), ("15", "1"), ("3", "2"), ("15", "2")]
    (table,) = folder.glob("*.json")
    entries = json.loads(table.read_text())["rows"]
    assert list(entries) == ["p = 3", "p = 15"]
    for p, entry in zip((3, 15), entries.values(), strict=True):
        for run, seed in zip(entry["runs"], (1, 2), strict=True):
            config = checkpoint.read_config(run["run"])
            assert (config.p, config.seed, run["seed"], run["tokens"]) == (p, seed, seed, 768)
            measured, control = measured_losses(Path(run["run"]))
            assert measured["lengths"] == [16, 64] and control["window"] == 16
            alone, window = control["loss"]
            gain = min(alone, window) - measured["loss"][-1]
            assert run["values"] == [*measured["loss"], window, gain]
    assert not_blank(table.with_suffix(".png"))
    # a larger grid shares the runs, and neither of the tables replaces the other
    commands.clear()
    before = table.read_text()
    swept("--p=3,7,15", "--seed=1", "--lengths=64")
    assert [re.search(r"--p=(\d+)", " ".join(command))[1] for command in commands] == ["7"]
    assert table.read_text() == before and len(list(folder.glob("*.json"))) == 2
    # what was trained with other settings is refused before anything is trained
    commands.clear()
    other = ("--p=3,30", "--seed=1", "--learning_rate=0.02")
    refused(capsys, lambda: swept(*other), "another --out_dir", "learning_rate = 0.01, not 0.02")
    assert not commands


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--p=3"], ["nothing to compare", "--p=3,5"]),
        (["--q=3,5"], ["'q'", "not a setting"]),
        (["--p=3,3.0"], ["two runs", "distinct"]),
        (["--learning_rate=1e-3,2e-3"], ["two runs", "{p}"]),
        (["--p=3,5", "--resume"], ["--resume"]),
        (["--block_size=16,32"], ["--block_size=16,32", "one value"]),
        (["--p=3,5", "--lengths=4096"], ["validation tokens", "4096"]),
    ],
)
def test_refusals_come_before_any_work(call, commands, shards, tmp_path, capsys, arguments, parts):
    keys = {argument.split("=")[0] for argument in arguments}
    small = [argument for argument in SMALL if argument.split("=")[0] not in keys]
    fixed = [f"--data_dir={shards}", f"--out_dir={tmp_path}/of/p{{p}}"]
    command = ("configs/lssar_p15.py", *small, *fixed, *arguments)
    refused(capsys, lambda: call(sweep, *command), *parts)
    assert not commands and not list(tmp_path.iterdir())


def test_folders_and_names(tmp_path):
    """Values as in the config; a comma separates values on the command line only."""
    file = tmp_path / "mine.py"
    file.write_text("wandb_project = 'a,b'\n")
    arguments = [str(file), "--attention=lssa,softmax", "--p=None,7.0"]
    runs = sweep.make_grid(*sweep.parse_grid(arguments)).runs
    assert [name for name, _ in runs][1:3] == [
        "attention = lssa, p = 7",
        "attention = softmax, p = None",
    ]
    folders = [str(run.folder) for run in runs.values()]
    assert folders[1:3] == ["out/sweep_mine/lssa_p7", "out/sweep_mine/softmax_pNone"]
    assert {run.config.wandb_project for run in runs.values()} == {"a,b"}
    runs = sweep.make_grid([], {"seed": ["1", "2"]}).runs
    assert list(runs) == [("softmax", 1), ("softmax", 2)]
    assert str(runs["softmax", 2].folder) == "out/sweep/seed2"
