"""Passkey retrieval."""

import json
import shutil

import numpy as np
import pytest
import torch

from data.tokenizer import get_tokenizer
from errors import UserError
from generation import generate
from model import GPT
from runtime import checkpoint
from scripts import passkey
from scripts.common import retrieval, runner
from scripts.common.runner import Store
from tests.helpers import Reader, not_blank, small_config, stub_run


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_passkey_tells_a_reader_from_one_that_is_wrong(tmp_path, monkeypatch, name):
    tokenizer = get_tokenizer(name)
    evaluation = passkey.Passkeys(rope="none", lengths=(320, 400), trials=40, seed=1)
    pattern = r"The pass key is (\d+)\. Remember it\. \1 is the pass key\."
    for folder, change, accuracy in (
        ("right", str, 1),
        ("one_more", lambda key: int(key) + 1, 0),
        ("longer", lambda key: key + "0", 0),
        ("silent", lambda key: "no idea", 0),
    ):
        (tmp_path / folder).mkdir()
        model = Reader(tokenizer, pattern, change)
        monkeypatch.setattr(retrieval, "generate", model)
        results = Store(tmp_path / folder / "passkey.json", {})
        evaluation.measure(stub_run(tmp_path / folder, name), results)
        # prompt and answer together have the length
        assert model.lengths == {320 - 16, 400 - 16} and model.never == {None}
        for part in results.parts.values():
            assert part["accuracy"] == accuracy and len(part["trials"]) == 40
            assert set(part["accuracy_by_depth"]) - {None} == {accuracy}


def test_passkey_prompts():
    tokenizer = get_tokenizer("gpt2")
    trials = passkey.make_trials(tokenizer, 1024, 200, seed=1)
    for trial in trials:
        assert len(trial.prompt) == 1024 - retrieval.ANSWER_TOKENS
        text = tokenizer.decode(trial.prompt)
        task, before, told, after, question = text.split("\n")
        assert task.startswith("<|endoftext|>There is an important info")
        assert told == f"The pass key is {trial.key}. Remember it. {trial.key} is the pass key."
        assert question == "What is the pass key? The pass key is"
        whole = " ".join([passkey.FILLER] * 100)
        assert whole.startswith(before) and whole.startswith(after)
        share = len(before) / (len(before) + len(after))
        assert share == pytest.approx(trial.depth, abs=0.02)
        # the pieces are tokens of the text as a whole, too
        assert trial.prompt[1:] == tokenizer.encode(text.removeprefix("<|endoftext|>"))
    depths, keys = [t.depth for t in trials], [t.key for t in trials]
    assert min(depths) < 0.05 and max(depths) > 0.95 and 0.4 < np.mean(depths) < 0.6
    assert 1 <= min(keys) < 2500 and 47500 < max(keys) <= 50000
    assert passkey.make_trials(tokenizer, 1024, 3, seed=1) == trials[:3]
    assert passkey.make_trials(tokenizer, 1024, 3, seed=2) != trials[:3]


def test_learned_positions_are_not_exceeded():
    config, learned = small_config("softmax.py"), small_config("softmax.py --positions=learned")
    assert passkey.Passkeys().lengths_of(config) == (16, 24, 32, 64, 128)
    assert passkey.Passkeys().lengths_of(learned) == (16,)
    with pytest.raises(UserError, match="a length of 400 is beyond its learned positions"):
        passkey.Passkeys(lengths=(400,)).facts(learned)


def test_passkey_depths_are_counted_in_tenths():
    trials = [passkey.Trial([], 7, depth) for depth in (0.0, 0.05, 0.1, 0.95, 1.0)]
    part = passkey.judge(trials, [" 7.", "7", "is 7 or 8", " 77", "seven"])
    assert part["accuracy"] == 0.6
    assert part["accuracy_by_depth"] == [1.0, 1.0] + [None] * 7 + [0.0]
    assert [trial["correct"] for trial in part["trials"]] == [True] * 3 + [False] * 2


def test_passkey_of_a_trained_run(run, call, capsys, monkeypatch):
    arguments = (run, "--trials", 5, "--show", 1)
    call(passkey, *arguments, "--lengths", "320,300")
    printed = capsys.readouterr().out
    (result,) = json.loads((run / "passkey.json").read_text())
    assert result["variant"] == "lssar_p3" and result["trials"] == 5 and result["step"] == 6
    assert set(result["parts"]) == {"300", "320"} and "torch" in result["environment"]
    assert not_blank(run / "passkey.png")
    assert printed.count(": key ") == 2
    # an answer is what the model itself writes after that prompt
    model = GPT(checkpoint.read_config(run)).eval()
    checkpoint.load_weights(model, run)
    model.scale_rope("dynamic_ntk")
    trials = passkey.make_trials(get_tokenizer("bytes"), 320, 5, 1337)
    for trial, judged in zip(trials, result["parts"]["320"]["trials"], strict=True):
        out = generate(model, torch.tensor([trial.prompt]), 16, temperature=0)[0, -16:]
        assert trial.key == judged["key"]
        assert judged["answer"] == get_tokenizer("bytes").decode(out.tolist()).split("<|end")[0]
    # what is there is kept, what is new is added
    monkeypatch.setattr(passkey, "answer", None)
    call(passkey, *arguments, "--lengths", "300")
    with pytest.raises(TypeError):
        call(passkey, *arguments, "--lengths", "310")
    with pytest.raises(TypeError):
        call(passkey, *arguments, "--lengths", "300", "--seed", 5)
    with pytest.raises(TypeError):
        call(passkey, *arguments, "--lengths", "300", "--rope", "none")
    assert json.loads((run / "passkey.json").read_text()) == [result]
    monkeypatch.undo()
    # another question is another measurement beside the first
    arguments = (run, "--trials", 2, "--lengths", "300")
    call(passkey, *arguments, "--rope", "none")
    first, second = json.loads((run / "passkey.json").read_text())
    assert first == result and second["rope"] == "none" and set(second["parts"]) == {"300"}


def test_passkey_of_several_runs_draws_one_more_picture(run, call, tmp_path, monkeypatch):
    other = shutil.copytree(run, tmp_path / "other")
    call(passkey, run, other, "--lengths", "300", "--trials", 2)
    assert not_blank(tmp_path / "passkey_by_length_run_other.png") and not_blank(
        other / "passkey.png"
    )
    # or where --out says, also of one run
    drawn = []
    for module in (passkey, runner):
        monkeypatch.setattr(module, "save_picture", lambda figure, path: drawn.append(path))
    call(passkey, run, "--lengths", "300", "--trials", 2, f"--out={tmp_path}/new/mine.pdf")
    assert drawn == [tmp_path / "new/mine.pdf"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--lengths", "200"], "too short"),
        (["--lengths", "0"], "positive"),
        (["--lengths", "300,x"], "whole numbers"),
        (["--lengths", "300", "--trials", "0"], "--trials 0"),
        (["--lengths", "300", "--show", "-1"], "--show -1"),
    ],
)
def test_refusals(run, call, capsys, arguments, message):
    there = sorted(path.name for path in run.iterdir())
    with pytest.raises(SystemExit) as stop:
        call(passkey, run, *arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert sorted(path.name for path in run.iterdir()) == there
