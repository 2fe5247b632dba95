"""Configs compared with the first one: their runs, the paired differences, the table."""

import json
import shutil
import statistics

import pytest

from runtime import run_folder
from scripts import compare
from scripts.common import planned
from scripts.reproduce import rebuild
from tests.helpers import (
    CONFIGS,
    SMALL,
    measured_losses,
    not_blank,
    read_table,
    reverse_shard,
    write_scale,
)
from tests.runs import metrics


@pytest.fixture
def compared(call, commands, scale, shards, tmp_path):
    """`python -m scripts.compare ...` at a small scale; returns the folder of the table."""

    def run(*arguments):
        common = [f"--out={tmp_path / 'out'}", f"--results={tmp_path / 'results'}"]
        if not any(argument.startswith("--scale") for argument in arguments):
            common += [f"--scale={scale}", "--wandb_mode=disabled"]
            if not any(argument.startswith("--data_dir") for argument in arguments):
                common.append(f"--data_dir={shards}")
        call(compare, *arguments, *common)
        folders = (tmp_path / "results").glob("*/compare_*")
        return max(folders, key=lambda folder: folder.stat().st_mtime)

    return run


@pytest.fixture
def mine(tmp_path):
    """A config of the user's, which overrides the scale."""
    path = tmp_path / "mine.py"
    path.write_text("attention = 'ssmax'\nn_layer = 1\n")
    return str(path)


SOFTMAX = str(CONFIGS / "softmax.py")
LSSAR = str(CONFIGS / "lssar_p15.py")
TINY = str(CONFIGS / "scales/tiny.py")


def test_two_configs_end_to_end(compared, commands, mine, tmp_path, capsys, call, refused):
    folder = compared(SOFTMAX, mine, "--seeds=2", "--lengths=64")
    printed = capsys.readouterr().out
    table = read_table(folder)
    assert folder.name == "compare_softmax_mine"
    assert len(commands) == 4
    assert printed.index("4 runs") < printed.index("step 6/6") < printed.index("| `softmax` |")
    for name, layers in (("softmax", 2), ("mine", 1)):
        for seed, run in zip((1337, 1338), table["rows"][name]["runs"], strict=True):
            run_folder = tmp_path / f"out/small/{name}/seed{seed}"
            config = json.loads((run_folder / "config.json").read_text())
            assert config["n_layer"] == layers
            assert config["seed"] == run["seed"] == seed
            measured, control = measured_losses(run_folder)
            assert run["values"][:3] == [*measured["loss"], control["loss"][-1]]
    mine = table["rows"]["mine"]
    softmax = table["rows"]["softmax"]
    for i, difference in enumerate(mine["difference"]["mean"]):
        values = [run["values"][i] for run in mine["runs"]]
        assert f" {statistics.mean(values):.4f} ± {statistics.stdev(values):.4f} |" in printed
        differences = []
        for value, run in zip(values, softmax["runs"], strict=True):
            differences.append(value - run["values"][i])
            assert f"{differences[-1]:+z.4f} |" in printed
        assert difference == pytest.approx(statistics.mean(differences))
        assert f"{difference:+z.4f} ± {statistics.stdev(differences):.4f}" in printed
    picture = folder / "compare_softmax_mine.png"
    assert not_blank(picture)
    # the same again from table.json alone
    text = (folder / "table.md").read_text()
    (folder / "table.md").unlink()
    picture.unlink()
    call(rebuild, str(folder))
    assert (folder / "table.md").read_text() == text
    assert read_table(folder) == table
    assert not_blank(picture)
    refused(call, rebuild, str(tmp_path), says="has no table.json")


def test_a_grid(compared, commands):
    folder = compared(SOFTMAX, "--attention=softmax,lssar", "--p=3", "--lengths=16")
    names = ["softmax,attention=softmax,p=3", "softmax,attention=lssar,p=3"]
    assert list(read_table(folder)["rows"]) == names
    assert len(commands) == 2
    commands.clear()  # a larger grid shares the runs
    compared(SOFTMAX, "--attention=softmax,lssar", "--p=3,5", "--lengths=16")
    assert len(commands) == 2


def test_one_run_evaluated_in_two_ways(compared, commands):
    folder = compared(SOFTMAX, f"{SOFTMAX}:plain_rope", "--lengths=64")
    assert folder.name == "compare_softmax_softmax-plain_rope"
    assert len(commands) == 1
    rows = read_table(folder)["rows"]
    assert list(rows) == ["softmax", "softmax:plain_rope"]
    assert rows["softmax"]["runs"][0]["evaluation"]["rope"] == "dynamic_ntk"
    assert rows["softmax:plain_rope"]["runs"][0]["evaluation"]["rope"] == "none"


def test_the_window_of_a_config_file_is_scaled_to_the_training_length(
    compared, commands, tmp_path, capsys
):
    """A copy of swa.py is the same experiment as swa.py, and the control says its window."""
    swa = CONFIGS / "swa.py"
    copy = shutil.copy(swa, tmp_path / "copy.py")
    with open(copy, "a") as file:  # as in the scale; without it, no multiple of block_size
        file.write("total_batch_size = 128\n")
    short = tmp_path / "short.py"
    short.write_text("window = 5\nblock_size = 16\n")
    arguments = (SOFTMAX, swa, copy, short)
    folder = compared(*map(str, arguments), "--lengths=32")
    printed = capsys.readouterr().out
    says = "copy: window = 4, scaled from 256 at 1,024 tokens to the scale's 16."
    assert says in printed[: printed.index("to train")]
    assert "short: window" not in printed
    table = read_table(folder)
    assert table["columns"][2] == "2x, sliding window of at most 1x"
    rows = table["rows"]
    assert rows["copy"]["mean"] == rows["swa"]["mean"]
    for name, window in (("softmax", 16), ("swa", 4), ("copy", 4), ("short", 5)):
        (run,) = rows[name]["runs"]
        assert run["evaluation"]["control"]["window"] == window
    text = (folder / "table.md").read_text()
    assert says in text
    own = "The sliding window is the model's own, in tokens, for `swa` 4, `copy` 4, `short` 5."
    assert own in text
    # a window of the command line is as it is
    compared(SOFTMAX, str(copy), "--window=3", "--lengths=32")
    config = json.loads((tmp_path / "out/small/copy,window=3/seed1337/config.json").read_text())
    assert config["window"] == 3


def test_runs_of_other_data_are_not_paired(compared, commands, shards, tmp_path, refused):
    """The folder is made anew from another text of the same size between two commands."""
    data = shutil.copytree(shards, tmp_path / "data")
    ssmax = str(CONFIGS / "ssmax.py")
    arguments = ("--lengths=16", f"--data_dir={data}")
    compared(SOFTMAX, LSSAR, *arguments)
    commands.clear()
    for path in data.glob("*_train_*.bin"):
        reverse_shard(path)
    run = tmp_path / "out/small/softmax/seed1337"
    says = (f"{run} was trained with other training shards than {data} has now; move it away",)
    refused(compared, SOFTMAX, ssmax, *arguments, says=says)
    assert not commands
    # a run of an earlier version does not know its data, and is accepted
    environment = json.loads((run / "environment.json").read_text())
    assert environment.pop("data").keys() == {"training shards", "validation shards"}
    (run / "environment.json").write_text(json.dumps(environment))
    compared(SOFTMAX, ssmax, *arguments)
    assert len(commands) == 1
    # without the data, the plan alone can be made
    shutil.rmtree(data)
    compared(SOFTMAX, ssmax, *arguments, "--plan")


def test_a_run_with_another_rate_in_between_is_not_paired(train):
    """In the end its settings are those of the plan again."""
    run = train("run", "--max_iters=3")
    resume = ("run", "--resume")
    train(*resume, "--max_iters=6")
    config = run_folder.read_config(run)
    assert planned.PlannedRun("run", config, []).difference() is None
    plan = planned.PlannedRun("run", config.replace(max_iters=9), [])
    train(*resume, "--max_iters=9", "--learning_rate=1e-3")
    assert plan.difference() == "learning_rate = 0.001, not 0.01"
    train(*resume, "--max_iters=9", "--learning_rate=1e-2")
    assert plan.difference() == "learning_rate = 0.001 from step 6 on"


def test_data_that_change_between_two_runs_are_said(
    compared, commands, shards, tmp_path, monkeypatch, capsys
):
    data = shutil.copytree(shards, tmp_path / "data")
    call = planned.call

    def call_and_edit(command):
        code = call(command)
        if len(commands) == 1:
            for path in data.glob("*_train_*.bin"):
                reverse_shard(path)
        return code

    monkeypatch.setattr(planned, "call", call_and_edit)
    with pytest.raises(SystemExit) as stop:
        compared(SOFTMAX, LSSAR, "--lengths=16", f"--data_dir={data}")
    assert stop.value.code == 1
    assert len(commands) == 2
    printed = capsys.readouterr().out
    assert (
        f"softmax/seed1337 was trained with other training shards than {data} has now." in printed
    )
    assert "| `softmax` |" not in printed


@pytest.mark.parametrize(
    "task, settings, unit",
    [
        ("recall", ["--val_tokens=64"], "answers that are right (%)"),
        (
            "orbits",
            ["--planets=1", "--systems=20", "--bins=50"],
            "validation loss (nats per token)",
        ),
    ],
)
def test_other_tasks(compared, tmp_path, task, settings, unit):
    sizes = ["--block_size=64", "--batch_size=2", "--tie_embeddings=False", "--tokenizer=gpt2"]
    file = write_scale(tmp_path / "small.py", *SMALL, f"--task={task}", *sizes, *settings)
    folder = compared(SOFTMAX, LSSAR, f"--scale={file}", "--lengths=64")
    table = read_table(folder)
    assert table["unit"] == unit
    assert list(table["rows"]) == ["softmax", "lssar_p15"]
    assert folder.name == f"compare_{task}_softmax_lssar_p15"  # text has compare_softmax_lssar_p15
    if task == "orbits":
        losses = metrics(tmp_path / "out/orbits/small/lssar_p15/seed1337", "val_loss")
        assert table["rows"]["lssar_p15"]["mean"] == [losses[6]]


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ([SOFTMAX], ["nothing to compare", "two configs", "--p=3,5"]),
        ([SOFTMAX, "--p=3,3.0"], ["two entries are called softmax,p=3"]),
        ([SOFTMAX, "--attention=lssa,lsar,softmax"], ["did you mean lssar?"]),
        ([SOFTMAX, "--attention=softmax,lssar"], ["attention = 'lssar' needs p"]),
        ([SOFTMAX, "--block_size=16,32"], ["--block_size", "--scale FILE.py"]),
        ([SOFTMAX, "--document_mask=True,False"], ["--document_mask: entries cannot differ in it"]),
        ([SOFTMAX, TINY], ["it has val_tokens = 65536, not the scale's 256"]),
        ([SOFTMAX, LSSAR, "--scale=recal/tiny"], ["'recal/tiny' must be a file of configs/scales"]),
        ([SOFTMAX, LSSAR, "--seeds=0"], ["--seeds 0 must be at least 1"]),
        ([SOFTMAX, f"{SOFTMAX}:plain"], ["'plain' must be one of", "plain_rope, "]),
        ([SOFTMAX, "--p=3", "--p=5"], ["--p needs its values once: --p=VALUE,VALUE"]),
        ([f"{SOFTMAX}:yarn", "--positions=rope,none"], ["has positions = 'none': no RoPE"]),
        ([SOFTMAX, "--p=[3]"], ["p = [3]", "must be"]),
        ([SOFTMAX, LSSAR, "--lengths=4096"], ["validation tokens", "4096"]),
    ],
)
def test_refusals_come_before_any_work(compared, commands, tmp_path, arguments, parts, refused):
    refused(compared, *arguments, says=parts)
    assert not commands
    assert not (tmp_path / "out").exists()
