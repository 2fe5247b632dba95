"""Tasks of lm-evaluation-harness, against scores computed one request at a time in float64."""

import errno
import functools
import json
import math
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from data.tokenizer import get_tokenizer
from runtime.files import read_json
from scripts import downstream
from scripts.common.runner import Options, load_run
from tests.helpers import CONFIGS, not_blank, saved_run, small_config, small_model, write_task

lm_eval = pytest.importorskip("lm_eval", reason="pip install -r requirements-eval.txt")

# The training length is 16 tokens, the largest one here 40. Bytes: a token is a letter.
MAX_LENGTH = 40
CASES = ["softmax.py", "lssar_p15.py", "ssmax.py"]
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
    write_task(
        folder, "long", [{"t": "x"}], output_type="loglikelihood", doc_to_text="{{t}}",
        doc_to_target="{{'y' * 41}}", metric_list=[{"metric": "perplexity"}],
    )  # fmt: skip
    group = {
        "group": "both", "task": ["choice", "other"], "metadata": {"version": 1},
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }  # fmt: skip
    (folder / "both.yaml").write_text(json.dumps(group))
    generation(folder, ASKED, max_gen_toks=40, until=["\n"])
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
    """No network and a fresh cache; without what takes the harness long: its own 14,000 tasks, and
    a description of the machine for each result."""
    import datasets
    import lm_eval.evaluator
    import lm_eval.tasks
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        own = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
        patch.setattr(lm_eval.tasks, "TaskManager", own)
        patch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture
def evaluate(call, tasks):
    """Run the script on local tasks; returns the newest measurement of downstream.json."""

    def run(folder, names, *more):
        downstream.load_tasks.cache_clear()  # as the next command is another process
        common = ("--include_path", tasks, "--max_length", MAX_LENGTH, "--device", "cpu")
        call(downstream, folder, "--tasks", names, *common, *more)
        return read_json(folder / "downstream.json")[-1]

    return run


@pytest.fixture
def run(tmp_path):
    return saved_run(tmp_path / "run", small_model("softmax.py").float())


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
    """The greedy continuation, without a cache, as text."""
    ids = list(text.encode())[new - MAX_LENGTH :]
    start, length = len(ids), len(ids) + new
    for _ in range(new):
        ids.append(log_chances(model, ids, length)[len(ids) - 1].argmax().item())
    return bytes(i for i in ids[start:] if i < 256).decode(errors="replace")


@pytest.mark.parametrize("case", CASES)
def test_scores(case, tasks, evaluate, tmp_path):
    model = small_model(case)
    run = saved_run(tmp_path / "run", small_model(case).float())
    answers = [say(model, q, 6) for q in ASKED]
    generation(tasks, [*answers[:3], "wrong", answers[4]], max_gen_toks=6, until=["\0\0"])
    result = evaluate(run, "choice,last,text,gen")
    scores = {name: entry["scores"][name] for name, entry in result["parts"].items()}
    values = {
        (name, metric): score["value"]
        for name in scores
        for metric, score in scores[name]["metrics"].items()
    }

    chances = [[answer(model, doc["q"], " " + c)[0] for c in doc["c"]] for doc in CHOICE]
    per_letter = [
        [x / len(c) for x, c in zip(found, doc["c"], strict=True)]
        for found, doc in zip(chances, CHOICE, strict=True)
    ]
    for metric, by_choice in (("acc", chances), ("acc_norm", per_letter)):
        best = [max(range(3), key=found.__getitem__) for found in by_choice]
        share = sum(i == doc["a"] for i, doc in zip(best, CHOICE, strict=True)) / 6
        assert values["choice", metric] == pytest.approx(share)
        error = math.sqrt(share * (1 - share) / 5)
        assert scores["choice"]["metrics"][metric]["stderr"] == pytest.approx(error)

    splits = [doc["t"].rpartition(" ") for doc in LAST]
    found = [answer(model, context, " " + word) for context, _, word in splits]
    mean = sum(chance for chance, _ in found) / 4
    assert math.log(values["last", "perplexity"]) == pytest.approx(-mean, rel=1e-4)
    assert values["last", "acc"] == sum(greedy for _, greedy in found) / 4

    total = 0.0
    for doc in TEXT:
        done = ""
        for i in range(0, len(doc["t"]), MAX_LENGTH):
            # a window is as long as it can be, and counts what is new in it
            piece = doc["t"][i : i + MAX_LENGTH]
            total += answer(model, done[-(MAX_LENGTH + 1 - len(piece)) :], piece)[0]
            done += piece
    count = sum(len(doc["t"]) for doc in TEXT)
    assert values["text", "bits_per_byte"] == pytest.approx(-total / count / math.log(2), rel=1e-4)

    assert values["gen", "exact_match"] == 0.8
    assert [scores[name]["samples"] for name in scores] == [6, 4, 4, 5]
    assert result["variant"] == model.config.variant_name and result["rope"] == "dynamic_ntk"
    assert result["max_length"] == MAX_LENGTH and result["step"] == 7


def test_batches_are_as_single_requests(run, monkeypatch):
    """Sequences of up to the training length share batches; longer ones are read alone."""
    opened = load_run(run, Options(device="cpu"))
    model = downstream.harness_model(opened, MAX_LENGTH)
    generator = torch.Generator().manual_seed(0)
    requests = []
    for size in [3, 3, 7, 12, 15, 16, 17, 17, 17, 24, 39, 40, 60, 5, 5]:
        ids, more = torch.randint(257, (2, size), generator=generator).tolist()
        cut = max(1, size - 1 - len(requests) % 4)
        requests += [(None, ids[:cut], ids[cut:]), (None, more, [7]), (None, more, [9])]
    shapes, forward = [], opened.model.trunk.forward
    monkeypatch.setattr(
        opened.model.trunk, "forward", lambda x, *a: shapes.append(x.shape[:2]) or forward(x, *a)
    )
    together = model._loglikelihood_tokens(requests)
    assert {size for size, length in shapes if length > 16} == {1}
    assert sum(length <= 16 for _, length in shapes) == 1
    for request, (value, greedy) in zip(requests, together, strict=True):
        alone, same = model._loglikelihood_tokens([request])[0]
        assert value == pytest.approx(alone, rel=1e-4, abs=1e-4) and greedy == same


def test_a_tokenizer_file_adds_nothing_to_a_text(words_file, run):
    model = small_model(f"softmax.py --tokenizer={words_file}")
    saved_run(run, model.float())
    harness = downstream.harness_model(load_run(run, Options(device="cpu")), MAX_LENGTH)
    text = "the cat sat on the cat the cat"
    assert harness.tok_encode(text) == get_tokenizer(str(words_file)).encode(text)
    assert harness.eot_token_id == 6


def test_a_measurement_is_made_once(evaluate, tasks, run, monkeypatch, capsys):
    asked, simple_evaluate = [], lm_eval.simple_evaluate

    def counted(*arguments, tasks, **more):
        asked.extend(getattr(task, "task_name", "") for task in tasks)
        return simple_evaluate(*arguments, tasks=tasks, **more)

    monkeypatch.setattr(lm_eval, "simple_evaluate", counted)
    first = evaluate(run, "choice,last")
    capsys.readouterr()
    assert evaluate(run, "last") == first and asked == ["choice", "last"]
    printed = capsys.readouterr().out
    assert "perplexity" in printed and "choice" not in printed
    for change in (["--rope", "none"], ["--limit", "2"], ["--max_length", "30"]):
        asked.clear()
        changed = evaluate(run, "last", *change)
        assert asked == ["last"] and list(changed["parts"]) == ["last"]
    data = tasks / "other.jsonl"
    data.write_text(data.read_text().replace("the cat", "the dog"))
    evaluate(run, "last")
    assert asked == ["last"] * 2
    assert read_json(run / "downstream.json")[0] == first  # nothing is dropped


def test_a_measurement_of_other_weights_is_not_taken(evaluate, run, tmp_path):
    model = small_model("softmax.py").float()
    with torch.no_grad():
        model.wte.weight.mul_(-1)
    other = saved_run(tmp_path / "other", model)
    first = evaluate(other, "last")
    (run / "downstream.json").write_text((other / "downstream.json").read_text())
    second = evaluate(run, "last")
    assert read_json(run / "downstream.json") == [first, second]
    assert second["parts"] != first["parts"] and second["sha256"] != first["sha256"]


@pytest.mark.parametrize("name", ["gen", "long"])
def test_what_was_measured_stays(evaluate, tasks, run, name, capsys):
    """A task that does not fit ends the command, after the tasks before it were saved."""
    generation(tasks, ASKED, max_gen_toks=40, until=["\n"])
    with pytest.raises(SystemExit) as stop:
        evaluate(run, f"choice,{name}", "--limit", "1")
    error = capsys.readouterr().err
    assert stop.value.code == 2 and f"task {name} cannot be evaluated: " in error
    assert "over 40 tokens" in error or "must be less than model's maximum" in error
    (result,) = read_json(run / "downstream.json")
    assert list(result["parts"]) == ["choice"] and result["limit"] == 1


def test_several_runs_in_one_table_and_picture(call, tasks, evaluate, tmp_path, capsys):
    names = ["softmax", "lssar_p15"]
    runs = [saved_run(tmp_path / n, small_model(f"{n}.py").float()) for n in names]
    alone = [evaluate(run, "choice,last") for run in runs]
    assert all(not_blank(run / "downstream.png") for run in runs)
    capsys.readouterr()
    common = ("--include_path", tasks, "--max_length", MAX_LENGTH, "--device", "cpu")
    call(downstream, *runs, "--tasks", "choice,last", *common)
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name, result in zip(names, alone, strict=True):
        for task, metric in (("choice", "acc_norm"), ("last", "acc")):
            value = result["parts"][task]["scores"][task]["metrics"][metric]["value"]
            assert [task, metric, name, f"{100 * value:.2f}"] in [line[:4] for line in table]
    assert not_blank(tmp_path / "downstream_by_run_softmax_lssar_p15.png")


def test_a_group_has_its_own_score(evaluate, run, capsys):
    scores = evaluate(run, "both")["parts"]["both"]["scores"]
    parts = [
        scores[name]["metrics"]["acc"]["value"] * n for name, n in (("choice", 6), ("other", 2))
    ]
    assert scores["both"]["metrics"]["acc"]["value"] == pytest.approx(sum(parts) / 8)
    assert scores["both"]["samples"] == 8
    printed = capsys.readouterr().out
    assert "both" in printed and "choice" not in printed.split("samples")[1]


ARC = str(Path(lm_eval.__file__).parent / "tasks/arc")


@pytest.mark.parametrize(
    "names, more, message",
    [
        ("choise", (), "no task 'choise'; did you mean choice?"),
        ("choice", ("--include_path", "nowhere"), "nowhere: no such folder"),
        ("choice", ("--limit", "0"), "--limit 0 must be at least 1"),
        ("choice", ("--checkpoint", "best"), "no checkpoint in it (best)"),
        ("arc_easy", ("--include_path", ARC), "needs the data in HF_HOME, and HF_HUB_OFFLINE=1"),
    ],
)
def test_refuses(evaluate, run, capsys, names, more, message):
    with pytest.raises(SystemExit) as stop:
        evaluate(run, names, *more)
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not (run / "downstream.json").exists()


def test_what_cannot_be_done_is_said_before_work(evaluate, run, monkeypatch, capsys):
    def denied(dir):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", denied)
        with pytest.raises(SystemExit):
            evaluate(run, "choice")
    assert f"{run}: no file can be written there: Permission" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(SystemExit):
        evaluate(run, "choice")
    assert "pip install -r requirements-eval.txt" in capsys.readouterr().err


def test_learned_positions_are_not_exceeded():
    config = small_config("softmax.py --positions=learned")
    evaluation = downstream.Downstream()
    assert evaluation.facts(small_config("softmax.py"))["max_length"] == 32
    assert evaluation.facts(config)["max_length"] == 16
    with pytest.raises(ValueError, match="a length of 17 is beyond its learned positions"):
        downstream.Downstream(max_length=17).facts(config)


def test_no_module_here_hides_one_that_a_library_imports():
    """SummScreen, a task of the paper, imports Hugging Face's `evaluate`; transformers, kernels."""
    assert not {path.stem for path in CONFIGS.parent.iterdir()} & {"evaluate", "kernels"}


def test_shares_are_percentages(capsys):
    metrics = {
        "acc": {"value": 0.5, "stderr": 0.011},
        "perplexity": {"value": 7.0, "stderr": None},
    }
    scores = {"piqa": {"samples": 1838, "num_fewshot": 0, "metrics": metrics}}
    facts = {"step": 1, "rope": "none", "max_length": 2048, "lm_eval": "0"}
    result = facts | {"parts": {"piqa": {"scores": scores}}}
    (figure,) = downstream.show(None, [("one", result), ("two", result)]).values()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[-4:]]
    assert lines[0] == ["piqa", "acc", "one", "50.00", "1.10", "1838"]
    assert lines[2] == ["piqa", "perplexity", "one", "7.00", "1838"]
    (axes,) = figure.axes
    assert [line.get_xdata().tolist() for line in axes.lines] == [[50], [50]]
