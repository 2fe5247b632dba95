"""Tasks of lm-evaluation-harness, against scores computed one request at a time in float64."""

import errno
import functools
import importlib
import json
import math
import tempfile

import matplotlib.image
import pytest
import torch

from config import load_config
from errors import UserError
from runtime.files import read_json
from scripts import downstream
from tests.helpers import CONFIGS, saved_run, small_config, small_model, write_task

pytest.importorskip("lm_eval", reason="pip install -r requirements-dev.txt has lm_eval")

# The training length is 16 tokens, the largest one here 40. Bytes: a token is a letter.
MAX_LENGTH = 40
CASES = [
    "softmax.py",
    "lssar_p15.py",
    "relu_wortsman.py",
    "sigmoid.py",
    "ssmax.py",
]
CHOICE = [
    {"q": "the cat", "c": ["x", "y", "z"], "a": 1},
    {"q": "a longer question of some length", "c": ["no", "yes, it is", "maybe"], "a": 0},
    {"q": "one, two, three", "c": ["four", "five", "s"], "a": 2},
    {"q": "mid size", "c": ["abcdefgh", "ab", "abcd"], "a": 0},
    {"q": "q", "c": ["1", "2", "3"], "a": 2},
    {"q": "beyond all that can be read at once, here", "c": ["left", "right", "up"], "a": 1},
]
LAST = [{"t": "a b"}, {"t": "some words and the last"}, {"t": "x " * 30 + "end"}, {"t": "the cat"}]
TEXT = [{"t": "short"}, {"t": "a text of several windows, " * 5}, {"t": "y" * 40}, {"t": "z" * 41}]
ASKED = ["say", "say it again and again and again, and once more", "yes", "no?", "a bc d"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of tasks, one of each kind of the harness, and a group of two."""
    folder = tmp_path_factory.mktemp("tasks")
    mean = [
        {"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")
    ]
    choice = {
        "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{c}}",
        "doc_to_target": "a", "metric_list": mean,
    }  # fmt: skip
    write_task(folder, "choice", CHOICE, **choice)
    write_task(folder, "other", CHOICE[:2], **choice)
    write_task(
        folder, "last", LAST, output_type="loglikelihood",
        doc_to_text="{{t.split(' ')[:-1]|join(' ')}}", doc_to_target="{{' ' + t.split(' ')[-1]}}",
        metric_list=[{"metric": "perplexity"}, mean[0]],
    )  # fmt: skip
    write_task(
        folder, "text", TEXT, output_type="loglikelihood_rolling", doc_to_text="",
        doc_to_target="{{t}}", metric_list=[{"metric": "bits_per_byte"}],
    )  # fmt: skip
    group = {
        "group": "both", "task": ["choice", "other"], "metadata": {"version": 1},
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }  # fmt: skip
    (folder / "both.yaml").write_text(json.dumps(group))
    return folder


def generation(folder, gold, **options):
    """Write the task `gen`: is the answer to ASKED the gold one?"""
    docs = [{"q": q, "a": a} for q, a in zip(ASKED, gold, strict=True)]
    metric = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    write_task(
        folder, "gen", docs, output_type="generate_until", doc_to_text="{{q}}",
        doc_to_target="{{a}}", generation_kwargs=options, metric_list=[metric],
    )  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def harness(tmp_path_factory):
    """No network, data sets cached in a folder, and what takes the harness long done once, or not
    at all: the list of its tasks, and a description of the machine for each result."""
    import datasets
    import lm_eval.evaluator
    import lm_eval.tasks
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_eval.tasks, "TaskManager", functools.cache(lm_eval.tasks.TaskManager))
        patch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture
def evaluate(call, tasks):
    """Run the script on local tasks; returns the newest measurement of downstream.json."""

    forget = downstream.load_tasks.cache_clear

    def run(folder, names, *more):
        forget()  # as the next command is another process
        common = ("--include_path", tasks, "--max_length", MAX_LENGTH, "--device", "cpu")
        call(downstream, folder, "--tasks", names, *common, *more)
        return read_json(folder / "downstream.json")[-1]

    return run


def log_chances(model, ids, length=None):
    """Log-probabilities [L, 257] after ids, RoPE's base grown by hand as dynamic NTK does it."""
    length, d = length or len(ids), model.config.n_embd // model.config.n_head
    grown = max(1, length / model.config.block_size) ** (d / (d - 2))
    model.scale_rope("none", theta=10000 * grown)
    return model(torch.tensor([ids]))[0].detach().log_softmax(-1)


def answer(model, context, continuation):
    """Log-probability of a continuation, and whether each token is the likeliest."""
    whole = list((context or "\0").encode()) + list(continuation.encode())
    if not context:
        whole[0] = 256
    whole, n = whole[-MAX_LENGTH - 1 :], len(continuation.encode())
    chances = log_chances(model, whole[:-1])[-n:]
    return chances[range(n), whole[-n:]].sum().item(), chances.argmax(-1).tolist() == whole[-n:]


def say(model, text, new):
    """The greedy continuation, without a cache, as ids."""
    ids = list(text.encode())[new - MAX_LENGTH :]
    start, length = len(ids), len(ids) + new
    for _ in range(new):
        ids.append(log_chances(model, ids, length)[len(ids) - 1].argmax().item())
    return ids[start:]


@pytest.mark.parametrize("case", CASES)
def test_scores(case, tasks, evaluate, tmp_path):
    model = small_model(case)
    run = saved_run(tmp_path / "run", small_model(case).float())
    answers = [
        bytes(i for i in say(model, q, 6) if i < 256).decode(errors="replace") for q in ASKED
    ]
    gold = [*answers[:3], "wrong", answers[4]]
    generation(tasks, gold, max_gen_toks=6, until=["\0\0"])
    result = evaluate(run, "choice,last,text,gen")
    scores = {name: entry["scores"][name] for name, entry in result["parts"].items()}
    values = {
        (name, metric): score["value"]
        for name in scores
        for metric, score in scores[name]["metrics"].items()
    }

    chances = [[answer(model, doc["q"], " " + c)[0] for c in doc["c"]] for doc in CHOICE]
    best = [max(range(3), key=row.__getitem__) for row in chances]
    right = [i == doc["a"] for i, doc in zip(best, CHOICE, strict=True)]
    assert values["choice", "acc"] == pytest.approx(sum(right) / 6)
    per_letter = [
        max(range(3), key=lambda i, row=row, doc=doc: row[i] / len(doc["c"][i]))
        for row, doc in zip(chances, CHOICE, strict=True)
    ]
    right = [i == doc["a"] for i, doc in zip(per_letter, CHOICE, strict=True)]
    assert values["choice", "acc_norm"] == pytest.approx(sum(right) / 6)
    share = sum(right) / 6
    error = math.sqrt(share * (1 - share) / 5)
    assert scores["choice"]["metrics"]["acc_norm"]["stderr"] == pytest.approx(error)

    splits = [doc["t"].rpartition(" ") for doc in LAST]
    found = [answer(model, context, " " + word) for context, _, word in splits]
    mean = sum(chance for chance, _ in found) / 4
    assert math.log(values["last", "perplexity"]) == pytest.approx(-mean, rel=1e-4)
    assert values["last", "acc"] == sum(greedy for _, greedy in found) / 4

    total = 0.0
    for doc in TEXT:
        pieces = [doc["t"][i : i + MAX_LENGTH] for i in range(0, len(doc["t"]), MAX_LENGTH)]
        done = ""
        for piece in pieces:  # a window is as long as it can be, and counts what is new in it
            before = done[-(MAX_LENGTH + 1 - len(piece)) :]
            total += answer(model, before, piece)[0]
            done += piece
    count = sum(len(doc["t"]) for doc in TEXT)
    assert values["text", "bits_per_byte"] == pytest.approx(-total / count / math.log(2), rel=1e-4)

    assert values["gen", "exact_match"] == 0.8
    assert [scores[name]["samples"] for name in scores] == [6, 4, 4, 5]
    assert result["variant"] == model.config.variant_name and result["rope"] == "dynamic_ntk"
    assert result["max_length"] == MAX_LENGTH and result["step"] == 7


@pytest.mark.parametrize("case", CASES)
def test_batches_are_as_single_requests(case, tmp_path, monkeypatch):
    run = opened(case, tmp_path)
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for size in [3, 3, 7, 12, 15, 16, 17, 17, 17, 24, 39, 40, 60, 5, 5]:
        ids = torch.randint(257, (size,), generator=generator).tolist()
        cut = max(1, size - 1 - len(pairs) % 4)
        pairs += [(ids[:cut], ids[cut:]), (ids[:-1], [7]), (ids[:-1], [9])]
    sizes = []
    forward = run.model.trunk.forward
    monkeypatch.setattr(
        run.model.trunk, "forward", lambda x, *more: sizes.append(x.shape[:2]) or forward(x, *more)
    )
    together = downstream.loglikelihoods(run, pairs, MAX_LENGTH)
    batched = list(sizes)
    monkeypatch.setattr(downstream, "BATCH_TOKENS", 1)
    apart = [downstream.loglikelihoods(run, [pair], MAX_LENGTH)[0] for pair in pairs]
    for (a, greedy), (b, alone) in zip(together, apart, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-4) and greedy == alone
    # requests that read the same are read once, and short ones go together
    assert len(sizes) - len(batched) == len(pairs)
    assert sum(rows for rows, _ in batched) < len(pairs)
    assert len(batched) == 5


@pytest.mark.parametrize("case", CASES)
def test_greedy_means_every_token(case, tmp_path):
    model, run = small_model(case), opened(case, tmp_path)
    ids = list(b"words")

    def likeliest(ids, length):
        return log_chances(model, ids, length)[len(ids) - 1].argmax().item()

    first = likeliest(ids, 6)
    pairs = []
    for token in (first, first ^ 1):
        second = likeliest([*ids, token], 6)
        pairs += [(ids, [token, second]), (ids, [token, second ^ 1])]
    found = downstream.loglikelihoods(run, pairs, MAX_LENGTH)
    assert [greedy for _, greedy in found] == [True, False, False, False]


def opened(case, tmp_path):
    """A run, opened as the script does it."""
    import argparse

    from scripts.common.runs import RunOptions, add_options, open_run

    parser = argparse.ArgumentParser()
    add_options(parser)
    run = saved_run(tmp_path / "run", small_model(case).float())
    return open_run(run, RunOptions.parse(parser.parse_args(["--device=cpu"])))


def test_generation_stops(tmp_path):
    model = small_model("lssar_p15.py")
    run = opened("lssar_p15.py", tmp_path)
    ids = say(model, "the cat", 20)
    text = bytes(i for i in ids if i < 256).decode(errors="replace")
    prompt = list(b"the cat")
    calls = []
    forward = run.model.trunk.forward
    run.model.trunk.forward = lambda x, *more: calls.append(x) or forward(x, *more)
    stop = text[4:6]
    asked = [(prompt, 20, (stop,)), (prompt, 20, ()), (prompt, 20, ("", "never", stop))]
    assert downstream.continuations(run, asked) == [
        text[: text.index(stop)],
        text,
        text[: text.index(stop)],
    ]
    # 20 tokens where nothing stops it; the others end with the stop string
    needed = len(text[: text.index(stop)] + stop)
    assert len(calls) == 20 + 2 * needed


def test_end_of_text_ends_generation(tmp_path, monkeypatch):
    run = opened("softmax.py", tmp_path)
    made = [104, 105, 256, 33]

    def generate(model, idx, new, temperature, stop):
        for number in range(1, new + 1):
            out = torch.cat((idx, torch.tensor([made[:number]] * len(idx))), dim=1)
            if stop(out):
                break
        return out

    monkeypatch.setattr(downstream, "generate", generate)
    assert downstream.continuations(run, [([1, 2], 4, ()), ([3], 2, ())]) == ["hi", "hi"]


def test_measured_once(evaluate, tasks, tmp_path, monkeypatch, capsys):
    run = saved_run(tmp_path / "run", small_model("softmax.py").float())
    first = evaluate(run, "choice,last")
    monkeypatch.setattr(downstream, "loglikelihoods", None)
    capsys.readouterr()
    assert evaluate(run, "last") == first  # and nothing is dropped
    printed = capsys.readouterr().out
    assert "perplexity" in printed and "choice" not in printed
    for change in (["--rope", "none"], ["--limit", "2"], ["--max_length", "30"]):
        with pytest.raises(TypeError):
            evaluate(run, "last", *change)
    data = (tasks / "other.jsonl").read_text()
    monkeypatch.undo()
    evaluate(run, "other")
    monkeypatch.setattr(downstream, "loglikelihoods", None)
    evaluate(run, "other")
    (tasks / "other.jsonl").write_text(data.replace("the cat", "the dog"))
    with pytest.raises(TypeError):
        evaluate(run, "other")
    (tasks / "other.jsonl").write_text(data)


def test_a_measurement_of_other_weights_is_not_taken(evaluate, tmp_path):
    """Another run's results, where the two differ in their weights only."""
    other, run = (tmp_path / name for name in ("other", "run"))
    model = small_model("softmax.py").float()
    saved_run(other, model)
    with torch.no_grad():
        model.wte.weight.mul_(-1)
    saved_run(run, model)
    first = evaluate(other, "choice,last")
    (run / "downstream.json").write_text((other / "downstream.json").read_text())
    second = evaluate(run, "choice,last")
    assert read_json(run / "downstream.json") == [first, second]
    assert second["parts"] != first["parts"] and second["sha256"] != first["sha256"]


def test_a_quick_try_deletes_no_measurement(evaluate, tmp_path, capsys):
    run = saved_run(tmp_path / "run", small_model("softmax.py").float())
    full = evaluate(run, "choice,last")
    tried = evaluate(run, "choice", "--limit", "1")
    assert tried["limit"] == 1 and tried["parts"]["choice"]["scores"]["choice"]["samples"] == 1
    assert read_json(run / "downstream.json") == [full, tried]
    (run / "downstream.json").write_text(json.dumps(full))
    with pytest.raises(SystemExit) as stop:
        evaluate(run, "choice")
    assert stop.value.code == 2 and "no list of measurements" in capsys.readouterr().err
    assert read_json(run / "downstream.json") == full


def test_several_runs_in_one_table_and_picture(call, tasks, evaluate, tmp_path, capsys):
    names = ["softmax", "lssar_p15"]
    runs = [saved_run(tmp_path / n, small_model(f"{n}.py").float()) for n in names]
    alone = [evaluate(run, "choice,last") for run in runs]
    for run in runs:
        assert matplotlib.image.imread(run / "downstream.png").std() > 0
        (run / "downstream.json").unlink()
    capsys.readouterr()
    common = ("--include_path", tasks, "--max_length", MAX_LENGTH, "--device", "cpu")
    call(downstream, *runs, "--tasks", "choice,last", *common)
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    for run, name, result in zip(runs, names, alone, strict=True):
        (together,) = read_json(run / "downstream.json")
        assert together["parts"] == result["parts"]
        for task, metric in (("choice", "acc_norm"), ("last", "acc")):
            value = result["parts"][task]["scores"][task]["metrics"][metric]["value"]
            assert [task, metric, name, f"{100 * value:.2f}"] in [line[:4] for line in table]
    assert matplotlib.image.imread(tmp_path / "downstream_by_run_softmax_lssar_p15.png").std() > 0


def test_a_task_without_a_share_of_right_answers_is_not_drawn(evaluate, tmp_path, capsys):
    run = saved_run(tmp_path / "run", small_model("softmax.py").float())
    evaluate(run, "text")
    assert "bits_per_byte" in capsys.readouterr().out
    assert not (run / "downstream.png").exists()


def test_what_cannot_be_written_is_not_measured(evaluate, tmp_path, monkeypatch, capsys):
    def denied(dir):
        raise PermissionError(errno.EACCES, "Permission denied")

    run = saved_run(tmp_path / "run", small_model("softmax.py").float())
    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    monkeypatch.setattr(downstream, "load_tasks", None)
    with pytest.raises(SystemExit) as stop:
        evaluate(run, "choice")
    error = f"{run}: no file can be written there: Permission denied"
    assert stop.value.code == 2 and error in capsys.readouterr().err


def test_what_was_done_stays(evaluate, tasks, tmp_path, capsys):
    """A task that the run cannot do ends the command, after the tasks before it were saved."""
    write_task(
        tasks, "long", [{"t": "x"}], output_type="loglikelihood", doc_to_text="{{t}}",
        doc_to_target="{{'y' * 41}}", metric_list=[{"metric": "perplexity"}],
    )  # fmt: skip
    run = saved_run(tmp_path / "run", small_model("softmax.py").float())
    refused = {
        "leaves none for its prompt": {"max_gen_toks": 40},
        "asks for sampling": {"max_gen_toks": 4, "do_sample": True, "temperature": 1.0},
    }
    for message, options in refused.items():
        generation(tasks, ASKED, until=["\n"], **options)
        with pytest.raises(SystemExit) as stop:
            evaluate(run, "choice,gen", "--limit", "1")
        assert stop.value.code == 2 and message in capsys.readouterr().err
        (result,) = read_json(run / "downstream.json")
        assert list(result["parts"]) == ["choice"]
    with pytest.raises(SystemExit):
        evaluate(run, "long")
    assert "41 tokens, more than --max_length 40" in capsys.readouterr().err


def test_the_harness_lists_the_tasks_that_are_asked_for(tasks):
    """With all that a group refers to; all 14,000 only for what no file of its own defines."""
    import lm_eval.tasks

    everything = lm_eval.tasks.TaskManager(include_path=()).task_index
    for names in (("arc_easy", "piqa"), ("mmlu",), ("openllm",), ("ai2_arc",)):
        found = downstream.open_manager(names, None).task_index
        assert (len(found) < 1000) == (names[0] in ("arc_easy", "mmlu"))
        for name in names:
            assert found[name].yaml_path == everything[name].yaml_path
    own = downstream.open_manager(("choice", "piqa"), str(tasks)).task_index
    assert str(own["choice"].yaml_path).startswith(str(tasks)) and "piqa" in own
    write_task(tasks, "sciq", [{"t": "x"}], output_type="loglikelihood")
    shadowed = downstream.open_manager(("sciq",), str(tasks)).task_index["sciq"]
    assert str(shadowed.yaml_path).startswith(str(tasks))


def test_group(evaluate, tmp_path, capsys):
    run = saved_run(tmp_path / "run", small_model("lssar_p15.py").float())
    scores = evaluate(run, "both")["parts"]["both"]["scores"]
    parts = [
        scores[name]["metrics"]["acc"]["value"] * n for name, n in (("choice", 6), ("other", 2))
    ]
    assert scores["both"]["metrics"]["acc"]["value"] == pytest.approx(sum(parts) / 8)
    assert scores["both"]["samples"] == 8
    printed = capsys.readouterr().out
    assert "both" in printed and "choice" not in printed.split("samples")[1]


@pytest.mark.parametrize(
    "names, more, message",
    [
        ("choise", (), "no task 'choise'; did you mean choice?"),
        ("choice", ("--include_path", "nowhere"), "nowhere: no such folder"),
        ("choice", ("--limit", "0"), "--limit 0 must be at least 1"),
        ("choice", ("--max_length", "0"), "--max_length 0 must be at least 1"),
        ("choice", ("--checkpoint", "best"), "no checkpoint in it (best)"),
    ],
)
def test_refuses(evaluate, tmp_path, capsys, names, more, message):
    run = saved_run(tmp_path / "run", small_model("softmax.py").float())
    with pytest.raises(SystemExit) as stop:
        evaluate(run, names, *more)
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not (run / "downstream.json").exists()


def test_learned_positions_are_not_exceeded(monkeypatch):
    monkeypatch.setattr(downstream, "count_samples", lambda *arguments: 1)
    config = small_config("softmax.py --positions=learned")
    request = downstream.TaskRequest()
    assert request.max_length_of(small_config("softmax.py")) == 32
    assert request.max_length_of(config) == 16
    request.check(config)
    with pytest.raises(UserError, match="a length of 17 is beyond its learned positions"):
        downstream.TaskRequest(max_length=17).check(config)


def test_no_module_here_hides_one_that_a_task_of_the_paper_imports():
    """SummScreen's imports Hugging Face's `evaluate`."""
    task = importlib.import_module("lm_eval.tasks.scrolls.task")
    assert task.load.__module__.startswith("evaluate.")


def test_no_network_is_said_before_the_model_is_loaded(evaluate, tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    run = saved_run(tmp_path / "run", small_model("softmax.py").float())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    monkeypatch.setattr(downstream, "open_run", None)
    with pytest.raises(SystemExit) as stop:
        evaluate(run, "paper")
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert "error: task arc_easy: its data are not on this machine" in error
    assert "Retry" not in error


def test_a_missing_harness_is_said(evaluate, tmp_path, monkeypatch, capsys):
    import sys

    run = saved_run(tmp_path / "run", small_model("softmax.py").float())
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit) as stop:
        evaluate(run, "choice")
    assert stop.value.code == 2 and "pip install -r requirements-dev.txt" in capsys.readouterr().err


def test_the_papers_numbers_stand_beside_its_own_models(monkeypatch, capsys):
    def row(*arguments):
        return downstream.paper_row(
            load_config([str(CONFIGS / a) if a.endswith("py") else a for a in arguments])
        )

    assert row("softmax.py") == "softmax 124m"
    assert row("lssar_p15.py", "scales/355m.py") == "lssar_p15 355m"
    assert row("lssa.py") is row("softmax.py", "--n_layer=2") is None
    assert row("softmax.py", "--data_dir=data/text_bytes") is None
    metrics = {"acc": {"value": 0.1, "stderr": 0.2}, "acc_norm": {"value": 0.5, "stderr": 0.011}}
    scores = {"piqa": {"samples": 1838, "num_fewshot": 0, "metrics": metrics}}
    facts = {"variant": "lssar_p15", "step": 1, "rope": "none", "max_length": 2048, "lm_eval": "0"}
    tables = {"paper": row("lssar_p15.py"), "parts": {"piqa": {"scores": scores}}}
    other = {"paper": None, "parts": tables["parts"]}
    results = [facts | tables, facts | other]
    downstream.print_scores(["one", "two"], results)
    ours, others = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    assert ours == ["piqa", "acc_norm", "one", "50.00", "1.10", "1838", "65.34"]  # LSSAR Table 2
    assert others == ["piqa", "acc_norm", "two", "50.00", "1.10", "1838"]
    (axes,) = downstream.plot(["one", "two"], results).axes
    assert [bar.get_width() for bar in axes.patches] == [50, 50]
    (mark,) = axes.collections[-1].get_segments()
    first = axes.patches[0]
    assert mark[:, 0].tolist() == [65.34] * 2  # and across the bar of its own run
    assert mark[:, 1] == pytest.approx([first.get_y(), first.get_y() + first.get_height()])
