"""Recall: an independent reading of the tasks, their batches, the loss, the evaluation."""

import hashlib
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from config import choices
from data.loader import Batching, TokenLoader
from data.recall import Drawn, RecallLoader, draw, targets
from data.tasks import open_loader
from errors import UserError
from evaluation import mean_loss
from layers.build import build_model
from scripts import eval_length, recall
from scripts.reproduce import tables
from tests.helpers import SMALL, not_blank, read_table, saved_run, small_config, write_scale
from tests.runs import assert_same_run, metrics

TASKS = choices("recall")
# Of batch 0 with T = 64, 32 sequences and seed 1337: the committed results depend on it.
CHECKSUMS = {"lookup": "644f9249302b", "mqar": "3bf1c91e657f", "latest": "8dfd22a19a59",
             "latest_2": "45f5d7a707f7", "sort": "226eb4942dee"}  # fmt: skip
SETTINGS = ["--task=recall", "--block_size=64", "--total_batch_size=512", "--val_tokens=512",
            "--tie_embeddings=False", "--tokenizer=gpt2"]  # fmt: skip
BOTH = [*SETTINGS, "--task=language+recall", "--tokenizer=bytes"]


def read(task, tokens):
    """The targets that follow from the tokens of a sequence; -100: nothing is asked."""
    out, known = [-100] * len(tokens), {}
    for i, token in enumerate(tokens):
        if task == "sort":
            if 32 in tokens[: i + 1]:
                out[i] = sorted(tokens[: tokens.index(32)])[i - tokens.index(32)]
        elif task == "mqar":
            if token < 128 and token in known:
                out[i] = known.pop(token)
            elif token < 128:
                known[token] = tokens[i + 1]
        elif token < 192:
            known.setdefault(token // 16, []).append(token % 16)
        elif token < 204:
            assert len(known[token - 192]) == (1 if task == "lookup" else 3)
            out[i] = known.pop(token - 192)[-2 if task == "latest_2" else -1]
    assert task == "sort" or not known  # every key is asked, once
    return out


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_follows_from_the_sequence(task):
    for index, length in enumerate([16, 17, 40, 64, 64, 300, 1024]):
        drawn = draw(task, 5, index, length)
        tokens = drawn.tokens.tolist()
        assert len(tokens) == length and 0 <= min(tokens) <= max(tokens) < 256
        assert targets(drawn).tolist() == read(task, tokens)
        assert len(drawn.answers) == (length // 2 if task == "sort" else 4)
        said = drawn.tokens[drawn.sources]
        assert (drawn.answers == (said if task in ("mqar", "sort") else said % 16)).all()
        assert (drawn.sources < drawn.places).all()
    more = draw("mqar", 5, 0, 1024, pairs=64)
    assert targets(more).tolist() == read("mqar", more.tokens.tolist())


@pytest.mark.parametrize("task", TASKS)
def test_batches_are_the_same_for_ever(task):
    whole = RecallLoader(task, Batching(64, 32, 1337))
    x, y = whole.batch(0)
    found = hashlib.sha256(x.numpy().tobytes() + y.numpy().tobytes()).hexdigest()
    assert found[:12] == CHECKSUMS[task]
    lengths = [whole._length(step) for step in range(1000)]
    assert 450 < lengths.count(64) < 550 and set(lengths) == set(range(16, 65))
    validation = list(whole.validation_batches(64 * 40, 32))
    assert [len(one) for one, _ in validation] == [32, 8]
    assert not {*map(tuple, x.tolist())} & {*map(tuple, validation[0][0].tolist())}


def test_the_loss_is_of_answers_alone():
    torch.manual_seed(1)
    model, loader = build_model(small_config("softmax.py", *SETTINGS)), RecallLoader
    batches = list(loader("lookup", Batching(64, 32, 1)).validation_batches(64 * 40, 32))
    losses = [F.cross_entropy(model(x)[y >= 0], y[y >= 0], reduction="none") for x, y in batches]
    assert [len(one) for one in losses] == [128, 32]
    for (x, y), expected in zip(batches, losses, strict=True):  # of 2,048 tokens and of 512
        assert model(x, y).item() == pytest.approx(expected.mean().item(), rel=1e-5)
    found = mean_loss(model, iter(batches), torch.device("cpu"), torch.float32)
    assert found == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_a_resumed_run_is_the_same(train):
    whole = train("whole", *BOTH, "--recall=mqar")
    steps = zip(metrics(whole, "tokens_per_s").values(), metrics(whole, "ms").values(), strict=True)
    tokens = [round(rate * ms / 1000) for rate, ms in steps]
    assert tokens[::2] == [512] * 3 and min(tokens[1::2]) < 512  # batches of recall are shorter
    train("resumed", *BOTH, "--recall=mqar", "--max_iters=3")
    assert_same_run(whole, train("resumed", *BOTH, "--recall=mqar", "--resume"))


def test_text_and_recall_in_turn(shards):
    config = small_config("softmax.py", *BOTH, "--recall=latest", f"--data_dir={shards}")
    loader, batching = open_loader(config, 0, 1, torch.device("cpu")), Batching(64, 8, 1337)
    text, recall = TokenLoader(shards, batching, 257), RecallLoader("latest", batching)
    for step in (0, 1, 2, 7, 8, 3):
        found, own = loader.batch(step), (recall if step % 2 else text).batch(step // 2)
        for ids, alone in zip(found, own, strict=True):
            assert torch.equal(ids, torch.where(alone < 0, alone, alone + 257 * (step % 2)))
    assert config.n_vocab == 513 and loader.tokens == 2 * text.tokens
    validation = (next(one.validation_batches(512, 8)) for one in (loader, text))
    assert all(torch.equal(found, own) for found, own in zip(*validation, strict=True))


@pytest.mark.parametrize("settings, first", [(SETTINGS, 0), (BOTH, 257)])
def test_the_accuracy_by_hand(settings, first, call, capsys, shards, tmp_path):
    torch.manual_seed(0)
    model = build_model(
        small_config("softmax.py", *settings, "--recall=latest", f"--data_dir={shards}")
    )
    ids = torch.arange(len(model.lm_head.weight))[:, None] - first
    model.lm_head.weight.data *= 50 * ((ids >= 0) & (ids < 16))  # so that a guess is often a value
    run = saved_run(tmp_path / "latest", model)
    call(recall, run, "--lengths=32", "--answers=400", "--rope=none", "--device=cpu", "--out=x.png")
    (measured,) = json.loads((run / "recall.json").read_text())
    for length in (32, 64):
        tokens = [draw("latest", 2, index, length).tokens.tolist() for index in range(100)]
        answers = torch.tensor([read("latest", one) for one in tokens])
        with torch.no_grad():
            right = model(first + torch.tensor(tokens)).argmax(-1) == first + answers
        part = measured["parts"][str(length)]
        assert 10 < right.sum() == 400 * part["accuracy"] and part["answers"] == 400
        assert sum(one["answers"] for one in part["distances"].values()) == 400
    printed, said = capsys.readouterr()
    title, _, line = printed.strip().splitlines()
    assert title == "latest, rope none: answers that are right (%)" and "nothing to draw" in said
    assert line.split(maxsplit=3)[1:] == ["–", f"{right.sum() / 4:.1f}", "not learned in 7 steps"]
    if first:
        call(eval_length, run, "--lengths=64", "--rope=none", "--device=cpu")
        (of_text,) = json.loads((run / "eval_length.json").read_text())
        ((x, y),) = TokenLoader(shards, Batching(64, 8, 0), 257).validation_batches(512, 8)
        assert of_text["parts"]["64 tokens"]["loss"] == pytest.approx(model(x, y).item(), rel=1e-5)


def test_the_accuracy_by_distance():
    tokens, places = np.zeros(64, np.int64), np.array([60, 61])
    near = Drawn(tokens, places, np.array([3, 4]), np.array([59, 57]))  # 1 and 4 before
    far = Drawn(tokens, places, np.array([5, 6]), np.array([57, 0]))  # 3 and 61 before
    found = recall.judge([near, far], [np.array([3, 4]), np.array([5, 0])])
    shares = {"1": (1, 1.0), "4": (2, 1.0), "64": (1, 0.0)}
    parts = {"32": {"accuracy": 0.7}, "64": {"accuracy": 0.8}}
    assert tables.recalled({"trained_length": 64, "parts": parts}, None) == [None, 80.0]
    by_limit = {k: {"answers": n, "accuracy": share} for k, (n, share) in shares.items()}
    assert found == {"accuracy": 0.75, "exact": 0.5, "answers": 4, "distances": by_limit}


def test_whole_sequences_of_sort(capsys):
    part = {"accuracy": 0.995, "exact": 0.25, "answers": 800, "distances": {}}
    opened = dict.fromkeys(("rope", "rope_factor", "rope_theta", "window", "p"))
    parts = {"64": part, "128": part | {"accuracy": 0.5}}
    run = {"recall": "sort", "variant": "lssa", "trained_length": 64, "step": 6}

    def shown(**options):
        recall.show(recall.RecallOptions(**options), {"run": run | opened | {"parts": parts}})
        return [line.split()[-2:] for line in capsys.readouterr().out.splitlines()[-2:]]

    assert shown() == [["99.5", "50.0"], ["25.0", "25.0"]]
    part["accuracy"] = 0.3
    assert shown()[1] == ["6", "steps"] and shown(window=8) == [["30.0", "50.0"], ["25.0", "25.0"]]


def test_refusals_and_pairs_in_proportion():
    config = small_config("softmax.py", *SETTINGS, "--recall=mqar")
    grown = recall.RecallOptions(lengths=(64, 512), answers=512, proportional=True)
    assert [grown.sequences(config, length) for length in (64, 512)] == [128, 64]
    aligned = recall.align(recall.RecallOptions(proportional=True), [config])
    assert max(aligned.lengths) == 2048  # 128 pairs
    latest = config.replace(recall="latest")
    short = recall.RecallOptions(lengths=(8,))
    for call, message in (
        (lambda: recall.identify(grown, latest), "--proportional is for mqar, but"),
        (lambda: recall.identify(short, latest), "length 8 must be at least 16"),
        (lambda: eval_length.LossOptions().applied(latest), "task = 'recall', but this command"),
        (lambda: RecallLoader("mqar", Batching(32, 8, 1)), "block_size = 32 must be at least 64"),
    ):
        with pytest.raises(UserError, match=message):
            call()


def test_no_lengths_of_what_is_not_learned(reproduced, scale, monkeypatch):
    write_scale(scale, *SMALL, *SETTINGS)

    def answer(run, drawn):
        right = "ssmax_nope" in str(run.path) or len(drawn[0].tokens) == 64
        wrong = "lssa" in str(run.path) or not right
        return np.stack([one.answers - wrong for one in drawn])

    monkeypatch.setattr(recall, "answer", answer)
    only = "softmax,softmax:plain_rope,ssmax_nope,hybrid_lssa:plain_rope"
    folder = reproduced("recall", f"--only={only}")
    table, text = read_table(folder), (folder / "table.md").read_text()
    assert table["columns"][-1] == "64x, 4,096"
    expected = [[100.0, *[0.0] * 6], [100.0, *[0.0] * 6], [100.0] * 7, [0.0, *[None] * 6]]
    assert [table["rows"][name]["mean"] for name in only.split(",")] == expected
    assert "At 16x, by seed: `softmax` 0.0; `softmax:plain_rope` 0.0; `ssmax_nope` 100.0." in text
    assert "Not learned in 6 steps, as a seed has less than 99 at 1x" in text
    assert "at 1x, by seed: `hybrid_lssa:plain_rope` 0.0." in text
    pictures = [*folder.glob("*.png")]
    assert len(pictures) == 2 and all(map(not_blank, pictures))
