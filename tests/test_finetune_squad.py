"""Fine-tuning on SQuAD."""

import json
import math
import os
import re
import signal

import numpy as np
import pytest
import torch

import train as training_loop
from data.tokenizer import get_tokenizer
from errors import UserError
from layers.build import build_model
from runtime import checkpoint, run_folder
from runtime.distributed import EXIT_STOPPED
from runtime.log import Log
from scripts import finetune_squad
from scripts.common.papers import SSMAX
from scripts.common.runs import load_run
from tests.runs import checkpoint_bytes, comparable_rows, identical, metrics, run_train, saved

WORDS = ["river", "stone", "winter", "copper", "garden", "violin", "harbour", "marble"]


@pytest.fixture(scope="module")
def squad(tmp_path_factory):
    """SQuAD's format: 40 answerable questions, and three that are left out."""
    rng = np.random.default_rng(0)
    paragraphs = []
    for i in range(40):
        words = list(rng.permutation(WORDS)[: rng.integers(3, 7)])
        context = f"The {' '.join(words)} is {i}."
        answers = [
            {"text": words[1], "answer_start": context.index(words[1])},
            {"text": words[0], "answer_start": 4},  # only the first one is trained
        ]
        qas = [{"id": str(i), "question": f"What is {i}? ", "answers": answers}]
        paragraphs.append({"context": context, "qas": qas})
    paragraphs[0]["qas"].append({"question": "Why?", "answers": [], "is_impossible": True})
    paragraphs[1]["qas"].append({"question": "  ", "answers": answers})
    too_long = {"context": "long " * 30, "qas": [{"question": "?", "answers": answers}]}
    paragraphs.append(too_long)
    path = tmp_path_factory.mktemp("squad") / "train-v2.0.json"
    path.write_text(json.dumps({"version": "v2.0", "data": [{"paragraphs": paragraphs}]}))
    return path


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_squad_examples_hold_context_question_and_answer(name):
    tokenizer = get_tokenizer(name)
    question = finetune_squad.Question("It is the Elbe.  ", "Which river?", "the Elbe")
    example = finetune_squad.encode(tokenizer, question)
    text = "<|endoftext|>It is the Elbe.  \nQuestion: Which river?\nAnswer: the Elbe"
    assert tokenizer.decode([*example.x, example.y[-1]]) == text
    is_answer = example.y != finetune_squad.IGNORED
    assert tokenizer.decode(example.y[is_answer]) == " the Elbe"
    assert torch.equal(example.y[is_answer][:-1], example.x[is_answer][1:])


def test_padding_begins_no_document_and_has_no_loss():
    end_of_text = 256
    examples = []
    for length in (3, 5):
        tokens = torch.arange(length + 1)
        tokens[0] = end_of_text
        examples.append(finetune_squad.Example(tokens[:-1], tokens[1:]))
    x, y = finetune_squad.tensors(examples, torch.device("cpu"))
    assert x[:, 0].tolist() == [end_of_text, end_of_text]
    assert x[0, 1:3].tolist() == [1, 2]
    assert x[1, 1:].tolist() == [1, 2, 3, 4]
    assert not (x[0, 3:] == end_of_text).any()
    assert y[0].tolist() == [1, 2, 3, finetune_squad.IGNORED, finetune_squad.IGNORED]
    assert y[1].tolist() == [1, 2, 3, 4, 5]


def test_squad_epochs_take_every_example_once():
    examples = []
    for i in range(10):
        examples.append(finetune_squad.Example(torch.full((3,), i), torch.full((3,), i)))

    def first_tokens(step):
        batch = finetune_squad.examples_of_batch(step, examples, 4, seed=7)
        return [int(example.x[0]) for example in batch]

    for epoch in (0, 1):
        steps = [first_tokens(3 * epoch + i) for i in range(3)]
        assert [len(batch) for batch in steps] == [4, 4, 2]
        assert sorted(sum(steps, [])) == list(range(10))
    assert first_tokens(3) != first_tokens(0)


def test_the_schedule_and_the_settings_are_the_papers(run, squad, call, tmp_path):
    out = tmp_path / "tuned"
    checkpoints_before = checkpoint_bytes(run)
    call(
        finetune_squad,
        run,
        f"--squad={squad}",
        f"--out_dir={out}",
        "--learning_rate=3e-3",
        "--epochs=6",
        "--sequences=16",
        "--batch_size=4",
    )
    assert checkpoint_bytes(run) == checkpoints_before
    data = json.loads((out / "squad.json").read_text())
    assert data["examples"] == 40
    assert data["left_out"] == 1

    # three steps an epoch: linear warm-up in the first, then a cosine to 0
    rates = list(metrics(out, "lr").values())
    assert rates[:3] == pytest.approx([1e-3, 2e-3, 3e-3])
    cosine = [3e-3 * (1 + math.cos(math.pi * i / 15)) / 2 for i in range(15)]
    assert rates[3:] == pytest.approx(cosine)
    losses = list(metrics(out, "loss").values())
    assert len(losses) == 18
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])

    paper = SSMAX["finetuning"]
    config = run_folder.read_config(out)
    assert config.optimizer == "adamw"
    assert [config.beta1, config.beta2] == paper["betas"]
    assert config.weight_decay == paper["weight_decay"]
    assert config.grad_clip == paper["grad_clip"]
    defaults = finetune_squad.FineTuning()
    for name in ("learning_rate", "epochs", "sequences"):
        assert getattr(defaults, name) == paper[name]
    assert config.init_from == str(run)
    assert config.attention == "lssar"
    assert config.p == 3

    # the first loss is the base model's, summed over an answer and averaged over examples
    model = build_model(config).eval()
    checkpoint.load_weights(model, checkpoint.find(run))
    examples = finetune_squad.encode_all(finetune_squad.read_squad(squad), config)
    answer_losses = []
    for example in finetune_squad.examples_of_batch(0, examples, 16, config.seed):
        token_losses = model.token_losses(example.x[None], example.y[None])[0]
        is_answer = example.y != finetune_squad.IGNORED
        answer_losses.append(token_losses[is_answer].sum().item())
    assert losses[0] == pytest.approx(sum(answer_losses) / 16, rel=1e-5)

    assert load_run(out).facts["step"] == 18  # a run like any other


def test_finetuning_resumes_and_never_overwrites(run, squad, call, tmp_path, monkeypatch, refused):
    """In float16, where the state has a scaler too."""
    arguments = (run, "--squad", squad, "--epochs", 2, "--sequences", 16, "--dtype", "float16")
    whole = tmp_path / "whole"
    call(finetune_squad, *arguments, "--out_dir", whole)

    real_step = Log.step

    def stops(log, step, **values):
        real_step(log, step, **values)
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    resumed = tmp_path / "resumed"
    with monkeypatch.context() as patch:
        patch.setattr(Log, "step", stops)
        with pytest.raises(SystemExit) as stop:
            call(finetune_squad, *arguments, "--out_dir", resumed)
    assert stop.value.code == EXIT_STOPPED
    checkpoints_stopped = checkpoint_bytes(resumed)
    assert saved(resumed)["step"] == 2

    other = tmp_path / "other.json"
    other.write_text(squad.read_text().replace("What", "Who"))
    for more, message in (
        (("--out_dir", run), "holds a run"),
        (("--resume", "--sequences", "8"), "total_batch_size"),
        (("--resume", "--epochs", "3"), ("'epochs': 2", "'epochs': 3", "repeat its options")),
        (("--resume", "--squad", other), "was fine-tuned on {'examples': 40, "),
        (("--resume", "--out_dir", tmp_path / "nothing"), "no checkpoint"),
    ):
        refused(call, finetune_squad, *arguments, "--out_dir", resumed, *more, says=message)
    refused(run_train, "--resume", resumed, says="its training shards differ from")
    assert checkpoint_bytes(resumed) == checkpoints_stopped
    assert not (tmp_path / "nothing").exists()

    call(finetune_squad, *arguments, "--out_dir", resumed, "--resume")
    assert comparable_rows(resumed) == comparable_rows(whole)
    assert saved(resumed)["step"] == 6
    assert identical(saved(resumed), saved(whole) | {"config": saved(resumed)["config"]})

    written = {path: path.stat().st_mtime_ns for path in resumed.glob("*.pt")}
    call(finetune_squad, *arguments, "--out_dir", resumed, "--resume")  # nothing is left to do
    assert {path: path.stat().st_mtime_ns for path in resumed.glob("*.pt")} == written


def test_finetuning_that_diverges_continues_past_its_step(
    run, squad, call, tmp_path, monkeypatch, capsys
):
    train_step = training_loop.train_step

    def diverges(training, *arguments):
        loss, grad_norm = train_step(training, *arguments)
        if training.step == 4:
            grad_norm = torch.tensor(math.nan)
        return loss, grad_norm

    monkeypatch.setattr(training_loop, "train_step", diverges)
    monkeypatch.setattr(finetune_squad, "CHECKPOINT_INTERVAL", 2)
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stop:
        call(finetune_squad, run, f"--squad={squad}", f"--out_dir={out}", "--sequences=16")
    assert stop.value.code == 1
    message = capsys.readouterr().err
    assert "error: step 5: loss" in message
    assert saved(out)["step"] == 4

    # as the message says
    settings = re.findall(r"--(?:resume|learning_rate=\S+|first_batch=\d+)", message)
    assert settings == ["--resume", "--learning_rate=1e-05", "--first_batch=1"]
    fetch_batch = finetune_squad.fetch_batch
    numbers = []

    def fetches(number, *arguments):
        numbers.append(number)
        return fetch_batch(number, *arguments)

    monkeypatch.setattr(finetune_squad, "fetch_batch", fetches)
    monkeypatch.setattr(training_loop, "train_step", train_step)
    arguments = (run, f"--squad={squad}", f"--out_dir={out}", "--sequences=16")
    call(finetune_squad, *arguments, *settings)
    assert numbers == list(range(5, 31))  # of steps 4 to 29: the batch that diverged is skipped
    assert saved(out)["step"] == 30


def test_the_default_folder_is_beside_the_runs_folder(trained, call, monkeypatch):
    folders = []
    monkeypatch.setattr(finetune_squad, "finetune", lambda run, out, options: folders.append(out))
    expected = trained.with_name(f"{trained.name}_squad")
    call(finetune_squad, trained, "--squad=squad.json")
    monkeypatch.chdir(trained)
    call(finetune_squad, ".", "--squad=squad.json")
    call(finetune_squad, "../" + trained.name, "--squad=squad.json")
    assert [folder.resolve() for folder in folders] == [expected] * 3


def test_finetuning_asks_for_wandb_before_the_questions_are_read(
    trained, call, refused, monkeypatch, tmp_path
):
    def without_wandb(config):
        raise UserError("wandb is not installed")

    monkeypatch.setattr(finetune_squad, "wandb_settings", without_wandb)
    monkeypatch.setattr(finetune_squad, "read_squad", pytest.fail)
    arguments = (trained, "--squad=squad.json", f"--out_dir={tmp_path / 'out'}")
    refused(call, finetune_squad, *arguments, says="wandb is not installed")


def test_finetuning_of_another_rank_is_refused(trained, call, refused, monkeypatch, tmp_path):
    """It would train, and neither log nor save."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(finetune_squad, "finetune", pytest.fail)
    arguments = (trained, "--squad=squad.json", f"--out_dir={tmp_path / 'out'}")
    refused(call, finetune_squad, *arguments, says="RANK = 1: fine-tuning takes one process")
    assert not (tmp_path / "out").exists()


def test_finetuning_refuses_bad_data(trained, call, tmp_path, refused, monkeypatch):
    monkeypatch.setattr(finetune_squad, "build_model", pytest.fail)  # the file is read first
    path = tmp_path / "squad.json"
    out = tmp_path / "out"
    arguments = (call, finetune_squad, trained, f"--squad={path}", f"--out_dir={out}")
    refused(*arguments, says="no such file")
    path.write_text('{"data": [{"paragraphs": [{"context": "a"}]}]}')
    refused(*arguments, says="KeyError('qas')")
    assert not out.exists()
