"""What all evaluations share: options, opening a run, stored measurements, names of pictures."""

import importlib
import json
import re
import shutil
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from attention import VARIANTS
from config import Config
from errors import UserError
from layers.build import build_model
from runtime import checkpoint, files, resuming, run_folder
from scripts import attention_maps, curves, eval_length
from scripts.common import runner
from scripts.common.command_line import parse
from scripts.common.labels import label_runs, picture_path
from scripts.common.options import Options
from scripts.common.runner import NO_TEXT, Evaluation
from scripts.common.runs import load_run, open_model, rope_scaling
from scripts.reproduce.planned import PlannedRun
from tests.helpers import measured_losses, reverse_shards, saved_run, small_config
from tests.runs import ROOT

# ---- options ----


def test_every_option_comes_from_the_command_line():
    options = eval_length.LossByLength(
        lengths=(16, 32),
        tokens=64,
        data_dir="here",
        per_position=True,
        whole_documents=True,
        no_control=True,
        documents="trained",
        files=["a.txt", "b.txt"],
        rope="yarn",
        rope_factor=2.5,
        rope_theta=500000.0,
        log_base=50.0,
        attention="lssa",
        window=7,
        p=2.0,
        again=True,
        attention_impl="reference",
        device="cpu",
        dtype="bfloat16",
    )
    argv = ["out/run", "--out=a/b.pdf"]
    for field in fields(options):
        value = getattr(options, field.name)
        assert value != field.default, field.name
        if value is True:
            argv.append(f"--{field.name}")
        elif field.name == "files":
            argv += ["--files", *value]
        elif isinstance(value, tuple):  # in any order: lengths are sorted
            argv.append(f"--{field.name}={','.join(map(str, reversed(value)))}")
        else:
            argv.append(f"--{field.name}={value}")
    parsed, arguments = parse(eval_length.LossByLength, argv)
    assert parsed == options
    assert arguments.runs == ["out/run"]
    assert arguments.out == Path("a/b.pdf")
    defaults, _ = parse(eval_length.LossByLength, ["out/run"])
    assert defaults == eval_length.LossByLength()


@pytest.mark.parametrize(
    "option, message",
    [
        ("--lengths=1,x", "--lengths '1,x' must be whole numbers above 0, as 1024,2048"),
        ("--out=one.jpg", "--out one.jpg must end in .png, .pdf, .svg"),
        ("--out=README.md/x.png", "README.md: no file can be written there"),
        ("--lenghts=8", "unrecognized arguments: --lenghts=8"),
        ("--tokens=0", "--tokens = 0 must be at least 1"),
    ],
)
def test_options_are_refused_in_a_sentence(option, message):
    with pytest.raises(UserError, match=re.escape(message)):
        parse(eval_length.LossByLength, ["run", option])


@pytest.mark.parametrize(
    "options, attention, p",
    [
        ({}, "lssar", 15),
        ({"p": 3.0}, "lssar", 3),
        ({"attention": "lssa"}, "lssa", None),
        ({"attention": "softmax", "p": 2.0}, "softmax", 2),
        ({"attention": "lssar"}, "lssar", 15),
    ],
)
def test_another_variant_re_weights_only_where_it_is_asked_to(options, attention, p):
    config = Options(**options).apply_to(Config(attention="lssar", p=15.0))
    assert config.attention == attention
    assert config.p == p


def default_rope(config, options):
    return rope_scaling(config, options, open_model(config, options.window))


@pytest.mark.parametrize(
    "case, rope",
    [
        ("softmax.py", "dynamic_ntk"),
        ("ssmax.py --nope_share=0.5", "dynamic_ntk"),
        ("ssmax.py --nope_every=2", "dynamic_ntk"),
        ("swa.py --window=4 --window_pattern=SL --nope_every=2", "none"),
        ("swa.py --window=16", "none"),
        ("swa.py --window=17", "dynamic_ntk"),
        ("sssl.py --window=4", "dynamic_ntk"),
        ("hybrid_ssmax.py --local_window=4", "none"),
        ("hybrid_ssmax.py --local_window=17", "dynamic_ntk"),
        ("hybrid_ssmax.py --local_window=4 --nope_every=2", "none"),
        ("softmax_alibi.py", "none"),
    ],
)
def test_rope_is_scaled_where_a_head_sees_beyond_training(case, rope):
    assert default_rope(small_config(case), Options()) == rope


def test_rope_is_not_scaled_where_the_window_of_an_evaluation_is_the_training_length():
    config = small_config("softmax.py")
    assert default_rope(config, Options(window=16)) == "none"
    assert default_rope(config, Options(window=17)) == "dynamic_ntk"


# ---- opening a run ----


def test_the_documented_way_to_measure_something_else(trained, tmp_path, monkeypatch, capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/evaluations.md").read_text(), re.S)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/lssar_p15").symlink_to(trained)
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    text, value = capsys.readouterr().out.split(": ")
    assert text == "mean probability of the likeliest token"
    assert 0 < float(value) < 1


# ---- stored measurements ----


def add(file, facts, name):
    runner.store(file, facts, name, {"value": name}, "code", {})


def chunks_of(file, facts):
    measurements = runner.read_measurements(file)
    return runner.find_measurement(measurements, facts).get("parts")


def test_measurements_of_other_facts_stay(tmp_path):
    file = tmp_path / "results.json"
    first, second, third = ({"step": step} for step in (1, 2, 3))
    for facts, name in ((first, "a"), (second, "a"), (first, "b")):
        add(file, facts, name)
    assert chunks_of(file, first) == {"a": {"value": "a"}, "b": {"value": "b"}}
    assert chunks_of(file, second) == {"a": {"value": "a"}}
    assert chunks_of(file, third) is None


def test_a_run_that_saves_while_it_is_measured(tmp_path, shards, monkeypatch):
    """A run and its control are measured with the weights that were the newest at the beginning."""
    run = saved_run(
        tmp_path / "run", build_model(small_config("softmax.py", f"--data_dir={shards}"))
    )

    measure = eval_length.LossByLength.measure

    def save_too(evaluation, opened, chunk):
        torch.save(torch.load(run / "step_000007.pt") | {"step": 9}, run / "step_000009.pt")
        return measure(evaluation, opened, chunk)

    monkeypatch.setattr(eval_length.LossByLength, "measure", save_too)
    evaluation = eval_length.LossByLength(lengths=(32,), tokens=64)
    result = runner.measure_or_load(evaluation, run)
    assert result["step"] == result["control"]["step"] == 7


def test_weights_that_are_replaced_meanwhile_are_not_measured(tmp_path, shards, monkeypatch):
    """As best.pt is while a run trains: the control would be measured with other weights."""
    run = saved_run(
        tmp_path / "run", build_model(small_config("softmax.py", f"--data_dir={shards}"))
    )
    best = (run / "step_000007.pt").rename(run / "best.pt")

    measure = eval_length.LossByLength.measure

    def replace_too(evaluation, opened, chunk):
        newer = best.with_suffix(".new")
        torch.save(torch.load(best) | {"step": 9}, newer)
        newer.replace(best)
        return measure(evaluation, opened, chunk)

    monkeypatch.setattr(eval_length.LossByLength, "measure", replace_too)
    evaluation = eval_length.LossByLength(lengths=(32,), tokens=64)
    with pytest.raises(UserError, match=f"{best} was replaced or deleted meanwhile"):
        runner.measure_or_load(evaluation, str(best))


@pytest.mark.parametrize("again", [False, True])
def test_a_checkpoint_that_training_deletes_before_its_turn_is_named_so(run, again):
    found = checkpoint.find(run)
    found.path.unlink()
    evaluation = eval_length.LossByLength(lengths=(32,), tokens=64, again=again)
    with pytest.raises(UserError, match=f"{found.path} was replaced or deleted meanwhile"):
        runner.measure_or_load(evaluation, found)


def test_a_command_reads_a_checkpoint_once(run, call, pictures, monkeypatch):
    """A run and its control: the first command measures them, the second finds them."""
    find = checkpoint.find
    calls = []

    def recorded(*arguments):
        calls.append(arguments)
        return find(*arguments)

    monkeypatch.setattr(checkpoint, "find", recorded)
    call(eval_length, run, "--lengths=128,256", "--tokens=256")
    assert len(calls) == 1
    call(eval_length, run, "--lengths=128,256", "--tokens=256")
    assert len(calls) == 2
    assert len(measured_losses(run)) == 2


def test_commands_that_add_at_the_same_time_lose_nothing(tmp_path):
    file = tmp_path / "results.json"
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: add(file, {"step": 7}, str(i)), range(40)))
    assert len(chunks_of(file, {"step": 7})) == 40


@pytest.fixture
def other_formula(monkeypatch):
    """As if the entry of lssar in attention.py had been edited."""
    edited = replace(VARIANTS["lssar"], scale=lambda rows: 0.5)
    return lambda: monkeypatch.setitem(VARIANTS, "lssar", edited)


def test_an_edited_formula_is_remeasured(run, call, pictures, other_formula, monkeypatch, capsys):
    def losses(*options):
        call(eval_length, run, "--lengths=128", "--tokens=128", *options)
        measurements = measured_losses(run)
        return [measurement["parts"]["128 tokens"]["loss"] for measurement in measurements]

    before = losses()
    assert "other code" not in capsys.readouterr().out
    monkeypatch.setattr(runner, "code_hash", lambda evaluation: "other")
    assert losses() == before
    assert capsys.readouterr().out.count("with other code; --again repeats it") == 1
    other_formula()
    assert losses()[:1] == before
    assert losses()[1] != before[0]
    assert losses("--again")[1] != before[0]


def test_a_read_only_run_is_measured_beside_the_picture(
    run, call, pictures, refused, tmp_path, monkeypatch
):
    arguments = [eval_length, run, "--tokens=256", "--no_control"]
    call(*arguments, "--lengths=128")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    monkeypatch.setattr(files.os, "access", lambda path, mode: Path(path) != run)
    refused(call, *arguments, "--lengths=128", says="--out FILE.png puts the picture and the")
    refused(call, curves, run, says="--out FILE.png puts the picture elsewhere")
    out = tmp_path / "elsewhere/figure.pdf"
    call(*arguments, "--lengths=128,256", f"--out={out}")
    call(attention_maps, run, "--text=such is life", "--tokens=0", f"--out={out.with_stem('maps')}")
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    assert pictures[1:] == [out, out.with_stem("maps")]
    (measurement,) = json.loads(out.with_suffix(".eval_length.json").read_text())
    assert measurement["parts"].keys() == {"128 tokens", "256 tokens"}
    assert out.with_name("maps.attention_maps.json").exists()


# ---- an evaluation of one's own ----


@pytest.fixture
def likeliest(tmp_path, monkeypatch):
    """The evaluation of the docstring of scripts.common.runner, in a file of any name."""
    code = re.search(r"is a file with\n\n(.*?)\n\n`measure_or_load", runner.__doc__, re.S)[1]
    (tmp_path / "my_file.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("my_file")
    del sys.modules["my_file"]


def test_the_documented_evaluation(run, call, likeliest, capsys):
    call(likeliest, run, "--tokens=256", "--device=cpu")
    printed = capsys.readouterr().out
    evaluation = likeliest.LikeliestToken(tokens=256, device="cpu")
    result = runner.measure_or_load(evaluation, run)
    probability = result["parts"]["256 tokens"]["probability"]
    assert 0 < probability < 1
    assert printed == f"lssar_p3, 256 tokens: {probability:.4f}\n"
    (stored,) = json.loads((run / "likeliest_token.json").read_text())
    assert stored["parts"] == result["parts"]


def test_an_evaluation_notices_other_shards_and_its_own_edits(shards, likeliest, tmp_path, capsys):
    """Whatever its options are, and whatever its file is called."""
    folder = shutil.copytree(shards, tmp_path / "shards")
    model = build_model(small_config("softmax.py", f"--data_dir={folder}"))
    run = saved_run(tmp_path / "run", model)

    class OfRuns(Evaluation):
        """It has no option of the text."""

        name = "of_runs"
        tokens = 256
        chunks = likeliest.LikeliestToken.chunks
        measure = likeliest.LikeliestToken.measure
        show = likeliest.LikeliestToken.show

    class WithoutText(OfRuns):
        name = "without_text"

        def identify(self, config):
            return NO_TEXT

    def measurements(kind=OfRuns):
        """How many there are after another process has measured the run."""
        runner.hash_code.cache_clear()
        runner.measure_or_load(kind(device="cpu"), run)
        return len(json.loads((run / f"{kind.name}.json").read_text()))

    assert measurements() == measurements() == 1
    assert measurements(WithoutText) == 1
    reverse_shards(folder, "val")
    assert measurements() == measurements() == 2
    assert measurements(WithoutText) == 1
    assert "other code" not in capsys.readouterr().out
    file = tmp_path / "my_file.py"
    file.write_text(f'"""What it measures."""\n# a comment\n{file.read_text()}')
    assert measurements() == 2
    assert "other code" not in capsys.readouterr().out
    file.write_text(file.read_text().replace("softmax(-1)", "sigmoid()"))
    assert measurements() == 2
    assert "with other code; --again repeats it" in capsys.readouterr().out


def test_python_3_11_to_3_13_hash_code_alike(tmp_path):
    """The three give this hash, though they parse and print f-strings differently."""
    file = tmp_path / "code.py"
    code = """
    def mean(self, *parts: dict[str, float], **more) -> "float":
        total = sum(part["loss"] for part in parts) or -0.5e-3
        print(f"{self['name']}: {total / len(parts):.{2}f} {'nats'!r}{total = }", "\\n")
        return total if parts else None
    """
    file.write_text(textwrap.dedent(code))
    assert runner.hash_code(file) == "c1b80ab23c753590"


def test_the_hash_of_an_evaluation_covers_the_files_of_all_its_classes(likeliest, tmp_path):
    file = tmp_path / "my_file.py"
    assert runner.code_hash(likeliest.LikeliestToken()) == runner.hash_code(file)
    hash_of_file = runner.hash_code(Path(eval_length.__file__))
    assert runner.code_hash(eval_length.LossByLength()) == hash_of_file
    # a subclass in another file that leaves `measure` as it is
    other_file = tmp_path / "another_file.py"
    code = """
    import my_file

    class Likeliest(my_file.LikeliestToken):
        def summarise(self, parts):
            return {"chunks": 1}
    """
    other_file.write_text(textwrap.dedent(code))
    hashes = []
    kind = importlib.import_module("another_file").Likeliest
    for path, old, new in ((other_file, "1", "2"), (file, "softmax(-1)", "sigmoid()")):
        hashes.append(runner.code_hash(kind()))
        path.write_text(path.read_text().replace(old, new))
        runner.hash_code.cache_clear()
    hashes.append(runner.code_hash(kind()))
    del sys.modules["another_file"]
    assert len(set(hashes)) == 3


def test_a_measurement_with_another_tokenizer_is_not_taken(words_file, tmp_path):
    config = small_config("softmax.py", f"--tokenizer={words_file}")
    run = saved_run(tmp_path / "run", build_model(config))

    class One(Evaluation):
        name = "one"

        def identify(self, config):
            return NO_TEXT

        def chunks(self, config):
            return {"all": None}

        def measure(self, run, chunk):
            return {"value": 1}

        def show(self, results):
            return {}

    evaluation = One(device="cpu")
    runner.measure_or_load(evaluation, run)
    assert runner.load_stored(evaluation, run) is not None
    (run / "tokenizer.json").write_text(words_file.read_text() + "\n")
    assert runner.load_stored(evaluation, run) is None
    with pytest.raises(UserError, match="tokenizer is sha256:.* there, sha256:.* here"):
        runner.measure_or_load(evaluation, run)


def test_a_run_of_an_edited_formula_is_recognised(run, other_formula, capsys):
    config = run_folder.read_config(run)
    planned = PlannedRun(config.replace(out_dir=str(run)), [])
    assert planned.difference() is None
    other_formula()
    assert planned.difference() == "formulas of 'lssar' that differ from the current code"
    load_run(run)
    assert "was trained with formulas of 'lssar'" in capsys.readouterr().err
    with pytest.raises(UserError, match="formulas of 'lssar' that differ .* resume it with"):
        resuming.load_to_resume(config)


# ---- labels and pictures ----


def test_labels_name_the_settings_in_which_runs_differ(tmp_path):
    def labels(*settings):
        configs = [Config(seed=7).replace(**each) for each in settings]
        for i, config in enumerate(configs):
            (tmp_path / str(i)).mkdir(exist_ok=True)
            (tmp_path / f"{i}/config.json").write_text(json.dumps(config.as_dict()))
        return list(label_runs([tmp_path / str(i) for i in range(len(configs))]))

    assert labels({}, {"attention": "lssar", "p": 3.0}) == ["softmax", "lssar_p3"]
    assert labels({"seed": 1}, {"seed": 2}) == ["seed 1", "seed 2"]
    assert labels({}, {"attention": "lssa", "seed": 2}) == ["softmax, seed 7", "lssa, seed 2"]
    windows = {"window": 9}
    patterns = labels(windows, windows | {"window_pattern": "SSSL"})
    assert patterns == ["window_pattern none", "window_pattern SSSL"]
    assert labels({}, {"name": "prope", "rope_theta": 5e5}) == [
        "softmax, rope_theta 10000",
        "prope, rope_theta 500000",
    ]
    assert labels({}, {}) == ["0", "1"]
    assert labels({"name": "a" * 50}) == ["a" * 50]
    assert labels({}, {"data_dir": "a" * 50}) == ["0", "1"]


def test_a_run_that_is_given_twice_counts_once(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    again = f"{run.name}/"
    assert label_runs([run, again]) == {"lssar_p3": again}
    file = checkpoint.find(run).path
    assert list(label_runs([run, file])) == [run.name, f"{run.name}/{file.name}"]


def test_a_pattern_for_runs_may_match_pictures(run, tmp_path):
    """As seed* does once a command has drawn several runs."""
    pictures = [tmp_path / "seed1337_seed1338.png", tmp_path / "curves.svg"]
    assert list(label_runs([*pictures, run]).values()) == [run]
    with pytest.raises(UserError, match="seed1338.png does not exist"):
        label_runs(pictures)


def test_pictures_of_other_runs_have_other_names(tmp_path):
    assert picture_path([tmp_path / "a"], "loss") == tmp_path / "a/loss.png"
    runs = [tmp_path / "x/softmax", tmp_path / "y/lssa"]
    assert picture_path(runs, "loss") == tmp_path / "loss_x-softmax_y-lssa.png"
    assert picture_path(runs[:1] * 2, "loss") == tmp_path / "x/loss_softmax_softmax.png"
