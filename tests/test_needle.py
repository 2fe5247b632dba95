"""Needles in a haystack, and the attention that they get."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

from data.tokenizer import get_tokenizer
from errors import UserError
from generation import generate
from scripts import needle
from scripts.common import retrieval, runner
from scripts.common.runner import Store
from tests.helpers import Reader, first_layer, not_blank, small_config, small_model, stub_run


def test_generation_never_takes_a_token():
    model, prompt = small_model("softmax.py"), torch.randint(257, (3, 8))
    first, second = model(prompt)[:, -1].topk(2).indices[0].tolist()
    assert generate(model, prompt[:1], 1, temperature=0)[0, -1] == first
    assert generate(model, prompt[:1], 1, temperature=0, never=first)[0, -1] == second


def haystack_of(text, name):
    return needle.Haystack(
        str(text[name]), name, small_config(f"softmax.py --tokenizer={name}").n_vocab
    )


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_needle_prompts(text, name):
    tokenizer = get_tokenizer(name)
    haystack = haystack_of(text, name)
    for city in needle.CITIES:
        hidden = haystack.hide(city, 8106422, 0.3, 1000, 0.5)
        assert len(hidden.prompt) == 1000 - retrieval.ANSWER_TOKENS
        assert tokenizer.decode(hidden.prompt[hidden.span]) == " 8106422."
        before = tokenizer.decode(hidden.prompt[: hidden.span.start])
        after = tokenizer.decode(hidden.prompt[hidden.span.stop :])
        assert before.endswith(f"\nThe special magic {city} number is:")
        asked = f"\nQuestion: What is the special magic {city} number?\nAnswer:"
        assert after.startswith("\n") and after.endswith(asked)
        # only the first token is end-of-text
        assert hidden.prompt.index(tokenizer.eot) == 0 and tokenizer.eot not in hidden.prompt[1:]
        hay = len(hidden.prompt) - 1 - len(tokenizer.encode(asked))
        told = len(tokenizer.encode(f"\nThe special magic {city} number is: 8106422.\n"))
        start = hidden.span.start - len(tokenizer.encode(f"\nThe special magic {city} number is:"))
        assert (start - 1) / (hay - told) == pytest.approx(0.3, abs=1e-2)


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_the_shortest_length_fits_every_needle(text, name):
    """For GPT-2 Nairobi takes more tokens than San Francisco, and 9069069 more than 8888888."""
    haystack = haystack_of(text, name)
    length = needle.shortest(haystack.tokenizer)
    assert 0 <= length - max(needle.bare_length(haystack.tokenizer, city, 8888888)
                             for city in needle.CITIES) < len(" 8888888.")  # fmt: skip
    for city in needle.CITIES:
        for number in (8888888, 9069069):
            hidden = haystack.hide(city, number, 0.5, length, 0.5)
            assert len(hidden.prompt) == length - retrieval.ANSWER_TOKENS
    config = small_config(f"softmax.py --tokenizer={name}")
    evaluation = needle.Needles(lengths=(length,), score_length=99, data_dir=str(text[name]))
    replace(evaluation, score_length=length).facts(config)
    for short in (replace(evaluation, lengths=(length - 1,)), replace(evaluation, score_length=47)):
        with pytest.raises(UserError, match=f"too short.* take up to {length} tokens"):
            short.facts(config)


def test_learned_positions_are_not_exceeded():
    config = small_config("softmax.py --positions=learned")
    assert needle.Needles().lengths_of(config) == (16,)
    with pytest.raises(UserError, match="a length of 8000 is beyond its learned positions"):
        needle.Needles(data_dir="nowhere").facts(config)


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_needle_tells_readers_apart(text, tmp_path, monkeypatch, name):
    tokenizer = get_tokenizer(name)
    pattern = r"The special magic [A-Z][A-Za-z ]+ number is: (\d{7})\."
    evaluation = needle.Needles(
        rope="none", lengths=(200, 300), samples=6, score_length=250, score_trials=7, seed=1,
        data_dir=str(text[name]),
    )  # fmt: skip
    zeros = torch.zeros(1, 1, 1)
    monkeypatch.setattr(needle, "needle_scores", lambda run, batch: zeros.expand(len(batch), 1, 1))
    for change, grade in (
        (str, "correct"),
        (lambda number: number + "3", "correct"),  # it cannot end its answer
        (lambda number: f"{number[0]}{(int(number[1]) + 1) % 10}{number[2:]}", "first digit"),
        (lambda number: number[:6], "first digit"),
        (lambda number: f"{10 - int(number[0]) if number[0] != '5' else 1}{number[1:]}", "wrong"),
        (lambda number: "none", "wrong"),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        model = Reader(tokenizer, pattern, change)
        monkeypatch.setattr(retrieval, "generate", model)
        results = Store(folder / "needle.json", {})
        evaluation.measure(stub_run(folder, name), results)
        assert model.never == {tokenizer.eot} and model.lengths == {184, 284, 234}
        for length in (200, 300):
            for depth in ("10%", "30%", "50%", "70%", "90%"):
                assert results.parts[f"{length} tokens, depth {depth}"][grade] == 1
        scores = results.parts["scores of 7 needles in 250 tokens"]
        assert scores["one needle"]["grade"] == grade
        assert {trial["grade"] for trial in scores["trials"]} == {grade}
        assert len({trial["number"] for trial in scores["trials"]}) == 7


def test_needle_scores_against_the_softmax_formula(text):
    model = small_model("softmax.py")
    tokenizer = get_tokenizer("bytes")
    haystack = haystack_of(text, "bytes")
    hidden = [haystack.hide("Oslo", 1234567, d, 220, 0.2) for d in (0.1, 0.8)]
    scores = needle.needle_scores(stub_run(None, "bytes", model), hidden)
    assert scores.shape == (2, 2, 2)
    for one, found in zip(hidden, scores, strict=True):
        # bytes: a character is a token, save end-of-text, which decodes to 13 characters
        decoded = tokenizer.decode(one.prompt)
        start = decoded.index("number is: 1234567.") + len("number is:") - 12
        model.trunk.rope(0, 1, len(one.prompt))
        q, k, _ = first_layer(model, torch.tensor([one.prompt]))
        weights = (q[:, :, -1:] @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        expected = weights[0, :, 0, start : start + len(" 1234567.")].sum(-1)
        torch.testing.assert_close(found[0], expected, rtol=1e-9, atol=1e-12, check_dtype=False)


@pytest.mark.parametrize(
    "case", ["lssar_p15.py", "relu_wortsman.py", "ssmax_bias.py", "sigmoid.py", "softmax.py"]
)
def test_needle_scores_are_of_the_generation_itself(text, case):
    """Where RoPE depends on the current length, that is the length at the answer's end."""
    model = small_model(case)
    model.scale_rope("dynamic_ntk")
    hidden = haystack_of(text, "bytes").hide("Rome", 7654321, 0.5, 200, 0)
    scores = needle.needle_scores(stub_run(None, "bytes", model), [hidden])[0]
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


def test_needle_goes_on_where_it_was_stopped(run, text, call, tmp_path, monkeypatch):
    other = shutil.copytree(run, tmp_path / "other")
    few = ("--samples", 2, "--score_length", 240, "--score_trials", 2, "--data_dir", text["bytes"])
    few = ("--lengths", 200, *few)
    call(needle, run, *few)
    whole = json.loads((run / "needle.json").read_text())
    asked = []

    def stops(*arguments, ask=needle.ask):
        asked.append(arguments)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return ask(*arguments)

    monkeypatch.setattr(needle, "ask", stops)
    with pytest.raises(SystemExit):
        call(needle, other, *few)
    assert len(json.loads((other / "needle.json").read_text())[0]["parts"]) == 3
    call(needle, other, *few)
    assert len(asked) == 4 + 2 + 2  # two depths, one needle, two needles in one batch
    assert json.loads((other / "needle.json").read_text()) == whole
    call(needle, run, other, *few)
    assert len(asked) == 8
    for name in ("heads", "scores"):
        assert not_blank(tmp_path / f"needle_{name}_run_other.png")
    drawn = []
    for module in (needle, runner):
        monkeypatch.setattr(module, "save_picture", lambda figure, path: drawn.append(path.name))
    call(needle, run, *few, f"--out={tmp_path / 'mine.svg'}")
    assert drawn == ["mine.svg", "mine_needle_scores.svg"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--lengths", "100"], "too short"),
        (["--lengths", "-5"], "positive"),
        (["--lengths", "200,4096", "--score_length", "200"], "600 validation tokens"),
        (["--lengths", "200"], "8000"),
        (["--lengths", "200", "--score_length", "-1"], "--score_length -1"),
        (["--lengths", "200", "--samples", "0"], "--samples 0"),
        (["--lengths", "200", "--score_trials", "0"], "--score_trials 0"),
        (["--lengths", "200", "--data_dir", "nowhere"], "nowhere"),
        (["--lengths", "200", "--data_dir", "GPT2"], "made with another tokenizer"),
    ],
)
def test_refusals(run, call, text, capsys, arguments, message):
    arguments = [text["gpt2"] if argument == "GPT2" else argument for argument in arguments]
    there = sorted(path.name for path in run.iterdir())
    with pytest.raises(SystemExit) as stop:
        call(needle, run, *arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert sorted(path.name for path in run.iterdir()) == there
