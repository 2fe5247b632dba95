"""Configs compared with the first one: their runs, the paired differences, the table."""

import json
import os
import shutil
import statistics

import numpy as np
import pytest

from runtime import run_folder
from scripts import compare
from scripts.common.tables import summarise
from scripts.recall import Recall
from scripts.reproduce import committed_tables, kinds, planned, rebuild, report
from scripts.reproduce.entries import open_scale
from tests.helpers import (
    CONFIGS,
    SMALL,
    measured_losses,
    not_blank,
    read_table,
    reverse_shards,
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
        return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)

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
RECALL = [
    "--task=recall",
    "--block_size=64",
    "--batch_size=2",
    "--tie_embeddings=False",
    "--tokenizer=gpt2",
    "--max_iters=2",
]


def error_of_mean(values):
    return np.std(values, ddof=1) / len(values) ** 0.5


def test_two_configs_end_to_end(compared, commands, mine, tmp_path, capsys, call, refused):
    folder = compared(SOFTMAX, mine, "--seeds=2", "--lengths=64")
    printed = capsys.readouterr().out
    table = read_table(folder)
    assert folder.name == "compare_softmax_mine"
    assert len(commands) == 4
    assert printed.index("4 runs") < printed.index("step 6/6") < printed.index("| `softmax` |")
    by_stretch = {}
    gain_errors = []
    for name, layers in (("softmax", 2), ("mine", 1)):
        for seed, run in zip((1337, 1338), table["rows"][name]["runs"], strict=True):
            folder_of_run = tmp_path / f"out/small/{name}/seed{seed}"
            config = json.loads((folder_of_run / "config.json").read_text())
            assert config["n_layer"] == layers
            assert config["seed"] == run["seed"] == seed
            measured, control = measured_losses(folder_of_run)
            assert run["values"][:3] == [*measured["loss"], control["loss"][-1]]
            by_stretch[name, seed] = [np.array(p["by_stretch"]) for p in measured["parts"].values()]
            with_T = min(control["parts"].values(), key=lambda part: part["loss"])
            gain_errors.append(error_of_mean(with_T["by_stretch"] - by_stretch[name, seed][-1]))
    difference_errors = []
    for seed in (1337, 1338):
        for losses, others in zip(
            by_stretch["mine", seed], by_stretch["softmax", seed], strict=True
        ):
            difference_errors.append(error_of_mean(losses - others))
    ranges = [
        f"{min(errors):.4f} to {max(errors):.4f}" for errors in (gain_errors, difference_errors)
    ]
    sentence = "Standard error over the text: of a gain {}; of a loss minus `softmax`'s {}."
    assert sentence.format(*ranges) in printed
    row = table["rows"]["mine"]
    softmax_row = table["rows"]["softmax"]
    for i, difference in enumerate(row["difference"]["mean"]):
        values = [run["values"][i] for run in row["runs"]]
        assert f" {statistics.mean(values):.4f} ± {statistics.stdev(values):.4f} |" in printed
        differences = []
        for value, run in zip(values, softmax_row["runs"], strict=True):
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


def test_learned_positions_are_compared_at_the_training_length(compared):
    """They end there."""
    table = read_table(compared(SOFTMAX, LSSAR, "--positions=learned", "--max_iters=2"))
    assert table["multiples"] == [1]
    assert table["columns"] == ["1x, 16"]
    assert len(table["rows"]) == 2


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


def test_a_window_that_is_a_share_is_of_the_scales_training_length(compared, tmp_path):
    """A copy of swa.py is the same experiment as swa.py, and an int is tokens."""
    swa = CONFIGS / "swa.py"
    copy = shutil.copy(swa, tmp_path / "copy.py")
    short = tmp_path / "short.py"
    short.write_text("window = 5\n")
    arguments = (SOFTMAX, swa, copy, short)
    folder = compared(*map(str, arguments), "--lengths=32")
    table = read_table(folder)
    assert table["columns"][2] == "2x, sliding window of at most 1x"
    rows = table["rows"]
    assert rows["copy"]["mean"] == rows["swa"]["mean"]
    for name, window in (("softmax", 16), ("swa", 4), ("copy", 4), ("short", 5)):
        (run,) = rows[name]["runs"]
        assert run["evaluation"]["control"]["window"] == window
    text = (folder / "table.md").read_text()
    own = "The sliding window is the model's own, in tokens, for `swa` 4, `copy` 4, `short` 5."
    assert own in text
    compared(SOFTMAX, str(copy), "--window=3", "--lengths=32")
    config = json.loads((tmp_path / "out/small/copy,window=3/seed1337/config.json").read_text())
    assert config["window"] == 3


def test_an_earlier_checkpoint_does_not_stand_for_a_damaged_one(compared, tmp_path, capsys):
    compared(SOFTMAX, LSSAR, "--lengths=16")
    run = tmp_path / "out/small/softmax/seed1337"
    (run / "eval_length.json").unlink()
    *_, before, last = sorted(run.glob("step_*.pt"))
    last.write_bytes(last.read_bytes()[:1000])
    with pytest.raises(SystemExit) as stop:
        compared(SOFTMAX, LSSAR, "--lengths=16")
    assert stop.value.code == 1
    step = int(last.stem.removeprefix("step_"))
    printed = capsys.readouterr().out
    assert f"{run}: the checkpoint of step {step} cannot be read" in printed
    table = json.loads(next(tmp_path.glob("results/small/*/table.json")).read_text())
    assert "softmax" not in table["rows"]


def test_runs_of_other_data_are_not_paired(compared, commands, shards, tmp_path, refused):
    """The folder is made anew from another text of the same size between two commands."""
    data = shutil.copytree(shards, tmp_path / "data")
    ssmax = str(CONFIGS / "ssmax.py")
    arguments = ("--lengths=16", f"--data_dir={data}")
    compared(SOFTMAX, LSSAR, *arguments)
    commands.clear()
    # the same data, wherever they lie, are measured there
    moved = data.rename(tmp_path / "moved")
    compared(SOFTMAX, LSSAR, "--lengths=16,32", f"--data_dir={moved}")
    assert not commands
    shutil.copytree(moved, data)
    reverse_shards(data)
    run = tmp_path / "out/small/softmax/seed1337"
    says = (f"{run} was trained with training shards that differ from {data}; move it away",)
    refused(compared, SOFTMAX, ssmax, *arguments, says=says)
    assert not commands
    # without the data, the plan alone can be made
    shutil.rmtree(data)
    compared(SOFTMAX, ssmax, *arguments, "--plan")


def test_a_run_of_other_settings_or_initial_weights_is_not_paired(train):
    """Nor a run that had another rate in between, even if its settings now equal the plan's."""
    run = train("run", "--max_iters=3")
    resume = ("run", "--resume")
    train(*resume, "--max_iters=6")
    config = run_folder.read_config(run)
    assert planned.PlannedRun(config, []).difference() is None
    plan = planned.PlannedRun(config.replace(softcap=5.0), [])
    assert plan.difference() == "softcap = None, not 5.0"
    plan = planned.PlannedRun(config.replace(init_from="out/base"), [])
    assert plan.difference() == "random weights as its start, not init_from = 'out/base'"
    plan = planned.PlannedRun(config.replace(max_iters=9), [])
    train(*resume, "--max_iters=9", "--learning_rate=1e-3")
    assert plan.difference() == "learning_rate = 0.001, not 0.01"
    train(*resume, "--max_iters=9", "--learning_rate=1e-2")
    assert plan.difference() == "learning_rate = 0.001 from step 6 on"


def test_a_run_from_weights_that_were_trained_on_is_not_paired(train):
    """The runs of further seeds would begin with other weights."""
    base = train("base", "--max_iters=3")
    run = train("run", "--max_iters=3", f"--init_from={base}")
    plan = planned.PlannedRun(run_folder.read_config(run), [])
    assert plan.difference() is None
    train("base", "--resume", "--max_iters=6")
    assert plan.difference() == f"initial weights that differ from {base}"
    shutil.rmtree(base)  # which a finished run does not need
    assert plan.difference() is None


def test_a_run_on_other_recall_sequences_is_not_paired(train, monkeypatch):
    """As of an edited task."""
    run = train("run", *RECALL)
    plan = planned.PlannedRun(run_folder.read_config(run), [])
    monkeypatch.setattr("data.recall.hash_sequences", lambda task: "other")
    assert plan.difference() == "recall sequences that differ from this code"


def test_a_plan_warns_of_a_warm_up_as_long_as_the_run(compared, capsys):
    compared(SOFTMAX, LSSAR, "--max_iters=3", "--warmup_iters=3", "--plan")
    warning = "warning: warmup_iters = 3 of max_iters = 3 steps: the learning rate only rises"
    assert capsys.readouterr().out.count(warning) == 1


def test_data_that_change_between_two_runs_are_said(
    compared, commands, shards, tmp_path, monkeypatch, refused
):
    """Even if the run that trains at that time does not notice."""
    data = shutil.copytree(shards, tmp_path / "data")
    call = planned.call

    def call_and_edit(command):
        code = call(command)
        reverse_shards(data)
        return code

    monkeypatch.setattr(planned, "call", call_and_edit)
    says = f"softmax/seed1337 was trained with training shards that differ from {data}: the code, "
    refused(compared, SOFTMAX, LSSAR, "--lengths=16", f"--data_dir={data}", says=says)
    assert len(commands) == 1


def test_a_config_file_that_is_edited_after_its_run_is_measured_as_it_was(
    compared, mine, monkeypatch
):
    call = planned.call

    def call_and_break(command):
        code = call(command)
        if mine in command:
            with open(mine, "a") as file:
                file.write("n_head =\n")
        return code

    monkeypatch.setattr(planned, "call", call_and_break)
    folder = compared(SOFTMAX, mine, "--lengths=16")
    assert list(read_table(folder)["rows"]) == ["softmax", "mine"]


def test_runs_and_tables_in_the_home_folder():
    """A shell leaves the ~ of --out=~/runs."""
    parser = report.build_parser("scripts.compare", "", "")
    options = parser.parse_args(["--scale=tiny", "--out=~/runs", "--results=~/tables"])
    assert options.out == os.path.expanduser("~/runs")  # as of train.py
    assert options.results == os.path.expanduser("~/tables")


def test_two_files_of_one_name_are_refused(compared, commands, mine, tmp_path, refused):
    """Also where their rows have two names: they would share the folder of a run."""
    folder = tmp_path / "other"
    folder.mkdir()
    other = shutil.copy(mine, folder)
    refused(compared, mine, f"{other}:plain_rope", says="two entries are called mine:plain_rope")
    assert not commands


def test_a_seed_in_a_config_file_is_refused(compared, commands, mine, refused):
    with open(mine, "a") as file:
        file.write("seed = 7\n")
    says = f"{mine} sets seed, but --seeds 3 trains three seeds"
    refused(compared, SOFTMAX, mine, says=says)
    refused(compared, SOFTMAX, f"--scale={mine}", says=says)
    assert not commands


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
def test_other_tasks(compared, tmp_path, refused, task, settings, unit):
    sizes = ["--block_size=64", "--batch_size=2", "--tie_embeddings=False", "--tokenizer=gpt2"]
    file = write_scale(tmp_path / "small.py", *SMALL, f"--task={task}", *sizes, *settings)
    lengths = ["--lengths=64"] if task == "recall" else []
    folder = compared(SOFTMAX, LSSAR, f"--scale={file}", *lengths)
    table = read_table(folder)
    assert table["unit"] == unit
    assert table["scale"] == f"{task}/small"
    assert list(table["rows"]) == ["softmax", "lssar_p15"]
    assert folder.name == f"compare_{task}_softmax_lssar_p15"  # text has compare_softmax_lssar_p15
    if task == "orbits":
        losses = metrics(tmp_path / "out/orbits/small/lssar_p15/seed1337", "val_loss")
        assert table["rows"]["lssar_p15"]["mean"] == [losses[6]]
        arguments = (f"--scale={file}", f"--beside={folder}")
        says = "it is of orbits, whose runs are compared by their last validation alone"
        refused(compared, SOFTMAX, *arguments, says=says)
        says = "--lengths: orbits are compared by their last validation alone"
        refused(compared, SOFTMAX, LSSAR, f"--scale={file}", "--lengths=64", says=says)


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--p=3,5"], ["no config to train", "configs/softmax.py"]),
        ([SOFTMAX, "--p=3,3.0"], ["two entries are called softmax,p=3"]),
        ([SOFTMAX, "--attention=softmax,lssar"], ["attention = 'lssar' needs p"]),
        ([SOFTMAX, "--block_size=16,32"], ["--block_size", "--scale FILE.py"]),
        ([SOFTMAX, "--first_batch=0,8"], ["--first_batch: entries cannot differ in it"]),
        ([SOFTMAX, "--document_mask=True,False"], ["--document_mask: entries cannot differ in it"]),
        ([SOFTMAX, TINY], ["it has val_tokens = 65536, not the scale's 256"]),
        ([SOFTMAX, str(CONFIGS)], [f"{CONFIGS} is a folder", "python -m scripts.eval_length"]),
        ([SOFTMAX, LSSAR, "--scale=recal/tiny"], ["did you mean recall/tiny?", "orbits/tiny"]),
        (
            [SOFTMAX, f"{SOFTMAX}:plain"],
            [f"{SOFTMAX}:plain: view = 'plain'; did you mean plain_rope?", "yarn, "],
        ),
        ([SOFTMAX, "--p=3", "--p=5"], ["--p is given twice", "--p=VALUE,VALUE"]),
        ([SOFTMAX, "--p", "3,5"], ["--p needs its values after an equals sign: --p=VALUE,VALUE"]),
        ([SOFTMAX, LSSAR, "--no_control"], ["--no_control is neither an option", "nor a setting"]),
        ([SOFTMAX, "--lr=1e-3,2e-3"], ["nor a setting", "did you mean learning_rate?"]),
        ([SOFTMAX, "--length=32"], ["nor a setting", "did you mean lengths?"]),
        ([SOFTMAX, "--seed=1,2"], ["--seed cannot be set: each run has its own; --seeds 3"]),
        ([SOFTMAX, LSSAR, "--out_dir=x"], ["--out_dir cannot be set", "--out DIR is the folder"]),
        ([f"{SOFTMAX}:yarn", "--positions=rope,none"], ["has positions = 'none': no RoPE"]),
        ([SOFTMAX, LSSAR, "--lengths=4096"], ["validation tokens", "4096"]),
        (
            [SOFTMAX, LSSAR, "--positions=learned", "--lengths=32"],
            ["a length of 32 is beyond its learned positions, which end at block_size = 16"],
        ),
    ],
)
def test_refusals_come_before_any_work(compared, commands, tmp_path, arguments, parts, refused):
    refused(compared, *arguments, says=parts)
    assert not commands
    assert not (tmp_path / "out").exists()


# ---- committed results beside the entries ----

LENGTHS = (1, 2, 4)  # times the training length


@pytest.fixture
def recall_scale(scale):
    """A scale file of recall in the place of the one of text."""
    return write_scale(scale, *SMALL, *RECALL)


def recall_of(lengths):
    return kinds.recall("", (), lengths, kinds.accuracies_if_learned)


@pytest.fixture
def commit(tmp_path, monkeypatch):
    """Commit a table of two entries and two seeds, as an experiment would make it at a scale."""
    monkeypatch.setattr(committed_tables, "ROOT", tmp_path)

    def write(scale, experiment, **measured):
        rows = {}
        for first, name in enumerate(("softmax", "lssar_p15")):
            runs = []
            for seed in (1337, 1338):
                values = [first + seed / 10**4 + 10 * i for i in range(3)]
                runs.append({"seed": seed, "values": values, "evaluation": measured})
            rows[name] = summarise(runs)
        table = {
            "unit": experiment.unit,
            "columns": report.column_names(experiment, scale.config),
            "multiples": list(LENGTHS),
            "rows": rows,
            "conditions": committed_tables.conditions(scale, ()),
        }
        folder = tmp_path / "results/small/committed"
        folder.mkdir(parents=True)
        (folder / "table.json").write_text(json.dumps(table))
        return table

    return write


@pytest.fixture
def committed(commit, recall_scale):
    """The table of such an experiment on recall."""
    measured = {"answers": 512, "proportional": False, "recall": "lookup"}
    scale = open_scale(str(recall_scale), "out", "recall")
    return commit(scale, recall_of(LENGTHS), **measured)


def test_committed_rows_stand_beside_a_single_config(
    committed, compared, commands, recall_scale, mine, call
):
    arguments = (f"--scale={recall_scale}", "--lengths=64,256")
    folder = compared(mine, *arguments)
    assert len(commands) == 1
    table = read_table(folder)
    assert list(table["rows"]) == ["mine"]
    assert table["columns"] == ["1x, 64", "4x, 256"]
    rows = table["beside"]["rows"]
    assert list(rows) == ["softmax", "lssar_p15"]
    assert [run["values"] for run in rows["lssar_p15"]["runs"]] == [
        [1.1337, 21.1337],
        [1.1338, 21.1338],
    ]
    text = (folder / "table.md").read_text()
    _, _, block = text.partition("results/small/committed, of the same settings and data:")
    assert "| `softmax` | 2 | 0.1 ± 0.0 | 20.1 ± 0.0 |" in block
    picture = folder / "compare_recall_mine.png"
    assert not_blank(picture)
    # the same again from table.json alone
    (folder / "table.md").unlink()
    picture.unlink()
    call(rebuild, str(folder))
    assert (folder / "table.md").read_text() == text
    assert not_blank(picture)
    # an entry takes the place of its namesake
    table["rows"]["softmax"] = table["rows"]["mine"]
    source = committed | {"folder": "results/small/committed"}
    assert list(committed_tables.with_columns(source, table)["rows"]) == ["lssar_p15"]
    assert "beside" not in read_table(compared(mine, *arguments, "--beside=none"))


def test_a_committed_gain_at_another_length_is_left_out():
    gain = "gain from context"
    run = {"values": [3.0, 4.0, -0.1]}
    committed = {
        "folder": "results/x",
        "multiples": [1, 16],
        "columns": ["1x, 64", "16x, 1,024", f"{gain} (available: -0.2000)"],
        "rows": {"softmax": {"runs": [run]}},
    }
    for multiples, expected in (([1, 16], [3.0, 4.0, -0.1]), ([1, 2], [3.0, None, None])):
        longest = f"{multiples[-1]}x, {64 * multiples[-1]:,}"
        table = {"multiples": multiples, "columns": ["1x, 64", longest, gain], "rows": {}}
        rows = committed_tables.with_columns(committed, table)["rows"]
        assert rows["softmax"]["mean"] == expected


def test_the_rank_of_an_entry_among_committed_rows():
    means = {"a": 1, "b": 2, "c": 9, "d": None}
    rows = {name: {"mean": [0.0, mean, 99]} for name, mean in means.items()}
    table = {
        "multiples": [1, 16, 64],
        "columns": ["1x, 64", "16x, 1,024", "64x, 4,096"],
        "rows": {"mine": {"mean": [0.0, 5, 5]}, "other": {"mean": [0.0, None, None]}},
        "beside": {"folder": "results/x", "rows": rows},
    }
    sentence = (
        "At 16x, 1,024 `mine` is above 2 and below 1 of the 3 rows of results/x with a value there."
    )
    assert committed_tables.standing(table) == [sentence]


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda t: t.pop("conditions"), "does not record its settings and data"),
        (
            lambda t: t["conditions"]["settings"].update(max_iters=7),
            "was trained with max_iters = 7, not 2",
        ),
        (  # as if it came later
            lambda t: t["conditions"]["settings"].pop("n_layer"),
            "was trained with n_layer = 12, not 2",
        ),
        (
            lambda t: t["conditions"]["data"].pop("recall sequences"),
            "was trained on other recall sequences, by their hash",
        ),
        (
            lambda t: t["rows"]["softmax"]["runs"][1]["evaluation"].update(answers=9),
            "was measured with answers = 9, not 512",
        ),
        (lambda t: t.update(unit="nats"), "has nats, not answers that are right (%)"),
        (
            lambda t: t["conditions"].update(differing=["document_mask", "learning_rate"]),
            "has entries that differ in document_mask, learning_rate",
        ),
    ],
)
def test_results_of_another_experiment_are_not_shown(
    committed, compared, commands, recall_scale, mine, tmp_path, change, says, refused
):
    change(committed)
    folder = tmp_path / "results/small/committed"
    (folder / "table.json").write_text(json.dumps(committed))
    arguments = (compared, mine, f"--scale={recall_scale}")
    refused(*arguments, f"--beside={folder}", says=f"cannot be compared: it {says}")
    scale = open_scale(str(recall_scale), "out", "recall")
    is_of_this_kind = "nats" not in says and "conditions" in committed
    sentence = f"Not beside results/small/committed, which {says}." if is_of_this_kind else ""
    assert committed_tables.find(scale, recall_of(LENGTHS)) == (None, sentence)
    assert not commands


def test_results_of_another_training_are_not_shown(
    committed, compared, commands, recall_scale, mine, tmp_path, refused
):
    """Of other steps or another learning rate, whether an entry's file or the command line sets it.

    Another model is shown beside them: a comparison may be of models.
    """
    longer = tmp_path / "longer.py"
    longer.write_text("max_iters = 3\n")
    folder = tmp_path / "results/small/committed"
    arguments = (compared, f"--scale={recall_scale}", f"--beside={folder}")
    says = "was trained with max_iters = 2, not 3 as longer"
    refused(*arguments, mine, str(longer), says=says)
    says = "was trained with learning_rate = 0.01, not 0.004 as mine,learning_rate=0.004"
    refused(*arguments, mine, "--learning_rate=1e-2,4e-3", says=says)
    # the scale's initial weights are those of all entries
    recall_scale.write_text(f"{recall_scale.read_text()}init_from = 'out/base'\n")
    refused(*arguments, mine, says="was trained with init_from = '', not 'out/base'")
    assert not commands


def test_other_tables_can_be_named(committed, compared, recall_scale, mine, tmp_path, refused):
    arguments = (compared, mine, f"--scale={recall_scale}")
    refused(*arguments, f"--beside={tmp_path}", says="there is no table.json")
    for content in ("[]", "{}", '{"unit": "answers that are right (%)", "conditions": {}}'):
        (tmp_path / "table.json").write_text(content)
        refused(*arguments, f"--beside={tmp_path}", says="table.json was not made by compare or")
    scale = open_scale(str(recall_scale), "out", "recall")
    folder = str(tmp_path / "results/small/committed")
    table = committed_tables.open_table(folder, scale, recall_of(LENGTHS))
    assert table == committed | {"folder": folder}


def test_losses_on_other_text_are_not_shown(commit, scale, shards, tmp_path):
    data = shutil.copytree(shards, tmp_path / "data")

    def find():
        return committed_tables.find(
            open_scale(str(scale), "out", settings=[f"--data_dir={data}"]), experiment
        )

    experiment = kinds.loss_and_gain("", (), LENGTHS)
    same_scale = open_scale(str(scale), "out", settings=[f"--data_dir={shards}"])
    commit(same_scale, experiment, tokens=256)
    assert find()[0]["folder"] == "results/small/committed"
    reverse_shards(data)
    says = "which was trained on other training shards, by their hash."
    assert find() == (None, f"Not beside results/small/committed, {says}")
    shutil.rmtree(data)  # --plan needs none
    assert f"cannot be compared: {data} does not exist" in find()[1]


@pytest.mark.parametrize("name", ["tiny", "tiny_muon", "tiny_mqar", "tiny_latest", "tiny_sort"])
def test_the_committed_tables_of_recall_are_comparable(name):
    """The scale, the sequences and the measurement are still those of the committed results."""
    experiment = recall_of(Recall.multiples)
    table, sentence = committed_tables.find(open_scale(name, "out", "recall"), experiment)
    assert sentence == ""
    assert table["folder"] == f"results/{name}/recall"
