"""Passkeys and needles in a haystack, and the attention that needles get."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from data.tokenizer import get_tokenizer
from generation import generate
from runtime import run_folder
from scripts import needle, passkey
from scripts.common import retrieval
from scripts.common.runs import load_run
from tests.helpers import Reader, saved_run, small_config, small_model, stub_run

SCORES = "scores of all heads, 2 needles in 240 tokens"


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Measure with a Reader as the model; returns it and the chunks."""

    def measure(evaluation, name, pattern, change):
        reader = Reader(get_tokenizer(name), pattern, change)
        monkeypatch.setattr(retrieval, "generate", reader)
        run = stub_run(tmp_path, name)
        run = replace(run, config=evaluation.apply_to(run.config))
        values = {}
        for key, chunk in evaluation.chunks(run.config).items():
            values[key] = evaluation.measure(run, chunk)
        return reader, values

    return measure


def test_an_answer_ends_at_its_end_of_text(tmp_path, monkeypatch):
    tokenizer = get_tokenizer("bytes")

    def generate(model, idx, new, **options):
        ids = [*tokenizer.encode(" no"), tokenizer.eot, *tokenizer.encode(" 12345")]
        return torch.cat((idx, torch.tensor([ids])), dim=1)

    monkeypatch.setattr(retrieval, "generate", generate)
    trial = retrieval.Trial([tokenizer.eot], 12345, 0.5)
    ((_, answer),) = retrieval.answered(stub_run(tmp_path, "bytes"), [trial], 100)
    assert answer == " no"


def haystack_of(text, name):
    config = small_config(f"softmax.py --tokenizer={name} --data_dir={text[name]}")
    return needle.haystack_of(config)


# ---- passkeys ----


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_passkey_tells_a_reader_from_one_that_is_wrong(answers, name):
    evaluation = passkey.PasskeyRetrieval(rope="none", lengths=(320, 400), trials=10, seed=1)
    pattern = r"The pass key is (\d+)\. Remember it\. \1 is the pass key\."
    for change, accuracy in (
        (str, 1),
        (lambda key: key + "0", 0),
        (lambda key: "no idea", 0),
    ):
        reader, chunks = answers(evaluation, name, pattern, change)
        # prompt and answer together have the length
        assert reader.lengths == {320 - 16, 400 - 16}
        assert reader.never == {None}
        for chunk in chunks.values():
            assert chunk["accuracy"] == accuracy
            assert len(chunk["trials"]) == 10


def test_passkey_prompts():
    tokenizer = get_tokenizer("gpt2")
    trials = passkey.make_trials(tokenizer, 1024, 60, seed=1)
    for trial in trials:
        assert len(trial.prompt) == 1024 - retrieval.ANSWER_TOKENS
        text = tokenizer.decode(trial.prompt)
        key = trial.number
        task, before, told, after, question = text.split("\n")
        assert task.startswith("<|endoftext|>There is an important info")
        assert told == f"The pass key is {key}. Remember it. {key} is the pass key."
        assert question == "What is the pass key? The pass key is"
        whole = " ".join([passkey.FILLER] * 100)
        assert whole.startswith(before)
        assert whole.startswith(after)
        depth = len(before) / len(before + after)
        assert depth == pytest.approx(trial.depth, abs=0.02)
        # the pieces are tokens of the text as a whole, too
        assert trial.prompt[1:] == tokenizer.encode(text.removeprefix("<|endoftext|>"))
    depths = [trial.depth for trial in trials]
    assert min(depths) < 0.05
    assert max(depths) > 0.95
    assert 0.4 < np.mean(depths) < 0.6
    keys = [trial.number for trial in trials]
    assert 1 <= min(keys) < 2500
    assert 47500 < max(keys) <= 50000
    assert passkey.make_trials(tokenizer, 1024, 3, seed=1) == trials[:3]


@pytest.mark.parametrize("command", [passkey, needle])
def test_learned_positions_are_too_few_for_a_prompt(call, tmp_path, command, refused):
    run = saved_run(tmp_path / "run", small_model("softmax.py", "--positions=learned"))
    refused(call, command, run, says=["learned positions end at 16", "take up to"])


def test_passkeys_of_a_trained_run(run, call, pictures, refused):
    too_short = ["length 128 is too short", "--lengths 264,528,1056"]
    refused(call, passkey, run, "--lengths=128", says=too_short)
    default = passkey.PasskeyRetrieval().lengths_of(run_folder.read_config(run))
    assert default == (384, 576, 768, 1536, 3072)  # multiples of 3 T, which fits a prompt
    call(passkey, run, "--trials=5", "--lengths=320,300")
    (result,) = json.loads((run / "passkey.json").read_text())
    assert result["variant"] == "lssar_p3"
    assert result["trials"] == 5
    assert result["step"] == 6
    assert set(result["parts"]) == {"300", "320"}
    assert "torch" in result["environment"]
    assert pictures == [run / "passkey.png"]
    # an answer is what the model itself writes after that prompt
    model = load_run(run).model
    tokenizer = get_tokenizer("bytes")
    trials = passkey.make_trials(tokenizer, 320, 5, 1337)
    judged_trials = result["parts"]["320"]["trials"]
    for trial, judged in zip(trials, judged_trials, strict=True):
        prompt = torch.tensor([trial.prompt])
        (text,) = generate(model, prompt, 16, temperature=0)
        written = tokenizer.decode(text[-16:].tolist())
        answer, *_ = written.split("<|end")
        assert judged["answer"] == answer


# ---- needles ----


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_needle_prompts(text, name):
    tokenizer = get_tokenizer(name)
    haystack = haystack_of(text, name)
    assert len(needle.CITIES) == 58
    assert len(set(needle.CITIES)) == 58
    for city in needle.CITIES:
        hidden = haystack.hide(city, 8106422, 0.3, 1000, 0.5)
        first_token, *prompt = hidden.prompt
        assert 1 + len(prompt) == 1000 - retrieval.ANSWER_TOKENS
        assert first_token == tokenizer.eot
        assert tokenizer.eot not in prompt
        assert tokenizer.decode(hidden.prompt[hidden.span]) == " 8106422."
        before = hidden.prompt[1 : hidden.span.start]
        after = hidden.prompt[hidden.span.stop :]
        told = f"\nThe special magic {city} number is:"
        asked = f"\nQuestion: What is the special magic {city} number?\nAnswer:"
        assert tokenizer.decode(before).endswith(told)
        assert tokenizer.decode(after).startswith("\n")
        assert tokenizer.decode(after).endswith(asked)
        hay_before = len(before) - len(tokenizer.encode(told))
        hay_after = len(after) - len(tokenizer.encode(asked)) - 1  # without the line break
        depth = hay_before / (hay_before + hay_after)
        assert depth == pytest.approx(0.3, abs=2e-3)
        shortest = haystack.hide(city, 8888888, 0.5, needle.SHORTEST, 0)
        assert len(shortest.prompt) == needle.SHORTEST - retrieval.ANSWER_TOKENS


def test_needle_tells_readers_apart(text, monkeypatch, answers):
    pattern = r"The special magic [A-Z][A-Za-z ]+ number is: (\d{7})\."
    evaluation = needle.NeedleRetrieval(
        rope="none",
        lengths=(200, 300),
        samples=6,
        score_length=250,
        score_trials=7,
        seed=1,
        data_dir=str(text["gpt2"]),
    )

    def without_an_end(number):
        return number + "3"

    def without_the_last_digit(number):
        return number[:6]

    def other_first_digit(number):
        first = "1" if number[0] == "5" else str(10 - int(number[0]))
        return first + number[1:]

    def no_scores(run, needle):
        return torch.zeros(1, 1)

    monkeypatch.setattr(needle, "needle_scores", no_scores)
    for change, grade in (
        (without_an_end, "correct"),
        (without_the_last_digit, "first digit"),
        (other_first_digit, "wrong"),
    ):
        reader, chunks = answers(evaluation, "gpt2", pattern, change)
        assert reader.never == {get_tokenizer("gpt2").eot}
        assert reader.lengths == {184, 284, 234}
        for length in ("200", "300"):
            chunk = chunks[length]
            assert len(chunk["grades_by_depth"]) == 5
            for shares in chunk["grades_by_depth"]:
                assert shares[grade] == 1
            assert chunk["accuracy"] == (grade == "correct")
        scores = chunks["scores of all heads, 7 needles in 250 tokens"]
        assert scores["one needle"]["grade"] == grade
        grades = {trial["grade"] for trial in scores["trials"]}
        numbers = {trial["number"] for trial in scores["trials"]}
        assert grades == {grade}
        assert len(numbers) == 7


@pytest.mark.parametrize("case", ["lssar_p15.py", "relu_wortsman.py", "ssmax_bias.py"])
def test_needle_scores_are_of_the_generation_itself(text, case):
    """Where RoPE depends on the current length, that is the length at the answer's end."""
    model = small_model(case)
    model.scale_rope("dynamic_ntk")
    haystack = haystack_of(text, "bytes")
    hidden = haystack.hide("Rome", 7654321, 0.5, 200, 0)
    run = stub_run(None, "bytes", model)
    scores = needle.needle_scores(run, hidden)
    scores_of_prompt = []

    def look(module, inputs, output):
        q, k, v, context = inputs
        if q.shape[2] > 1:  # the prompt, whose last output is the answer's first token
            A = module.weights(q, k, context)
            torch.testing.assert_close(A @ v, output, rtol=1e-9, atol=1e-12)
            last_row = A[0, :, -1]
            scores_of_prompt.append(last_row[:, hidden.span].sum(-1))

    for block in model.trunk.blocks:
        block.attn.attention.register_forward_hook(look)
    prompt = torch.tensor([hidden.prompt])
    generate(model, prompt, retrieval.ANSWER_TOKENS, temperature=0)
    expected = torch.stack(scores_of_prompt)
    torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-12)


def test_needles_are_scored_within_learned_positions(text, call, tmp_path, pictures):
    sizes = ("--block_size=200", "--total_batch_size=200")
    data = f"--data_dir={text['bytes']}"
    model = small_model("softmax.py", "--positions=learned", *sizes, data)
    run = saved_run(tmp_path / "run", model.float())
    call(needle, run, "--samples=1", "--score_trials=2")
    (result,) = json.loads((run / "needle.json").read_text())
    assert result["parts"].keys() == {"200", "scores of all heads, 2 needles in 200 tokens"}


def test_the_length_of_needle_scores():
    """SSMax's figures have 8,000 tokens; without an option no score is beyond the lengths."""
    evaluation = needle.NeedleRetrieval()
    assert evaluation.score_length_of((1024, 4096)) == 4096
    assert evaluation.score_length_of((1024, 16384)) == 8000
    assert replace(evaluation, score_length=9000).score_length_of((1024, 4096)) == 9000


def test_needles_of_several_runs(run, text, call, tmp_path, pictures):
    other = shutil.copytree(run, tmp_path / "other")
    options = ["--lengths=200", "--samples=2", "--score_length=240", "--score_trials=2"]
    call(needle, run, other, *options, f"--data_dir={text['bytes']}")
    measurements = json.loads((run / "needle.json").read_text())
    measurements_of_other = json.loads((other / "needle.json").read_text())
    assert measurements_of_other == measurements
    chunks = measurements[0]["parts"]
    assert chunks.keys() == {"200", SCORES}
    assert np.shape(chunks[SCORES]["one needle"]["scores"]) == (2, 2)
    assert len(chunks[SCORES]["trials"]) == 2
    assert pictures == [
        run / "needle.png",
        other / "needle.png",
        tmp_path / "needle_heads_run_other.png",
        tmp_path / "needle_scores_run_other.png",
    ]
