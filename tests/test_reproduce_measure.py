"""How the papers' tables are measured, and which measurements are taken."""

import json
import shutil

import matplotlib.image
import numpy as np
import pytest

from config import load_config
from data.shards import write_shard
from errors import UserError
from runtime import checkpoint, device
from runtime.files import read_json
from scripts import attention_maps, benchmark, downstream, eval_length, needle
from scripts.common.papers import LSSAR, PAPERS
from scripts.reproduce import __main__ as reproduce
from scripts.reproduce import measure, report, tables, training
from tests.helpers import read_table
from tests.runs import refused


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
    reproduced, call, commands, shards, tmp_path, name, script, other
):
    table = read_table(reproduced(name, "--only=softmax"))
    folder, other_shards = tmp_path / "out/small/softmax/seed1337", tmp_path / "other"
    shutil.copytree(shards, other_shards)
    results = folder / f"{script.__name__.removeprefix('scripts.')}.json"
    results.unlink()
    call(script, folder, *(part.format(other=other_shards) for part in other))
    commands.clear()
    again = read_table(reproduced(name, "--only=softmax"))
    assert (
        len(commands) == 1 and again["rows"]["softmax"]["mean"] == table["rows"]["softmax"]["mean"]
    )


def test_a_measurement_of_other_weights_is_not_taken(reproduced, commands, scale, tmp_path):
    """Another run's results, where the two differ in their learning rate only."""
    taken = read_table(reproduced("table_a4", "--only=softmax"))["rows"]["softmax"]
    scale.write_text(scale.read_text().replace("learning_rate = 0.01", "learning_rate = 0.02"))
    other = f"--out={tmp_path / 'other'}"
    expected = read_table(reproduced("table_a4", "--only=softmax", other))["rows"]["softmax"]
    results = tmp_path / "other/small/softmax/seed1337/eval_length.json"
    copied = (tmp_path / "out/small/softmax/seed1337/eval_length.json").read_text()
    results.write_text(copied)
    commands.clear()
    row = read_table(reproduced("table_a4", "--only=softmax", other))["rows"]["softmax"]
    assert [command[2] for command in commands] == ["scripts.eval_length"]
    assert row["mean"] == expected["mean"] != taken["mean"]
    assert json.loads(results.read_text())[0] == json.loads(copied)[0]
    sha256 = row["runs"][0]["evaluation"]["sha256"]
    assert sha256 == checkpoint.checkpoint_id(results.parent)["sha256"]


def test_a_row_evaluated_in_several_ways(reproduced, commands, tmp_path):
    folder = reproduced("p_at_evaluation", "--only=lssa,lssa:p15")
    assert len(commands) == 3  # trained once, evaluated twice
    table = read_table(folder)
    assert list(table["rows"]) == ["lssa", "lssa:p15"]
    measured = json.loads((tmp_path / "out/small/lssa/seed1337/eval_length.json").read_text())
    assert [(one["p"], one["window"]) for one in measured] == [
        (None, None), (None, 16), (15, None), (15, 16)
    ]  # fmt: skip
    for name, own, control in (("lssa", 0, 1), ("lssa:p15", 2, 3)):
        last = measured[own]["loss"][-1]
        alone, *_, window = measured[control]["loss"]
        assert table["rows"][name]["mean"][4:] == [last, window, min(alone, window) - last]
    assert matplotlib.image.imread(folder / "p_at_evaluation.png").std() > 0
    # the run is shared, and so are its measurements
    commands.clear()
    folder = reproduced("components", "--only=lssa,softplus_logn_p3")
    assert len(commands) == 2 and "scripts.eval_length" in commands[1]
    config = checkpoint.read_config(tmp_path / "out/small/softplus_logn_p3/seed1337")
    assert (config.attention, config.p) == ("softplus_logn", 3)
    assert matplotlib.image.imread(folder / "components.png").std() > 0
    folder = reproduced("p_sweep", "--only=lssa,lssar_p50")
    assert list(read_table(folder)["rows"]) == ["lssa", "lssar_p50"]
    assert matplotlib.image.imread(folder / "p_sweep.png").std() > 0
    commands.clear()
    folder = reproduced("rope", "--only=softmax:none,softmax:yarn")
    text = (folder / "table.md").read_text()
    assert len(commands) == 3 and "`softmax:yarn`" in text and "RoPE scaling none, yarn" in text
    folder = reproduced("loss_by_position", "--only=softmax")
    assert matplotlib.image.imread(folder / "loss_by_position.png").std() > 0


def test_the_maps_are_those_of_the_table(reproduced, call, commands, tmp_path):
    """Drawn over by another text's, they are drawn again."""
    folder, picture = tmp_path / "out/small/softmax/seed1337", "attention_maps.png"
    table = reproduced("attention_maps", "--only=softmax")
    drawn = (table / "softmax.png").read_bytes()
    call(attention_maps, folder, "--tokens=0", "--text=Another text.")
    assert (folder / picture).read_bytes() != drawn
    reproduced("attention_maps", "--only=softmax")
    assert (table / "softmax.png").read_bytes() == drawn == (folder / picture).read_bytes()
    commands.clear()
    reproduced("attention_maps", "--only=softmax")
    assert not commands


def test_passkeys_where_a_prompt_is_longer_than_the_training_length(
    reproduced, tmp_path, monkeypatch, capsys
):
    """264 bytes take 17 times the 16 of training: all lengths are 17 times the paper's multiples,
    and its values, of other multiples, are not shown."""
    monkeypatch.setattr(tables, "TRIALS", 2)
    folder = reproduced("passkey", "--only=softmax")
    table, text = read_table(folder), (folder / "table.md").read_text()
    (measured,) = json.loads((tmp_path / "out/small/softmax/seed1337/passkey.json").read_text())
    assert list(measured["parts"]) == ["272", "408", "544", "1088", "2176"]
    assert table["columns"][:2] == ["17x, 272", "25.5x, 408"] and table["multiples"][-1] == 136
    assert table["rows"]["softmax"]["paper"] is None and "paper 1" not in text
    assert "begin at 17 times that" in text and "takes 264 tokens" in text
    assert f"1 runs, {2 * (272 + 408 + 544 + 1088 + 2176):,} tokens" in capsys.readouterr().out
    config = load_config(["--out_dir=unused"])
    passkeys = tables.EXPERIMENTS["passkey"].evaluation
    assert passkeys.columns(config) == (1, 1.5, 2, 4, 8) and passkeys.notes(config) == ()


def test_needle_scores_after_fine_tuning(
    reproduced, commands, scale, tmp_path, monkeypatch, capsys
):
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
    figures = [read_table(reproduced(f"ssmax_figure{i}", *arguments)) for i in (6, 7, 8)]
    scripts = [command[2 if command[1] == "-m" else 1] for command in commands]
    assert scripts == ["train.py", "scripts.finetune_squad", "scripts.needle"]
    tuned = tmp_path / "out/small/ssmax/seed1337/squad"
    (measured,) = json.loads((tuned / "needle.json").read_text())
    assert measured["rope"] == "none" and measured["rope_theta"] == 500000
    cells = [part for part in measured["parts"].values() if "depth" in part]
    (scores,) = [part for part in measured["parts"].values() if "one needle" in part]
    assert {cell["length"] for cell in cells} == {192, 384, 768, 1536, 1920}
    at_8x = [100 * cell["correct"] for cell in cells if cell["length"] == 1536]
    assert figures[0]["rows"]["ssmax"]["mean"][3] == pytest.approx(sum(at_8x) / 5)
    best = max(head["score"] for head in scores["one needle"]["heads"])
    assert figures[1]["rows"]["ssmax"]["mean"][0] == best and scores["length"] == 1500
    tops = [trial["top_score"] for trial in scores["trials"]]
    assert figures[2]["rows"]["ssmax"]["mean"][0] == pytest.approx(sum(tops) / 2)
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
            reproduced("ssmax_figure6", *arguments, more)
        message = capsys.readouterr().err
        assert stop.value.code == 2 and f"{tuned} was fine-tuned with {part}" in message
    (tuned / "config.json").write_text(json.dumps(settings))
    # nor if it began with the weights of another run
    facts = json.loads((tuned / "squad.json").read_text())
    other = facts | {"began_with": facts["began_with"] | {"sha256": "0" * 64}}
    (tuned / "squad.json").write_text(json.dumps(other))
    with pytest.raises(SystemExit) as stop:
        reproduced("ssmax_figure6", *arguments)
    message = capsys.readouterr().err
    assert stop.value.code == 2 and f"{tuned} was fine-tuned with began_with = " in message
    (tuned / "squad.json").write_text(json.dumps(facts))
    opened = training.open_scale(str(scale), str(tmp_path / "out"), str(data), "disabled", [])
    evaluation, made = (
        tables.EXPERIMENTS["ssmax_figure7"].evaluation,
        opened.run("ssmax", 1337),
    )
    squads = (str(tmp_path / f"{name}.json") for name in ("squad", "other"))
    works = [training.Work(opened, (), range(1337, 1338), tmp_path, squad) for squad in squads]
    assert [len(evaluation.results(work, "ssmax")) for work in works] == [1, 0]
    # with other needles, or without all depths and the very scores, it would have to be made again
    assert evaluation.find(made)
    for name in (needle.cell(384, 0.9), needle.scores_name(1500, 2)):
        parts = {key: part for key, part in measured["parts"].items() if key != name}
        parts[needle.scores_name(1500, 3)] = scores
        (tuned / "needle.json").write_text(json.dumps([measured | {"parts": parts}]))
        assert evaluation.find(made) is None
    for changed in ({"sample_seed": 1}, {"sha256": "0" * 64}):  # other needles, other weights
        (tuned / "needle.json").write_text(json.dumps([measured | changed]))
        assert evaluation.find(made) is None
    for i in (6, 7, 8):
        picture = tmp_path / f"results/small/ssmax_figure{i}/ssmax_figure{i}.png"
        assert matplotlib.image.imread(picture).std() > 0


def test_the_cost_of_a_step_is_a_ratio_to_softmax(reproduced, call, tmp_path, monkeypatch):
    """Table A7 unfused and fused, measured again where the settings are others than before."""
    columns, paper = measure.Benchmark.keys, LSSAR["table_a7"]["rows"]

    def measured(rows, *_):
        """The paper's figures for its own setting, and half of them for the fused path."""
        half = {name: 1 if name.endswith("unfused") else 0.5 for name in rows}
        return {
            name: dict(zip(columns, [half[name] * v for v in paper[name.split()[0]]], strict=True))
            for name in rows
        }

    monkeypatch.setattr(benchmark, "measure", measured)
    commands = []

    def called(command):
        commands.append(command)
        call(benchmark, *command[3:])

    monkeypatch.setattr(measure, "call", called)
    text = (reproduced("table_a7") / "table.md").read_text()
    assert "| train_ms | train_mb | eval_ms | eval_mb | auto train_ms |" in text
    # 169.92 over 120.48 ms
    assert "| `lssa` | 169.9, 1.41x (169.9, 1.41x) |" in text and "| 85.0, 1.41x |" in text
    assert "attention_impl = auto, not compiled" in text
    settings = read_json(tmp_path / "results/small/table_a7/benchmark.json")["settings"]
    assert settings["attention_impl"] == "reference" and settings["compile"] is False
    reproduced("table_a7", "--wandb_mode=offline")
    assert len(commands) == 1
    text = (reproduced("table_a7", "--set=attention_impl=blocked") / "table.md").read_text()
    assert len(commands) == 2 and "attention_impl = blocked" in text
    monkeypatch.setattr(device, "processor", lambda: "another machine")
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    text = (reproduced("table_a7", "--set=attention_impl=blocked") / "table.md").read_text()
    assert len(commands) == 3 and "another machine" in text


def test_the_league_has_losses_positions_and_the_cost_of_a_step(reproduced, monkeypatch):
    pairs = []

    def measured(rows, rounds, phases):
        pairs.append({row: (config.window, config.local_window) for row, config in rows.items()})
        return {row: {"train_ms": 2.0 + i, "train_mb": 4.0 - i} for i, row in enumerate(rows)}

    monkeypatch.setattr(benchmark, "measure", measured)
    only = "--only=softmax,softmax:adaptive_temperature,swa,hybrid,hybrid:plain_rope"
    table = read_table(folder := reproduced("league", only))
    softmax = {"softmax": (None, None)}
    assert pairs[0] == softmax and pairs[1:] == [
        softmax | {row: config}
        for row, config in (
            ("swa", (4, None)),
            ("hybrid", (None, 4)),
        )
    ]  # fmt: skip
    costs = {row: entry["mean"][-3:] for row, entry in table["rows"].items()}
    assert costs["softmax"][1:] == [1, 1] and costs["swa"][1:] == [1.5, 0.75]
    assert costs["softmax"][0] == costs["swa"][0] > 0.01
    losses = {row: entry["mean"][:5] for row, entry in table["rows"].items()}
    assert len({tuple(row) for row in losses.values()}) == 6  # and swa:plain_rope, its control
    assert costs["hybrid:plain_rope"] == costs["hybrid"]  # one run, timed once
    evaluation = table["rows"]["swa"]["runs"][0]["evaluation"]
    assert evaluation["window"] == evaluation["control"]["window"] == 4
    names = {path.name for path in folder.glob("*.png")}
    assert names == {"league.png", "by_position_positions.png", "by_position_whole_rows.png"}
    pairs.clear()
    reproduced("league", only)
    assert not pairs  # timed once


def test_t6_has_losses_and_the_cost_of_generation(
    reproduced, commands, scale, tmp_path, monkeypatch
):
    timed = []

    def measured(rows, rounds, phases):
        timed.append({row: (config.block_size, config.batch_size) for row, config in rows.items()})
        return {row: {"decode_ms_spread": [2.0 + i, 9.0]} for i, row in enumerate(rows)}

    monkeypatch.setattr(benchmark, "measure", measured)
    table = read_table(folder := reproduced("t6", "--only=softmax,t6"))
    assert timed == [{"softmax": (256, 1), "t6": (256, 1)}]  # at 16 times the length
    assert table["columns"][-4:] == [
        f"16x, {report.SLIDING}",
        tables.GAIN,
        *measure.WithDecoding.costs,
    ]
    # two layers in float32: keys and values of 32, and factors of rank 2 for two heads of 64
    assert table["rows"]["softmax"]["mean"][-2:] == [2 * 2 * 32 * 4 / 1000, 2.0]
    assert table["rows"]["t6"]["mean"][-2:] == [2 * 2 * 2 * (2 + 64) * 4 / 1000, 3.0]
    assert (folder / "t6.png").is_file()
    assert "of which 255 are cached" in (folder / "table.md").read_text()
    commands.clear()
    assert read_table(reproduced("t6", "--only=t6,softmax"))["rows"] == table["rows"]
    assert len(timed) == 1 and not commands
    # a new row takes turns with those before; with other settings or on another machine they all
    # do again, and where the settings were not saved
    reproduced("t6", "--only=softmax_swiglu")
    assert list(timed[1]) == ["softmax", "t6", "softmax_swiglu"]
    config = checkpoint.read_config(tmp_path / "out/small/softmax_swiglu/seed1337")
    assert (config.mlp, config.norm, config.bias, config.mlp_hidden) == (
        "swiglu", "rmsnorm", False, 85,
    )  # fmt: skip
    blocked = ("t6", "--only=softmax,t6", "--set=attention_impl=blocked")
    reproduced(*blocked, "--set=log_interval=2")
    reproduced(*blocked, "--wandb_mode=offline")
    assert len(timed) == 3 and list(timed[2]) == ["softmax", "t6"]
    costs = read_json(folder / "costs.json")
    assert costs["settings"]["attention_impl"] == "blocked" and "data_dir" not in costs["settings"]
    for key in ("batch_size", "compile", "device", "dtype", "attention_impl"):
        other = costs | {"settings": costs["settings"] | {key: "other"}}
        config = training.open_scale(str(scale), "out", None, "disabled", []).config
        config = config.replace(attention_impl="blocked")
        assert measure.timed_otherwise(costs, config) is None
        assert measure.timed_otherwise(other, config).startswith(f"{key} = 'other', not ")
    del costs["settings"]
    (folder / "costs.json").write_text(json.dumps(costs))
    reproduced(*blocked)
    assert len(timed) == 4
    monkeypatch.setattr(device, "processor", lambda: "another machine")
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    reproduced(*blocked)
    assert len(timed) == 5 and list(timed[4]) == ["softmax", "t6"]


@pytest.mark.parametrize("name", ["table1", "passkey"])
def test_learned_positions_are_refused_before_training(reproduced, commands, scale, capsys, name):
    scale.write_text(scale.read_text() + 'positions = "learned"\n')
    refused(capsys, lambda: reproduced(name, "--only=softmax"), "learned positions, which end at")
    assert not commands


def test_tasks_are_loaded_before_training(reproduced, commands, monkeypatch, capsys):
    def offline(names, folder):
        raise UserError(f"{names}: their data are not on this machine")

    monkeypatch.setattr(downstream, "import_harness", lambda: None)
    monkeypatch.setattr(downstream, "load_tasks", offline)
    with pytest.raises(SystemExit) as stop:
        reproduced("table_a2")
    assert stop.value.code == 2 and not commands
    assert "('lambada_openai',): their data" in capsys.readouterr().err
    reproduced("table_a2", "--plan")  # what it would cost is no error
    assert "samples unknown (('lambada_openai',): their data" in capsys.readouterr().out


def test_the_plan_prices_the_evaluations(
    reproduced, scale, commands, tmp_path, monkeypatch, capsys
):
    tasks = {"a": {"samples": 30}, "b": {"samples": 12}}
    monkeypatch.setattr(downstream, "import_harness", lambda: None)
    monkeypatch.setattr(downstream, "load_tasks", lambda names, folder: tasks)
    reproduced("table_a2", "--plan")
    assert "to evaluate: 2 runs, 84 samples in all" in capsys.readouterr().out
    reproduced(
        "attention_maps", "--plan", "--only=softmax"
    )  # 599 validation tokens: 4 windows of 128
    tokens = len(attention_maps.TEXT) + 2 * 512
    assert f"to evaluate: 1 runs, {tokens:,} tokens in all" in capsys.readouterr().out
    with open(scale, "a") as file:
        file.write("block_size = 192\ntotal_batch_size = 1536\nval_tokens = 192\n")
    data = tmp_path / "text"
    data.mkdir()
    for name in ("text_val_000000", "text_train_000001"):
        write_shard(data / f"{name}.bin", np.full(4000, 97, np.uint16))
    reproduced("ssmax_figure6", f"--data={data}", "--only=ssmax", "--plan", f"--squad={__file__}")
    tokens = 5 * 1000 * 192 * (1 + 2 + 4 + 8 + 10) + 101 * 1500
    assert f"1 runs, {tokens:,} tokens in all, each fine-tuned" in capsys.readouterr().out
    assert not commands


def test_table_a1_is_of_fineweb_edu(reproduced, commands, shards, tmp_path, capsys):
    shutil.copytree(shards, tmp_path / "fineweb10B")
    with pytest.raises(SystemExit) as stop:
        reproduced("table_a1", f"--data={tmp_path / 'fineweb10B'}")
    message = capsys.readouterr().err
    assert (
        stop.value.code == 2 and not commands and "FineWeb-Edu" in message and "124m_edu" in message
    )
    table = tables.EXPERIMENTS["table_a1"]
    for scale, wanted in (("355m", "355m"), ("124m_edu", "124m_edu"), ("tiny", "124m_edu")):
        opened = training.open_scale(scale, "out", None, "disabled", [])
        assert reproduce.paper_values(table, opened)[1] == wanted
