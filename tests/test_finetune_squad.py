"""Fine-tuning on SQuAD."""

import json
import math
import os
import signal

import numpy as np
import pytest
import torch

from data.tokenizer import get_tokenizer
from model import GPT
from runtime import checkpoint
from runtime.distributed import EXIT_STOPPED
from runtime.log import Log
from scripts import finetune_squad
from scripts.common.papers import SSMAX
from scripts.common.runner import load_run
from tests.runs import identical, lines, metrics, saved

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
    paragraphs.append({"context": "long " * 30, "qas": [{"question": "?", "answers": answers}]})
    path = tmp_path_factory.mktemp("squad") / "train-v2.0.json"
    path.write_text(json.dumps({"version": "v2.0", "data": [{"paragraphs": paragraphs}]}))
    return path


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_squad_examples_hold_context_question_and_answer(name):
    tokenizer = get_tokenizer(name)
    question = finetune_squad.Question("It is the Elbe.  ", "Which river?", "the Elbe")
    tokens, answer = finetune_squad.encode(tokenizer, question)
    end = "It is the Elbe.  \nQuestion: Which river?\nAnswer: the Elbe"
    assert tokenizer.decode(tokens) == f"<|endoftext|>{end}"
    assert tokenizer.decode(tokens[-answer:]) == " the Elbe"


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


def test_the_recipe_and_the_loss_of_a_finetuned_run(run, squad, call, tmp_path):
    out = tmp_path / "tuned"
    arguments = ("--squad", squad, "--out_dir", out, "--learning_rate", "3e-3", "--epochs", 6)
    before = checkpoints(run)
    call(finetune_squad, run, *arguments, "--sequences", 16, "--batch_size", 4)
    assert checkpoints(run) == before
    data = json.loads((out / "squad.json").read_text())
    assert data["examples"] == 40 and data["left_out"] == 1
    # three steps an epoch: linear warm-up in the first, then a cosine to 0
    rates, losses = (list(metrics(out, key).values()) for key in ("lr", "loss"))
    assert len(losses) == 18
    assert rates[:3] == pytest.approx([1e-3, 2e-3, 3e-3])
    cosine = [3e-3 * (1 + math.cos(math.pi * i / 15)) / 2 for i in range(15)]
    assert rates[3:] == pytest.approx(cosine) and sum(losses[-3:]) < 0.9 * sum(losses[:3])
    paper, config = SSMAX["finetuning"], checkpoint.read_config(out)
    assert [config.beta1, config.beta2] == paper["betas"] and config.optimizer == "adamw"
    assert (config.weight_decay, config.grad_clip) == (paper["weight_decay"], paper["grad_clip"])
    defaults = finetune_squad.FineTuning()
    for name in ("learning_rate", "epochs", "sequences"):
        assert getattr(defaults, name) == paper[name]
    assert config.init_from == str(run) and config.attention == "lssar" and config.p == 3
    # the first loss is that of the base, summed over an answer and averaged over examples
    model = GPT(config).eval()
    checkpoint.load_weights(model, run)
    examples = finetune_squad.encode_all(finetune_squad.read_squad(squad), config)
    expected = []
    for example in finetune_squad.batch_of(0, examples, 16, config.seed):
        tokens = torch.from_numpy(example.tokens.astype(np.int64))
        losses_here = model.token_losses(tokens[None, :-1], tokens[None, 1:])[0]
        expected.append(losses_here[-example.answer :].sum().item())
    assert losses[0] == pytest.approx(sum(expected) / 16, rel=1e-5)

    assert load_run(out).facts["step"] == 18  # a run like any other


def test_finetuning_resumes_and_never_overwrites(run, squad, call, tmp_path, monkeypatch, refused):
    """In float16, where the state has a scaler too."""
    arguments = (run, "--squad", squad, "--epochs", 2, "--sequences", 16, "--dtype", "float16")
    call(finetune_squad, *arguments, "--out_dir", tmp_path / "whole")

    def stops(log, step, logged=Log.step, **values):
        logged(log, step, **values)
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Log, "step", stops)
        with pytest.raises(SystemExit) as stop:
            call(finetune_squad, *arguments, "--out_dir", tmp_path / "parts")
    assert stop.value.code == EXIT_STOPPED
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    stopped = checkpoints(parts)
    assert saved(parts)["step"] == 2
    other = tmp_path / "other.json"
    other.write_text(squad.read_text().replace("What", "Who"))
    for more, message in (
        (("--out_dir", run), "holds a run"),
        (("--resume", "--learning_rate", "1e-3"), "learning_rate"),
        (("--resume", "--squad", other), "was fine-tuned on {'examples': 40, "),
        (("--resume", "--out_dir", tmp_path / "nothing"), "no checkpoint"),
    ):
        refused(call, finetune_squad, *arguments, "--out_dir", parts, *more, says=message)
    assert checkpoints(parts) == stopped and not (tmp_path / "nothing").exists()
    call(finetune_squad, *arguments, "--out_dir", parts, "--resume")
    assert lines(parts) == lines(whole) and saved(parts)["step"] == 6
    assert identical(saved(parts)["model"], saved(whole)["model"])


def test_finetuning_refuses_bad_data(trained, call, tmp_path, refused):
    path, out = tmp_path / "squad.json", tmp_path / "out"
    arguments = (call, finetune_squad, trained, f"--squad={path}", f"--out_dir={out}")
    refused(*arguments, says="no such file")
    path.write_text('{"data": [{"paragraphs": [{"context": "a"}]}]}')
    refused(*arguments, says="KeyError('qas')")
    assert not out.exists()
