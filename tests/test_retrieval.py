"""Passkeys and needles in a haystack, and the attention that needles get."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from data.tokenizer import get_tokenizer
from generation import generate
from scripts import needle, passkey
from scripts.common import retrieval
from scripts.common.runner import load_run
from tests.helpers import Reader, small_config, small_model, stub_run

SCORES = "scores of 2 needles in 240 tokens"


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Measure with a Reader as the model; returns it and the chunks."""

    def measure(evaluation, options, name, pattern, change):
        reader = Reader(get_tokenizer(name), pattern, change)
        monkeypatch.setattr(retrieval, "generate", reader)
        run = stub_run(tmp_path, name)
        run = replace(run, config=options.applied(run.config))
        chunks = evaluation.chunks(options, run.config)
        return reader, {k: evaluation.measure(options, run, chunk) for k, chunk in chunks.items()}

    return measure


def haystack_of(text, name):
    config = small_config(f"softmax.py --tokenizer={name} --data_dir={text[name]}")
    return needle.haystack_of(config)


# ---- passkeys ----


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_passkey_tells_a_reader_from_one_that_is_wrong(answers, name):
    options = passkey.PasskeyOptions(rope="none", lengths=(320, 400), trials=10, seed=1)
    pattern = r"The pass key is (\d+)\. Remember it\. \1 is the pass key\."
    for change, accuracy in ((str, 1), (lambda key: key + "0", 0), (lambda key: "no idea", 0)):
        reader, parts = answers(passkey.PASSKEY, options, name, pattern, change)
        # prompt and answer together have the length
        assert reader.lengths == {320 - 16, 400 - 16} and reader.never == {None}
        for part in parts.values():
            assert part["accuracy"] == accuracy and len(part["trials"]) == 10


def test_passkey_prompts():
    tokenizer = get_tokenizer("gpt2")
    trials = passkey.make_trials(tokenizer, 1024, 60, seed=1)
    for trial in trials:
        assert len(trial.prompt) == 1024 - retrieval.ANSWER_TOKENS
        text, n = tokenizer.decode(trial.prompt), trial.number
        task, before, told, after, question = text.split("\n")
        assert task.startswith("<|endoftext|>There is an important info")
        assert told == f"The pass key is {n}. Remember it. {n} is the pass key."
        assert question == "What is the pass key? The pass key is"
        whole = " ".join([passkey.FILLER] * 100)
        assert whole.startswith(before) and whole.startswith(after)
        assert len(before) / len(before + after) == pytest.approx(trial.depth, abs=0.02)
        # the pieces are tokens of the text as a whole, too
        assert trial.prompt[1:] == tokenizer.encode(text.removeprefix("<|endoftext|>"))
    depths, keys = [t.depth for t in trials], [t.number for t in trials]
    assert min(depths) < 0.05 and max(depths) > 0.95 and 0.4 < np.mean(depths) < 0.6
    assert 1 <= min(keys) < 2500 and 47500 < max(keys) <= 50000
    assert passkey.make_trials(tokenizer, 1024, 3, seed=1) == trials[:3]


def test_passkeys_of_a_trained_run(run, call, pictures, refused):
    refused(call, passkey, run, says=["length 128 is too short", "--lengths 264,528,1056"])
    call(passkey, run, "--trials=5", "--lengths=320,300")
    (result,) = json.loads((run / "passkey.json").read_text())
    assert result["variant"] == "lssar_p3" and result["trials"] == 5 and result["step"] == 6
    assert set(result["parts"]) == {"300", "320"} and "torch" in result["environment"]
    assert pictures == [run / "passkey.png"]
    # an answer is what the model itself writes after that prompt
    model, tokenizer = load_run(run).model, get_tokenizer("bytes")
    trials = passkey.make_trials(tokenizer, 320, 5, 1337)
    for trial, judged in zip(trials, result["parts"]["320"]["trials"], strict=True):
        out = generate(model, torch.tensor([trial.prompt]), 16, temperature=0)[0, -16:]
        assert judged["answer"] == tokenizer.decode(out.tolist()).split("<|end")[0]


# ---- needles ----


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_needle_prompts(text, name):
    tokenizer, haystack = get_tokenizer(name), haystack_of(text, name)
    for city in needle.CITIES:
        hidden = haystack.hide(city, 8106422, 0.3, 1000, 0.5)
        assert len(hidden.prompt) == 1000 - retrieval.ANSWER_TOKENS
        # only the first token is end-of-text
        assert hidden.prompt.index(tokenizer.eot) == 0 and tokenizer.eot not in hidden.prompt[1:]
        assert tokenizer.decode(hidden.prompt[hidden.span]) == " 8106422."
        before, after = hidden.prompt[1 : hidden.span.start], hidden.prompt[hidden.span.stop :]
        told = f"\nThe special magic {city} number is:"
        asked = f"\nQuestion: What is the special magic {city} number?\nAnswer:"
        assert tokenizer.decode(before).endswith(told)
        assert tokenizer.decode(after).startswith("\n") and tokenizer.decode(after).endswith(asked)
        hay = [len(before) - len(tokenizer.encode(told)), len(after) - len(tokenizer.encode(asked))]
        assert hay[0] / (sum(hay) - 1) == pytest.approx(0.3, abs=2e-3)
        shortest = haystack.hide(city, 8888888, 0.5, needle.SHORTEST, 0).prompt
        assert len(shortest) == needle.SHORTEST - retrieval.ANSWER_TOKENS


def test_needle_tells_readers_apart(text, monkeypatch, answers):
    pattern = r"The special magic [A-Z][A-Za-z ]+ number is: (\d{7})\."
    options = needle.NeedleOptions(
        rope="none", lengths=(200, 300), samples=6, score_length=250, score_trials=7, seed=1,
        data_dir=str(text["gpt2"]),
    )  # fmt: skip
    monkeypatch.setattr(needle, "needle_scores", lambda run, needle: torch.zeros(1, 1))
    for change, grade in (
        (lambda number: number + "3", "correct"),  # it cannot end its answer
        (lambda number: number[:6], "first digit"),
        (lambda number: f"{10 - int(number[0]) if number[0] != '5' else 1}{number[1:]}", "wrong"),
    ):
        reader, parts = answers(needle.NEEDLE, options, "gpt2", pattern, change)
        assert reader.never == {get_tokenizer("gpt2").eot} and reader.lengths == {184, 284, 234}
        for length in ("200", "300"):
            assert [grades[grade] for grades in parts[length]["grades_by_depth"]] == [1] * 5
            assert parts[length]["accuracy"] == (grade == "correct")
        scores = parts["scores of 7 needles in 250 tokens"]
        assert scores["one needle"]["grade"] == grade
        assert {trial["grade"] for trial in scores["trials"]} == {grade}
        assert len({trial["number"] for trial in scores["trials"]}) == 7


@pytest.mark.parametrize("case", ["lssar_p15.py", "relu_wortsman.py", "ssmax_bias.py"])
def test_needle_scores_are_of_the_generation_itself(text, case):
    """Where RoPE depends on the current length, that is the length at the answer's end."""
    model = small_model(case)
    model.scale_rope("dynamic_ntk")
    hidden = haystack_of(text, "bytes").hide("Rome", 7654321, 0.5, 200, 0)
    scores = needle.needle_scores(stub_run(None, "bytes", model), hidden)
    seen = []

    def look(module, inputs, output):
        q, k, v, context = inputs
        if q.shape[2] > 1:  # the prompt, whose last output is the answer's first token
            A = module.weights(q, k, context)
            torch.testing.assert_close(A @ v, output, rtol=1e-9, atol=1e-12)
            seen.append(A[0, :, -1, hidden.span].sum(-1))

    for block in model.trunk.blocks:
        block.attn.attention.register_forward_hook(look)
    generate(model, torch.tensor([hidden.prompt]), retrieval.ANSWER_TOKENS, temperature=0)
    torch.testing.assert_close(scores, torch.stack(seen), rtol=1e-9, atol=1e-12)


def test_needles_of_several_runs(run, text, call, tmp_path, monkeypatch, pictures):
    other = shutil.copytree(run, tmp_path / "other")
    few = ("--samples=2", "--score_length=240", "--score_trials=2", f"--data_dir={text['bytes']}")
    call(needle, run, other, "--lengths=200", *few)
    measured, again = (json.loads((one / "needle.json").read_text()) for one in (run, other))
    assert measured == again and measured[0]["parts"].keys() == {"200", SCORES}
    assert len(measured[0]["parts"][SCORES]["one needle"]["heads"]) == 4
    names = [f"needle_{name}_run_other.png" for name in ("heads", "scores")]
    assert pictures[:2] == [run / "needle.png", other / "needle.png"]
    assert pictures[2:] == [tmp_path / name for name in names]
