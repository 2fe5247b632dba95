"""What all evaluations share: options, opening a run, stored measurements, names of pictures."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest

from config import Config
from errors import UserError
from scripts import eval_length
from scripts.common.runner import Options, Store, parse, picture_path
from tests.runs import ROOT

# ---- options ----


def test_every_option_comes_from_the_command_line():
    evaluation = eval_length.LossByLength(
        lengths=(16, 32), tokens=64, data_dir="here", per_position=True,
        whole_documents=True, no_control=True,
        rope="yarn", rope_factor=2.5, rope_theta=500000.0, checkpoint="best", attention="lssa",
        window=7, p=2.0, again=True, attention_impl="reference", device="cpu", dtype="bfloat16",
    )  # fmt: skip
    argv = ["out/run", "--out=a/b.pdf"]
    for one in fields(evaluation):
        value = getattr(evaluation, one.name)
        assert value != one.default, one.name
        # in any order: lengths are sorted
        text = ",".join(map(str, value[::-1])) if isinstance(value, tuple) else value
        argv.append(f"--{one.name}" if value is True else f"--{one.name}={text}")
    parsed, given = parse(type(evaluation), argv)
    assert parsed == evaluation and (given.runs, given.out) == (["out/run"], Path("a/b.pdf"))
    assert parse(type(evaluation), ["out/run"])[0] == type(evaluation)()


@pytest.mark.parametrize(
    "option, message",
    [
        ("--tokens=0", "--tokens 0 must be at least 1"),
        ("--lengths=1,x", "--lengths '1,x' must be whole numbers, such as 1024,2048"),
        ("--out=one.jpg", "--out one.jpg must end in .png, .pdf, .svg"),
        ("--lenghts=8", "unrecognized arguments: --lenghts=8"),
    ],
)
def test_options_are_refused_in_a_sentence(option, message):
    with pytest.raises(UserError, match=re.escape(message)):
        parse(eval_length.LossByLength, ["run", option])


@pytest.mark.parametrize(
    "options, attention, p",
    [({}, "lssar", 15), ({"p": 3.0}, "lssar", 3), ({"attention": "lssa"}, "lssa", None),
     ({"attention": "softmax", "p": 2.0}, "softmax", 2), ({"attention": "lssar"}, "lssar", 15)],
)  # fmt: skip
def test_another_variant_re_weights_only_where_it_is_asked_to(options, attention, p):
    config = Options(**options).applied(Config(attention="lssar", p=15.0))
    assert (config.attention, config.p) == (attention, p)


# ---- opening a run ----


def test_the_documented_way_to_measure_something_else(trained, tmp_path, monkeypatch, capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/evaluations.md").read_text(), re.S)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/lssar_p15").symlink_to(trained)
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    text, value = capsys.readouterr().out.split(": ")
    assert text == "mean probability of the likeliest token" and 0 < float(value) < 1


# ---- stored measurements ----


def test_measurements_of_other_facts_stay(tmp_path):
    first, second, third = (Store(tmp_path / "results.json", {"step": step}) for step in (1, 2, 3))
    for store, part in ((first, "a"), (second, "a"), (first, "b")):
        store.add(part, {"value": part})
    assert first.parts == {"a": {"value": "a"}, "b": {"value": "b"}}
    assert second.parts == {"a": {"value": "a"}} and third.values == {}


def test_commands_that_add_at_the_same_time_lose_nothing(tmp_path):
    def add(i):
        Store(tmp_path / "results.json", {"step": 7}).add(str(i), {"value": i})

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add, range(40)))
    assert len(Store(tmp_path / "results.json", {"step": 7}).parts) == 40


# ---- pictures ----


def test_pictures_of_other_runs_have_other_names(tmp_path):
    assert picture_path([tmp_path / "a"], "loss") == tmp_path / "a/loss.png"
    runs = [tmp_path / "x/softmax", tmp_path / "y/lssa"]
    assert picture_path(runs, "loss") == tmp_path / "loss_x-softmax_y-lssa.png"
    assert picture_path(runs[:1] * 2, "loss") == tmp_path / "x/loss_softmax_softmax.png"
    many = [tmp_path / "softmax" / f"seed{i}" for i in range(50)]
    names = {picture_path(runs, "loss").name for runs in (many, many[:-1], many[:-2])}
    assert len(names) == 3 and all(len(name) < 120 for name in names)
