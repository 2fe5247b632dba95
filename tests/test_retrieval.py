"""Attention weights of a model, passkeys, needles, and fine-tuning on SQuAD."""

import argparse
import json
import math
import os
import re
import shutil
import signal
import sys
import time

import matplotlib.image
import numpy as np
import pytest
import torch

import train as training
from data.shards import write_shard
from data.tokenizer import get_tokenizer
from evaluation import attention_weights
from model import GPT, rotate
from runtime import checkpoint
from runtime.distributed import EXIT_STOPPED
from runtime.log import Log
from scripts import finetune_squad, needle, passkey
from scripts.common import retrieval
from scripts.common.runs import Run
from tests.conftest import SMALL
from tests.helpers import ROWS, small_config, small_model

# A model long enough for a short question.
BYTES = ("--block_size=128", "--total_batch_size=1024", "--attention=lssar", "--p=3")


def first_layer(model, idx):
    """q, k and v [B, H, L, d] of the first layer, from its weights."""
    block, trunk = model.trunk.blocks[0], model.trunk
    x = block.attn.c_attn(block.ln_1(model.wte(idx)))
    q, k, v = (
        part.unflatten(-1, (block.attn.n_head, -1)).transpose(1, 2)
        for part in x.split(model.config.n_embd, dim=-1)
    )
    return rotate(q, trunk.cos, trunk.sin), rotate(k, trunk.cos, trunk.sin), v


def test_attention_weights_of_softmax_against_the_formula():
    model = small_model("softmax.py")
    idx = torch.randint(257, (2, 16))
    layers = attention_weights(model, idx, slice(None))
    q, k, _ = first_layer(model, idx)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    hidden = torch.ones(16, 16, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(hidden, -math.inf).softmax(-1)
    assert len(layers) == 2 and layers[0].shape == (2, 2, 16, 16)
    torch.testing.assert_close(layers[0], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", [*ROWS, "sigmoid.py --attention_length=current"])
def test_attention_weights_are_what_the_layer_multiplies_v_by(case):
    model, length = small_model(case), 24  # beyond the training length
    model.scale_rope("yarn")
    idx = torch.randint(257, (2, length))
    outputs = []
    attention = model.trunk.blocks[0].attn.attention
    hook = attention.register_forward_hook(lambda module, inputs, out: outputs.append(out))
    whole = attention_weights(model, idx, slice(None))
    hook.remove()
    v = first_layer(model, idx)[2]
    torch.testing.assert_close(whole[0] @ v, outputs[0], rtol=1e-9, atol=1e-12)
    for rows in (slice(-1, None), slice(5, 9), slice(0, 1)):
        for some, all_rows in zip(attention_weights(model, idx, rows), whole, strict=True):
            torch.testing.assert_close(some, all_rows[:, :, rows], rtol=1e-9, atol=1e-12)
    sums = attention_weights(model, idx, slice(-1, None), lambda A: A[..., 3:7].sum(-1))
    torch.testing.assert_close(sums[1], whole[1][:, :, -1:, 3:7].sum(-1), rtol=1e-9, atol=1e-12)
    assert not attention._forward_hooks  # nothing stays behind


def test_generation_never_takes_a_token():
    model, prompt = small_model("softmax.py"), torch.randint(257, (3, 8))
    first, second = model(prompt)[:, -1].topk(2).indices[0].tolist()
    assert model.generate(prompt[:1], 1, temperature=0)[0, -1] == first
    assert model.generate(prompt[:1], 1, temperature=0, never=first)[0, -1] == second


class Reader:
    """A model that reads a pattern in its prompt and answers with it; it may change it first."""

    def __init__(self, tokenizer, pattern, change=str):
        self.tokenizer, self.pattern, self.change = tokenizer, pattern, change
        self.lengths, self.never = set(), set()

    def generate(self, idx, max_new_tokens, temperature, never):
        assert temperature == 0
        self.lengths.add(idx.shape[1])
        self.never.add(never)
        answers = []
        for row in idx.tolist():
            found = re.findall(self.pattern, self.tokenizer.decode(row))
            assert len(found) == 1
            answer = self.tokenizer.encode(f" {self.change(found[0])}. And the")
            answers.append((answer + [self.tokenizer.eot] * 20)[:max_new_tokens])
        return torch.cat((idx, torch.tensor(answers)), dim=1)


def stub_run(path, tokenizer: str, model) -> Run:
    config = small_config("softmax.py", f"--tokenizer={tokenizer}")
    facts = {"variant": "softmax", "trained_length": 16, "rope": "none"}
    return Run(path, config, model, torch.device("cpu"), torch.float32, facts)


def passkeys(**changes):
    return argparse.Namespace(
        **{"trials": 40, "lengths": "320,400", "seed": 1, "show": 0} | changes
    )


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_passkey_tells_a_reader_from_one_that_is_wrong(tmp_path, name):
    tokenizer = get_tokenizer(name)
    pattern = r"The pass key is (\d+)\. Remember it\. \1 is the pass key\."
    for folder, change, accuracy in (
        ("right", str, 1),
        ("one_more", lambda key: int(key) + 1, 0),
        ("longer", lambda key: key + "0", 0),
        ("silent", lambda key: "no idea", 0),
    ):
        (tmp_path / folder).mkdir()
        model = Reader(tokenizer, pattern, change)
        run = stub_run(tmp_path / folder, name, model)
        trials, results = passkey.prepare(run, passkeys())
        passkey.measure(run, trials, results)
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


def test_passkey_depths_are_counted_in_tenths():
    trials = [passkey.Trial([], 7, depth) for depth in (0.0, 0.05, 0.1, 0.95, 1.0)]
    part = passkey.judge(trials, [" 7.", "7", "is 7 or 8", " 77", "seven"])
    assert part["accuracy"] == 0.6
    assert part["accuracy_by_depth"] == [1.0, 1.0] + [None] * 7 + [0.0]
    assert [trial["correct"] for trial in part["trials"]] == [True] * 3 + [False] * 2


@pytest.fixture(scope="module")
def trained(shards, tmp_path_factory):
    """A run of a second; tests that write into it take a copy."""
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        argv = ["train.py", *SMALL, *BYTES, f"--data_dir={shards}", f"--out_dir={out}"]
        patch.setattr(sys, "argv", argv)
        training.main()
    return out


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def not_blank(path):
    return matplotlib.image.imread(path).std() > 0


def test_passkey_of_a_trained_run(run, call, capsys, monkeypatch):
    arguments = (run, "--trials", 5, "--show", 1)
    call(passkey, *arguments, "--lengths", "320,300")
    printed = capsys.readouterr().out
    (result,) = json.loads((run / "passkey.json").read_text())
    assert result["variant"] == "lssar_p3" and result["trials"] == 5 and result["step"] == 6
    assert set(result["parts"]) == {"300", "320"} and "torch" in result["environment"]
    assert not_blank(run / "passkey.png")
    assert printed.count("What is the pass key? The pass key is") == 2
    # an answer is what the model itself writes after that prompt
    model = GPT(checkpoint.read_config(run)).eval()
    checkpoint.load_weights(model, run)
    model.scale_rope("dynamic_ntk")
    trials = passkey.make_trials(get_tokenizer("bytes"), 320, 5, 1337)
    for trial, judged in zip(trials, result["parts"]["320"]["trials"], strict=True):
        out = model.generate(torch.tensor([trial.prompt]), 16, temperature=0)[0, -16:]
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


def test_passkey_of_several_runs_draws_one_more_picture(run, call, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    call(passkey, run, other, "--lengths", "300", "--trials", 2)
    assert not_blank(tmp_path / "passkey_by_length.png") and not_blank(other / "passkey.png")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Shards of 20,000 validation tokens of each tokenizer, with ends of text between."""
    folders = {}
    for name in ("bytes", "gpt2"):
        tokenizer = get_tokenizer(name)
        tokens = np.tile(np.array([tokenizer.eot, *tokenizer.encode("Such is life. ")]), 9000)
        folders[name] = tmp_path_factory.mktemp(name)
        write_shard(folders[name] / "text_val_000000.bin", tokens[:20000].astype(np.uint16))
    return folders


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_needle_prompts(text, name):
    tokenizer = get_tokenizer(name)
    haystack = needle.Haystack(text[name], tokenizer)
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


def needles(data_dir, **changes):
    usual = {"samples": 6, "lengths": "200,300", "seed": 1, "score_length": 250, "score_trials": 7}
    return argparse.Namespace(**usual | {"data_dir": str(data_dir)} | changes)


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_needle_tells_readers_apart(text, tmp_path, monkeypatch, name):
    tokenizer = get_tokenizer(name)
    pattern = r"The special magic [A-Z][A-Za-z ]+ number is: (\d{7})\."
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
        run, arguments = stub_run(folder, name, model), needles(text[name])
        lengths, haystack, results = needle.prepare(run, arguments)
        needle.measure(run, lengths, haystack, results, arguments)
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
    haystack = needle.Haystack(text["bytes"], tokenizer)
    hidden = [haystack.hide("Oslo", 1234567, d, 220, 0.2) for d in (0.1, 0.8)]
    scores = needle.needle_scores(stub_run(None, "bytes", model), hidden)
    assert scores.shape == (2, 2, 2)
    for one, found in zip(hidden, scores, strict=True):
        # bytes: a character is a token, save end-of-text, which decodes to 13 characters
        decoded = tokenizer.decode(one.prompt)
        start = decoded.index("number is: 1234567.") + len("number is:") - 12
        model.trunk.set_rope(model.trunk.rope, len(one.prompt))
        q, k, _ = first_layer(model, torch.tensor([one.prompt]))
        weights = (q[:, :, -1:] @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        expected = weights[0, :, 0, start : start + len(" 1234567.")].sum(-1)
        torch.testing.assert_close(found[0], expected, rtol=1e-9, atol=1e-12, check_dtype=False)


@pytest.mark.parametrize(
    "case", ["lssar_p15.py", "relu_wortsman.py", "ssmax_bias.py", "sigmoid.py", "softmax.py"]
)
def test_needle_scores_are_of_the_generation_itself(text, case):
    """Where L and RoPE depend on the current length, that is the one of the answer's end."""
    model = small_model(case, "--attention_length=current")
    model.scale_rope("dynamic_ntk")
    hidden = needle.Haystack(text["bytes"], get_tokenizer("bytes")).hide(
        "Rome", 7654321, 0.5, 200, 0
    )
    scores = needle.needle_scores(stub_run(None, "bytes", model), [hidden])[0]
    seen = []

    def look(module, inputs, output):
        q, k, v, score_scale, length = inputs
        if q.shape[2] > 1:  # the prompt, whose last output is the answer's first token
            A = module.weights(q, k, score_scale, length)
            torch.testing.assert_close(A @ v, output, rtol=1e-9, atol=1e-12)
            seen.append(A[0, :, -1, hidden.span].sum(-1))

    for block in model.trunk.blocks:
        block.attn.attention.register_forward_hook(look)
    model.generate(torch.tensor([hidden.prompt]), retrieval.ANSWER_TOKENS, temperature=0)
    torch.testing.assert_close(scores, torch.stack(seen), rtol=1e-9, atol=1e-12)


SQUAD_WORDS = ["river", "stone", "winter", "copper", "garden", "violin", "harbour", "marble"]


@pytest.fixture(scope="module")
def squad(tmp_path_factory):
    """SQuAD's format: 40 answerable questions, and some that are left out."""
    rng = np.random.default_rng(0)
    paragraphs = []
    for i in range(40):
        words = list(rng.permutation(SQUAD_WORDS)[: rng.integers(3, 7)])
        context = f"The {' '.join(words)} is {i}."
        answers = [{"text": words[1], "answer_start": context.index(words[1])}]
        answers.append({"text": words[0], "answer_start": 4})  # only the first one is trained
        qas = [{"id": str(i), "question": f"What is {i}? ", "answers": answers}]
        paragraphs.append({"context": context, "qas": qas})
    paragraphs[0]["qas"].append({"question": "Why?", "answers": [], "is_impossible": True})
    paragraphs[1]["qas"].append({"question": "  ", "answers": answers})
    path = tmp_path_factory.mktemp("squad") / "train-v2.0.json"
    path.write_text(json.dumps({"version": "v2.0", "data": [{"paragraphs": paragraphs}]}))
    return path


def test_squad_is_read(squad):
    questions = finetune_squad.read_squad(squad)
    assert len(questions) == 40
    for q in questions:
        assert q.context[q.start :].startswith(q.answer) and q.question.endswith("?")


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_squad_examples_hold_context_question_and_answer(name):
    tokenizer = get_tokenizer(name)
    words = "  ".join(SQUAD_WORDS) + ". "
    context = words * 20 + "It is the Elbe, they say. " + words * 20
    start = context.index("the Elbe")
    question = finetune_squad.Question(context, "Which river?", "the Elbe", start)
    example, cut = finetune_squad.encode(tokenizer, question, 10000)
    end = "\nQuestion: Which river?\nAnswer: the Elbe"
    assert not cut and tokenizer.decode(example.tokens) == f"<|endoftext|>{context}{end}"
    assert tokenizer.decode(example.tokens[-example.answer :]) == " the Elbe"
    for place in (start, 0, len(context) - 8):
        moved = context[:start] + "it" + context[start + 8 :]
        moved = moved[:place] + "the Elbe" + moved[place:]
        question = finetune_squad.Question(moved, "Which river?", "the Elbe", place)
        for size in (70, 100, 101):
            example, cut = finetune_squad.encode(tokenizer, question, size)
            assert cut and len(example.tokens) == size + 1
            text = tokenizer.decode(example.tokens)
            kept = text.removeprefix("<|endoftext|>").removesuffix(end)
            assert len(kept) < len(text) and kept in moved and "the Elbe" in kept
    assert finetune_squad.encode(tokenizer, question, 16) == (None, True)


@pytest.mark.parametrize("case", [*ROWS, "sigmoid.py --attention_length=current"])
def test_answer_loss_is_that_of_the_answer_alone_whatever_the_padding(case):
    model = small_model(case)
    rng = np.random.default_rng(0)
    make = finetune_squad.Example
    examples = [make(rng.integers(0, 257, n).astype(np.uint16), a) for n, a in ((9, 2), (17, 5))]
    length = 16 if "current" in case else None
    both = finetune_squad.answer_loss(model, *finetune_squad.tensors(examples, length, "cpu"))
    expected = 0
    for example in examples:
        tokens = torch.from_numpy(example.tokens.astype(np.int64))
        inputs = torch.nn.functional.pad(tokens[:-1], (0, (length or 0) and 17 - len(tokens)))
        logs = model(inputs[None])[0].log_softmax(-1)
        for place in range(len(tokens) - example.answer, len(tokens)):
            expected = expected - logs[place - 1, tokens[place]]
    # the loss is in float32
    torch.testing.assert_close(both.double(), expected, rtol=1e-5, atol=1e-6)


def test_squad_epochs_take_every_example_once():
    make = finetune_squad.Example
    examples = [make(np.full(3, i, np.uint16), 1) for i in range(10)]
    for epoch in (0, 1):
        steps = [finetune_squad.batch_of(3 * epoch + i, examples, 4, seed=7) for i in range(3)]
        assert [len(batch) for batch in steps] == [4, 4, 2]
        assert sorted(int(e.tokens[0]) for batch in steps for e in batch) == list(range(10))
    again = finetune_squad.batch_of(3, examples, 4, seed=7)
    first = finetune_squad.batch_of(0, examples, 4, seed=7)
    assert [e.tokens[0] for e in again] != [e.tokens[0] for e in first]


def checkpoints(run):
    return {path.name: path.read_bytes() for path in run.glob("*.pt")}


def weights(run):
    """A run's step and weights."""
    model = GPT(checkpoint.read_config(run))
    return checkpoint.load_weights(model, run), model.state_dict()


def metrics(run, *keys):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[line.get(key) for key in keys] for line in lines]  # JSON has no infinite gradient


def test_finetuned_run_goes_through_all_scripts(run, squad, call, text, tmp_path, capsys):
    out = tmp_path / "tuned"
    arguments = ("--squad", squad, "--out_dir", out, "--learning_rate", "3e-3", "--epochs", 6)
    before = checkpoints(run)
    call(finetune_squad, run, *arguments, "--sequences", 16, "--batch_size", 4)
    assert checkpoints(run) == before
    facts = json.loads((out / "squad.json").read_text())
    assert facts["examples"] == 40 and facts["contexts_cut"] == facts["left_out"] == 0
    # three steps an epoch: linear warm-up in the first, then a cosine to 0
    steps, rates, losses = zip(*metrics(out, "step", "lr", "loss"), strict=True)
    assert steps == tuple(range(1, 19))
    assert rates[:3] == pytest.approx([1e-3, 2e-3, 3e-3])
    cosine = [3e-3 * (1 + math.cos(math.pi * i / 15)) / 2 for i in range(15)]
    assert rates[3:] == pytest.approx(cosine) and sum(losses[-3:]) < 0.9 * sum(losses[:3])
    config = checkpoint.read_config(out)
    assert (config.beta1, config.beta2, config.weight_decay) == (0.9, 0.999, 0)
    assert config.init_from == str(run) and config.attention == "lssar" and config.p == 3
    # the first loss is that of the base, summed over an answer and averaged over examples
    model = GPT(config).eval()
    checkpoint.load_weights(model, run)
    examples, _ = finetune_squad.encode_all(finetune_squad.read_squad(squad), config, "")
    expected = []
    for example in finetune_squad.batch_of(0, examples, 16, config.seed):
        tokens = torch.from_numpy(example.tokens.astype(np.int64))
        losses_here = model.token_losses(tokens[None, :-1], tokens[None, 1:])[0]
        expected.append(losses_here[-example.answer :].sum().item())
    assert losses[0] == pytest.approx(sum(expected) / 16, rel=1e-5)

    call(passkey, out, "--lengths", 300, "--trials", 2)
    few = ("--samples", 3, "--score_length", 240, "--score_trials", 4, "--data_dir", text["bytes"])
    call(needle, out, "--lengths", "200,260", *few, "--rope", "none", "--rope_theta", 500000)
    (result,) = json.loads((out / "needle.json").read_text())
    assert result["rope_theta"] == 500000 and result["step"] == 18
    cells = [part for part in result["parts"].values() if "depth" in part]
    assert [(c["length"], c["depth"]) for c in cells] == [
        (n, d) for n in (200, 260) for d in (0.1, 0.3, 0.5, 0.7, 0.9)
    ]
    for part in cells:
        assert part["correct"] + part["first digit"] + part["wrong"] == pytest.approx(1)
    scores = result["parts"]["scores of 4 needles in 240 tokens"]
    heads = [(head["layer"], head["head"]) for head in scores["one needle"]["heads"]]
    values = [head["score"] for head in scores["one needle"]["heads"]]
    assert sorted(heads) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert values == sorted(values, reverse=True) and 0 <= values[-1] <= values[0] <= 1
    assert len(scores["trials"]) == 4
    for name in ("passkey", "needle", "needle_heads", "needle_scores"):
        assert not_blank(out / f"{name}.png")
    printed = capsys.readouterr().out
    assert "needles found" in printed and "passkeys found" in printed


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
    assert not_blank(tmp_path / "needle_heads.png") and not_blank(tmp_path / "needle_scores.png")


@pytest.mark.parametrize("dtype", ["float32", "float16"])  # the latter has a scaler to resume
def test_finetuning_is_resumed_and_never_overwritten(
    run, squad, call, tmp_path, monkeypatch, capsys, dtype
):
    monkeypatch.setattr(finetune_squad, "CHECKPOINT_INTERVAL", 2)
    arguments = (run, "--squad", squad, "--epochs", 2, "--sequences", 16, "--dtype", dtype)
    call(finetune_squad, *arguments, "--out_dir", tmp_path / "whole")

    def stops(log, logged=Log.step, **values):
        logged(log, **values)
        if values["step"] == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Log, "step", stops)
        with pytest.raises(SystemExit):
            call(finetune_squad, *arguments, "--out_dir", tmp_path / "parts")
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    stopped = checkpoints(parts)
    assert weights(parts)[0] == 2
    for out, more, message in (
        ("parts", (), "holds a run"),
        ("run", (), "holds a run"),
        ("parts", ("--resume", "--learning_rate", "1e-3"), "learning_rate"),
        ("nothing", ("--resume",), "checkpoint"),
    ):
        with pytest.raises(SystemExit) as stop:
            call(finetune_squad, *arguments, "--out_dir", tmp_path / out, *more)
        assert stop.value.code == 2 and message in capsys.readouterr().err
    other = tmp_path / "other.json"
    other.write_text(squad.read_text().replace("What", "Who"))
    with pytest.raises(SystemExit):
        others = (run, "--squad", other, *arguments[3:])
        call(finetune_squad, *others, "--out_dir", parts, "--resume")
    assert "other examples" in capsys.readouterr().err
    assert checkpoints(parts) == stopped and not (tmp_path / "nothing").exists()
    call(finetune_squad, *arguments, "--out_dir", parts, "--resume")
    keys = "step", "lr", "loss", "grad_norm"
    assert metrics(parts, *keys) == metrics(whole, *keys)
    step, expected = weights(whole)
    assert step == 6 and weights(parts)[0] == 6
    for name, weight in weights(parts)[1].items():
        assert torch.equal(weight, expected[name])


def test_finetuning_ends_after_a_signal_and_is_resumed(run, squad, call, tmp_path, monkeypatch):
    out = tmp_path / "out"
    arguments = (run, "--squad", squad, "--epochs", 2, "--sequences", 16, "--out_dir", out)

    def signalled(log, logged=Log.step, **values):
        logged(log, **values)
        if values["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # the thread that hears it

    with monkeypatch.context() as patch:
        patch.setattr(Log, "step", signalled)
        with pytest.raises(SystemExit) as stop:
            call(finetune_squad, *arguments)
    assert stop.value.code == EXIT_STOPPED and weights(out)[0] == 2
    call(finetune_squad, *arguments, "--resume")
    assert weights(out)[0] == 6 and [step for (step,) in metrics(out, "step")] == [*range(1, 7)]


def test_finetuning_that_diverges_keeps_its_checkpoint(run, squad, call, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = (run, "--squad", squad, "--epochs", 2, "--sequences", 16, "--out_dir", out)
    with pytest.raises(SystemExit) as stop:
        call(finetune_squad, *arguments, "--learning_rate", "1e38")
    assert stop.value.code == 1 and "epoch 1" in capsys.readouterr().err
    assert weights(out)[0] == 0 and all(w.isfinite().all() for w in weights(out)[1].values())


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "JSON"),
        ("[]", "format"),
        ('{"data": 3}', "format"),
        ('{"data": [{"paragraphs": [{"context": "a"}]}]}', "paragraphs[0]: KeyError('qas')"),
        (
            '{"data": [{"paragraphs": [{"context": 1, "qas": [{"question": "b", "answers": '
            '[{"text": "c", "answer_start": 0}]}]}]}]}',
            "1 should be str",
        ),
        ('{"data": []}', "0 answerable questions"),
        (None, "no such file"),
    ],
)
def test_finetuning_refuses_bad_data(trained, call, tmp_path, capsys, content, message):
    path = tmp_path / "squad.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as stop:
        call(finetune_squad, trained, "--squad", path, "--out_dir", tmp_path / "out")
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_squad_cannot_be_downloaded(trained, call, tmp_path, capsys, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def fails(*arguments, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    for module in (datasets, None):
        monkeypatch.setitem(sys.modules, "datasets", module)
        with pytest.raises(SystemExit) as stop:
            call(finetune_squad, trained, "--out_dir", tmp_path / "out")
        message = capsys.readouterr().err
        assert stop.value.code == 2 and "--squad" in message
        assert ("no network" if module else "pip install datasets") in message


def test_squad_from_the_datasets_library(squad, monkeypatch):
    datasets = pytest.importorskip("datasets")
    questions = finetune_squad.read_squad(squad)
    rows = [
        {"context": q.context, "question": q.question, "answers": {"text": [q.answer, "x"],
         "answer_start": [q.start, 0]}}
        for q in questions
    ]  # fmt: skip
    rows.insert(3, {"context": "a", "question": "b", "answers": {"text": [], "answer_start": []}})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows)
    assert finetune_squad.download() == questions


@pytest.mark.parametrize(
    "module, arguments, message",
    [
        (passkey, ["--lengths", "200"], "too short"),
        (passkey, ["--lengths", "0"], "positive"),
        (passkey, ["--lengths", "300,x"], "whole numbers"),
        (passkey, ["--lengths", "300", "--trials", "0"], "--trials 0"),
        (passkey, ["--lengths", "300", "--show", "-1"], "--show -1"),
        (needle, ["--lengths", "100"], "too short"),
        (needle, ["--lengths", "-5"], "positive"),
        (needle, ["--lengths", "200,4096", "--score_length", "200"], "600 validation tokens"),
        (needle, ["--lengths", "200"], "8000"),
        (needle, ["--lengths", "200", "--score_length", "-1"], "--score_length -1"),
        (needle, ["--lengths", "200", "--samples", "0"], "--samples 0"),
        (needle, ["--lengths", "200", "--score_trials", "0"], "--score_trials 0"),
        (needle, ["--lengths", "200", "--data_dir", "nowhere"], "nowhere"),
        (needle, ["--lengths", "200", "--data_dir", "GPT2"], "tokenizer, 'bytes'"),
        (finetune_squad, ["--out_dir", "o", "--squad", "s", "--epochs", "0"], "--epochs 0"),
        (finetune_squad, ["--out_dir", "o", "--squad", "s", "--sequences", "-1"], "--sequences"),
        (finetune_squad, ["--out_dir", "o", "--squad", "s", "--device", "x"], "device = 'x'"),
        (finetune_squad, ["--out_dir", "README.md/o", "--squad", "s"], "README.md/o: no file can"),
        (
            finetune_squad,
            ["--out_dir", "o", "--squad", "s", "--batch_size", "7"],
            "batch_size = 2, 4, 8",
        ),
        (finetune_squad, ["--out_dir", "o", "--squad", "s", "--learning_rate", "-1"], "at least 0"),
    ],
)
def test_refusals(run, call, text, capsys, module, arguments, message):
    arguments = [text["gpt2"] if argument == "GPT2" else argument for argument in arguments]
    there = sorted(path.name for path in run.iterdir())
    with pytest.raises(SystemExit) as stop:
        call(module, run, *arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert sorted(path.name for path in run.iterdir()) == there


@pytest.mark.parametrize("module", [passkey, needle, finetune_squad])
def test_a_run_without_a_checkpoint_is_refused(trained, call, tmp_path, capsys, squad, module):
    more = ["--squad", squad, "--out_dir", tmp_path / "out"] if module is finetune_squad else []
    for message in ("no config.json", "checkpoint"):
        with pytest.raises(SystemExit) as stop:
            call(module, tmp_path, *more)
        assert stop.value.code == 2 and message in capsys.readouterr().err
        shutil.copy(trained / "config.json", tmp_path)
    assert not (tmp_path / "out").exists()
