"""Recall: an independent reading of the tasks, their batches, the loss, the evaluation."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from config import choices
from data.loader import Batching, TokenLoader
from data.recall import Drawn, RecallLoader, chance, draw, hash_sequences, targets
from data.shards import fingerprint_of as shards_fingerprint
from data.tasks import fingerprint_of, open_loader
from errors import UserError
from evaluation import mean_loss
from layers.build import build_model
from scripts import eval_length, recall
from scripts.common.tables import paired, summarise
from scripts.reproduce import kinds, pictures
from tests.helpers import SMALL, not_blank, read_table, saved_run, small_config, write_scale
from tests.runs import assert_same_run, metrics

TASKS = choices("recall")
SETTINGS = [
    "--task=recall",
    "--block_size=64",
    "--total_batch_size=512",
    "--val_tokens=512",
    "--tie_embeddings=False",
    "--tokenizer=gpt2",
]
BOTH = [*SETTINGS, "--task=language+recall", "--tokenizer=bytes"]


def read(task, tokens):
    """The targets that follow from the tokens of a sequence; -100: nothing is asked."""
    if task == "sort":
        return read_sort(tokens)
    if task == "mqar":
        return read_mqar(tokens)
    targets = [-100] * len(tokens)
    values = {}  # the values of each key, in order
    for i, token in enumerate(tokens):
        if token < 192:
            values.setdefault(token // 16, []).append(token % 16)
        elif token < 204:
            asked = values.pop(token - 192)
            assert len(asked) == (1 if task == "lookup" else 3)
            targets[i] = asked[-2] if task == "latest_2" else asked[-1]
    assert not values  # every key is asked, once
    return targets


def read_mqar(tokens):
    targets = [-100] * len(tokens)
    values = {}
    for i, token in enumerate(tokens):
        if token < 128 and token in values:
            targets[i] = values.pop(token)
        elif token < 128:
            values[token] = tokens[i + 1]
    assert not values  # every key is asked, once
    return targets


def read_sort(tokens):
    targets = [-100] * len(tokens)
    separator = tokens.index(32)
    symbols = sorted(tokens[:separator])
    targets[separator:] = symbols[: len(tokens) - separator]
    return targets


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_follows_from_the_sequence(task):
    for index, length in enumerate([16, 17, 40, 64, 64, 300, 1024]):
        drawn = draw(task, 5, index, length)
        tokens = drawn.tokens.tolist()
        assert len(tokens) == length
        assert min(tokens) >= 0
        assert max(tokens) < 256
        assert targets(drawn).tolist() == read(task, tokens)
        if task == "sort":
            assert len(drawn.answers) == length // 2
        else:
            assert len(drawn.answers) == 4
        sources = drawn.tokens[drawn.sources]
        if task not in ("mqar", "sort"):
            sources = sources % 16
        assert (drawn.answers == sources).all()
        assert (drawn.sources < drawn.places).all()


def test_more_pairs_of_mqar():
    drawn = draw("mqar", 5, 0, 1024, pairs=64)
    assert targets(drawn).tolist() == read_mqar(drawn.tokens.tolist())


def likeliest(values, weights):
    """The value with the most weight."""
    scores = Counter()
    for value, weight in zip(values, weights, strict=True):
        scores[value] += weight
    return max(scores, key=scores.__getitem__)


@pytest.mark.parametrize("task", ["latest", "latest_2"])
def test_chance_is_the_best_guess_without_keys(task):
    sequences = [draw(task, 5, index, 64) for index in range(6000)]
    # how often each value in view is asked for, by its place among them
    asked = Counter()
    for drawn in sequences[:2000]:
        places = np.flatnonzero(drawn.tokens < 192)
        asked_places = np.searchsorted(places, drawn.sources)
        asked.update(asked_places.tolist())
    weights = [asked[i] for i in range(len(places))]
    right = []
    for drawn in sequences[2000:]:
        values = [token % 16 for token in drawn.tokens.tolist() if token < 192]
        guess = likeliest(values, weights)
        right += list(drawn.answers == guess)
    assert np.mean(right) == pytest.approx(chance(task, 64), abs=0.01)


@pytest.mark.parametrize("length", [16, 17, 64, 65, 1024])
def test_chance_of_sort_is_the_answer_before(length):
    right = []
    for index in range(1000):
        answers = draw("sort", 5, index, length).answers
        repeats = answers[1:] == answers[:-1]
        right += [False, *repeats]
    assert np.mean(right) == pytest.approx(chance("sort", length), abs=0.01)


def test_chance_is_exact_to_a_tenth_of_a_percent():
    for task, count in {"lookup": 16, "mqar": 64}.items():
        most = []
        for values in itertools.product(range(count), repeat=3):  # the fourth is 0
            counts = Counter((0, *values))
            most.append(max(counts.values()))
        expected = np.mean(most) / 4
        assert chance(task, 64) == pytest.approx(expected, abs=5e-4)
    # of 32 answers as many repeat none as there are different symbols: 32 (1 - (31 / 32)^32)
    assert chance("sort", 64) == pytest.approx((31 / 32) ** 32)
    assert chance("mqar", 64, pairs=1) == 1
    assert chance("mqar", 1024, pairs=64) < 0.07


@pytest.mark.parametrize("task", TASKS)
def test_lengths_of_recall_batches_and_their_validation(task):
    loader = RecallLoader(task, Batching(64, 32, 1337))
    x, _ = loader.batch(0)
    lengths = []
    recording = RecallLoader(task, Batching(64, 32, 1337))
    recording._simulate = lambda split, indices, length: lengths.append(length)
    for step in range(1000):
        recording.read(step)
    assert 450 < lengths.count(64) < 550
    assert set(lengths) == set(range(16, 65))
    validation = [x for x, _ in loader.validation_batches(64 * 40, 32)]
    assert list(map(len, validation)) == [32, 8]
    training_sequences = set(map(tuple, x.tolist()))
    assert training_sequences.isdisjoint(map(tuple, validation[0].tolist()))


def test_the_loss_is_of_answers_alone():
    torch.manual_seed(1)
    model = build_model(small_config("softmax.py", *SETTINGS))
    loader = RecallLoader("lookup", Batching(64, 32, 1))
    batches = list(loader.validation_batches(64 * 40, 32))  # of 2,048 tokens and of 512
    losses = []
    for x, y in batches:
        answered = y >= 0
        loss = F.cross_entropy(model(x)[answered], y[answered], reduction="none")
        losses.append(loss)
        expected = loss.mean().item()
        assert model(x, y).item() == pytest.approx(expected, rel=1e-5)
    assert list(map(len, losses)) == [128, 32]
    mean = mean_loss(model, iter(batches), torch.float32)
    expected = torch.cat(losses).mean().item()
    assert mean == pytest.approx(expected, rel=1e-5)


def test_a_resumed_run_is_the_same(train):
    whole = train("whole", *BOTH, "--recall=mqar")
    rates = metrics(whole, "tokens_per_s").values()
    times = metrics(whole, "ms").values()
    tokens = []
    for rate, ms in zip(rates, times, strict=True):
        tokens.append(round(rate * ms / 1000))
    assert tokens[::2] == [512] * 3
    assert min(tokens[1::2]) < 512  # batches of recall are shorter
    train("resumed", *BOTH, "--recall=mqar", "--max_iters=3")
    resumed = train("resumed", *BOTH, "--recall=mqar", "--resume")
    assert_same_run(whole, resumed)


def assert_same_batch(batch, expected):
    for ids, expected_ids in zip(batch, expected, strict=True):
        assert torch.equal(ids, expected_ids)


def test_text_and_recall_in_turn(shards):
    config = small_config("softmax.py", *BOTH, "--recall=latest", f"--data_dir={shards}")
    assert config.n_vocab == 513
    batching = Batching(64, 8, 1337)
    loader = open_loader(config, 0, 1, torch.device("cpu"))
    text = TokenLoader(shards, batching, 257)
    recall = RecallLoader("latest", batching)
    assert loader.tokens == 2 * text.tokens
    assert fingerprint_of(config) == shards_fingerprint(shards) | {
        "recall": "latest, ids from 257",
        "recall sequences": hash_sequences("latest"),
    }
    for step in (0, 1, 2, 7, 8, 3):
        if step % 2:
            batch = recall.batch(step // 2)
            expected = [torch.where(ids < 0, ids, ids + 257) for ids in batch]
        else:
            expected = text.batch(step // 2)
        assert_same_batch(loader.batch(step), expected)
    validation = next(loader.validation_batches(512, 8))
    expected = next(text.validation_batches(512, 8))
    assert_same_batch(validation, expected)


@pytest.mark.parametrize("settings, first", [(SETTINGS, 0), (BOTH, 257)])
def test_the_accuracy_by_hand(settings, first, call, capsys, shards, tmp_path):
    torch.manual_seed(0)
    config = small_config("softmax.py", *settings, "--recall=latest", f"--data_dir={shards}")
    model = build_model(config)
    # so that a guess is often a value
    ids = torch.arange(len(model.lm_head.weight))[:, None] - first
    is_value = (ids >= 0) & (ids < 16)
    model.lm_head.weight.data *= 50 * is_value
    run = saved_run(tmp_path / "latest", model)
    options = ["--lengths=32", "--answers=400", "--rope=none", "--device=cpu", "--out=x.png"]
    call(recall, run, *options)
    (measured,) = json.loads((run / "recall.json").read_text())
    for length in (32, 64):
        sequences = []
        answers = []
        for index in range(100):
            tokens = draw("latest", 2, index, length).tokens.tolist()
            sequences.append(tokens)
            answers.append(read("latest", tokens))
        with torch.no_grad():
            predicted = model(first + torch.tensor(sequences)).argmax(-1)
        is_right = predicted == first + torch.tensor(answers)
        right = is_right.sum().item()
        assert right > 10
        part = measured["parts"][str(length)]
        assert part["accuracy"] == right / 400
        assert part["answers"] == 400
        distances = part["distances"].values()
        assert sum(judged["answers"] for judged in distances) == 400
    printed, errors = capsys.readouterr()
    assert "nothing to draw" in errors
    title, _, line = printed.strip().splitlines()
    assert title == "latest, rope none: answers that are right (%)"
    assert line.split(maxsplit=3)[1:] == ["–", f"{right / 4:.1f}", "not learned in 7 steps"]
    if first:
        call(eval_length, run, "--lengths=64", "--rope=none", "--device=cpu")
        (of_text,) = json.loads((run / "eval_length.json").read_text())
        text = TokenLoader(shards, Batching(64, 8, 0), 257)
        ((x, y),) = text.validation_batches(512, 8)
        loss = of_text["parts"]["64 tokens"]["loss"]
        expected = model(x, y).item()
        assert loss == pytest.approx(expected, rel=1e-5)


def test_the_accuracy_by_distance():
    tokens = np.zeros(64, np.int64)
    places = np.array([60, 61])
    near = Drawn(
        tokens,
        places,
        answers=np.array([3, 4]),
        sources=np.array([59, 57]),
    )
    far = Drawn(
        tokens,
        places,
        answers=np.array([5, 6]),
        sources=np.array([57, 0]),
    )
    predictions = [np.array([3, 4]), np.array([5, 0])]
    assert recall.judge([near, far], predictions) == {
        "accuracy": 0.75,
        "exact": 0.5,
        "answers": 4,
        "distances": {
            "1": {"answers": 1, "accuracy": 1.0},
            "4": {"answers": 2, "accuracy": 1.0},  # 4 and 3 tokens before
            "64": {"answers": 1, "accuracy": 0.0},  # 61 tokens before
        },
    }


def test_a_table_has_no_accuracy_below_the_training_length():
    measured = {
        "trained_length": 64,
        "parts": {"32": {"accuracy": 0.7}, "64": {"accuracy": 0.8}},
    }
    assert kinds.accuracies_if_learned(measured) == [None, 80.0]


def test_a_table_has_all_accuracies_with_another_p():
    """As the command, since p may lower the accuracy at the training length."""
    measured = {
        "trained_length": 64,
        "parts": {"64": {"accuracy": 0.8}, "128": {"accuracy": 0.5}},
    }
    for options, expected in (({"p": 3.0}, [80.0, 50.0]), ({"rope": "none"}, [80.0, None])):
        measured |= recall.Recall(**options).summarise(measured["parts"])
        assert kinds.accuracies_if_learned(measured) == expected


def test_a_distance_of_few_answers_is_not_drawn():
    judged = {
        "4": {"answers": 30, "accuracy": 0.5},
        "64": {"answers": 29, "accuracy": 1.0},
    }
    measured = {"parts": {"128": {"distances": judged}}}
    curve = recall.distance_curve("a run", measured, 128)
    assert curve.x == [4]
    assert curve.y == [50.0]


def measured_run(task, parts, **facts):
    """What recall.json stores of a run that was measured without options, and more `facts`."""
    defaults = dict.fromkeys(("rope", "rope_factor", "rope_theta", "window", "p"))
    return defaults | {
        "recall": task,
        "variant": "lssa",
        "trained_length": 64,
        "proportional": False,
        "parts": parts,
        **facts,
    }


def test_whole_sequences_of_sort(capsys):
    trained = {"accuracy": 0.995, "exact": 0.25, "answers": 800, "distances": {}}
    longer = trained | {"accuracy": 0.5}
    run = measured_run("sort", {"64": trained, "128": longer}, step=6)

    def shown(**options):
        recall.Recall(**options).show({"run": run})
        lines = capsys.readouterr().out.splitlines()
        return [line.split()[-2:] for line in lines[-2:]]

    assert shown() == [["99.5", "50.0"], ["25.0", "25.0"]]
    trained["accuracy"] = 0.3
    assert shown()[1] == ["6", "steps"]
    for name, value in (
        ("window", 8),
        ("p", 2.0),
        ("attention", "lssa"),
        ("log_base", 50.0),
        ("rope_factor", 4.0),
        ("rope_theta", 500.0),
    ):
        assert shown(**{name: value}) == [["30.0", "50.0"], ["25.0", "25.0"]], name


def test_a_dashed_line_is_the_level_of_chance():
    judged = {"accuracy": 1.0, "exact": 1.0, "answers": 800, "distances": {}}
    parts = {"64": judged, "1024": judged}

    def dashed(**results):
        """The percentages of each line but the runs' own, by its label."""
        figure = recall.Recall().show(results)["recall"]
        (axes,) = figure.axes
        lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
        for name in results:
            assert lines.pop(name) == [100, 100]
        rounded = {}
        for label, percentages in lines.items():
            if not label.startswith("_"):
                rounded[label] = [round(percent, 1) for percent in percentages]
        return rounded

    lookup = measured_run("lookup", parts)
    mqar = measured_run("mqar", parts, proportional=True)
    sort = measured_run("sort", parts)
    latest = measured_run("latest", parts)
    in_view = "chance: a value in view, without matching its key"
    repeated = "chance: repeating the last answer"
    assert dashed(a=lookup, b=lookup) == {in_view: [33.7, 33.7]}
    assert dashed(a=mqar) == {in_view: [27.3, 6.2]}
    assert dashed(a=sort, b=latest) == {
        f"sort, {repeated}": [36.2, 93.8],
        f"latest, {in_view}": [31.5, 31.5],
    }


def test_the_picture_of_a_table_has_the_level_of_chance():
    measured = {"recall": "sort", "trained_length": 64, "proportional": False}
    run = {"seed": 1, "evaluation": measured}
    softmax = summarise([run | {"values": [90.0, 50.0]}]) | {"paper": None}
    ssmax = summarise([run | {"values": [95.0, 60.0]}]) | {"paper": None}
    ssmax["difference"] = paired(ssmax, softmax)
    table = {
        "scale": "tiny",
        "unit": "%",
        "multiples": [1, 16],
        "columns": ["1x, 64", "16x, 1,024"],
        "baseline": "softmax",
        "rows": {"softmax": softmax, "ssmax": ssmax},
    }
    figure = pictures.together(table)
    accuracies, differences = figure.axes
    lines = {line.get_label(): line.get_ydata() for line in accuracies.lines}
    assert lines["chance: repeating the last answer"] == pytest.approx([36.2, 93.75], abs=0.05)
    assert [line.get_label() for line in differences.lines] == ["ssmax"]
    assert differences.get_title() == "minus softmax, with the same seed"


def test_pairs_in_proportion():
    config = small_config("softmax.py", *SETTINGS, "--recall=mqar")
    evaluation = recall.Recall(
        lengths=(64, 512),
        answers=512,
        proportional=True,
    )
    assert evaluation.sequences(config, 64) == 128
    assert evaluation.sequences(config, 512) == 64
    without_lengths = recall.Recall(proportional=True)
    aligned = without_lengths.align([config])
    assert max(aligned.lengths) == 2048  # 128 pairs


def test_refusals():
    latest = small_config("softmax.py", *SETTINGS, "--recall=latest")
    proportional = recall.Recall(lengths=(64, 512), proportional=True)
    with pytest.raises(UserError, match="--proportional is for mqar, but"):
        proportional.identify(latest)
    short = recall.Recall(lengths=(8,))
    with pytest.raises(UserError, match="length 8 must be at least 16"):
        short.identify(latest)
    with pytest.raises(UserError, match="task = 'recall', but this command"):
        eval_length.LossByLength().apply_to(latest)
    batching = Batching(32, 8, 1)
    with pytest.raises(UserError, match="block_size = 32 must be at least 64"):
        RecallLoader("mqar", batching)


def test_a_run_that_has_not_learned_has_one_accuracy(reproduced, scale, monkeypatch):
    write_scale(scale, *SMALL, *SETTINGS)

    def answer(run, sequences):
        """lssa is always wrong, ssmax never, and softmax beyond the training length."""
        path = str(run.path)
        at_training_length = len(sequences[0].tokens) == 64
        answers = np.stack([drawn.answers for drawn in sequences])
        if "lssa" in path:
            return answers - 1
        if "ssmax_nope" in path or at_training_length:
            return answers
        return answers - 1

    monkeypatch.setattr(recall, "answer", answer)
    expected = {
        "softmax": [100, 0, 0, 0, 0, 0, 0],
        "softmax:plain_rope": [100, 0, 0, 0, 0, 0, 0],
        "ssmax_nope": [100, 100, 100, 100, 100, 100, 100],
        "hybrid_lssa": [0, None, None, None, None, None, None],
    }
    folder = reproduced("recall", f"--only={','.join(expected)}")
    table = read_table(folder)
    assert table["columns"][-1] == "64x, 4,096"
    for name, means in expected.items():
        assert table["rows"][name]["mean"] == means
    text = (folder / "table.md").read_text()
    chance = "Chance (dashed) is 33.7 at every length: a value in view, without matching its key."
    assert chance in text
    assert "At 16x, by seed: `softmax` 0.0; `softmax:plain_rope` 0.0; `ssmax_nope` 100.0." in text
    assert "Not learned in 6 steps, as a seed has less than 99 at 1x" in text
    assert "at 1x, by seed: `hybrid_lssa` 0.0." in text
    assert {file.name for file in folder.glob("*.png")} == {"recall.png", "recall_by_length.png"}
    assert not_blank(folder / "recall.png")
    assert not_blank(folder / "recall_by_length.png")
