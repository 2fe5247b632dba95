"""Tasks of lm-evaluation-harness, against scores computed one request at a time in float64."""

import functools
import json
import math
import re
from pathlib import Path

import pytest
import torch

from data.tokenizer import get_tokenizer
from generation import generate
from runtime.files import read_json
from scripts import downstream
from scripts.common.options import Options
from scripts.common.runs import load_run
from scripts.export_hf import transformers_model, transformers_tokenizer
from scripts.reproduce import kinds
from tests.helpers import saved_run, small_model, write_task

lm_eval = pytest.importorskip("lm_eval", reason="pip install -r requirements-eval.txt")

# The training length is 16 tokens, the largest one here 40. Bytes: a token is a letter.
MAX_LENGTH = 40
CHOICE = [
    {"q": "the cat", "c": ["x", "y", "z"], "a": 1},
    {"q": "a longer question of some length", "c": ["no", "yes, it is", "maybe"], "a": 0},
    {"q": "one, two, three", "c": ["four", "five", "s"], "a": 2},
    {"q": "q", "c": ["abcdefgh", "ab", "abcd"], "a": 1},
    {"q": "beyond all that can be read at once, here", "c": ["left", "right", "up"], "a": 1},
]
ARC = Path(lm_eval.__file__).parent / "tasks/arc"
LAST = [{"t": "a b"}, {"t": "some words and the last"}, {"t": "x " * 30 + "end"}, {"t": "alone"}]
ASKED = ["say", "say it again and again and again, and once more", "yes", "no?", "a bc d"]


def metrics(*names):
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of tasks: `choice`, `last`, and later `gen`."""
    folder = tmp_path_factory.mktemp("tasks")
    write_task(
        folder,
        "choice",
        CHOICE,
        output_type="multiple_choice",
        doc_to_text="{{q}}",
        doc_to_choice="{{c}}",
        doc_to_target="a",
        metric_list=metrics("acc", "acc_norm"),
    )
    write_task(
        folder,
        "last",
        LAST,
        output_type="loglikelihood",
        doc_to_text="{{t.split(' ')[:-1]|join(' ')}}",
        doc_to_target="{{' ' + t.split(' ')[-1]}}",
        metric_list=[{"metric": "perplexity"}, *metrics("acc")],
    )
    return folder


def generation(folder, gold, **options):
    """Write the task `gen`: is the answer to ASKED the gold one?"""
    write_task(
        folder,
        "gen",
        [{"q": q, "a": a} for q, a in zip(ASKED, gold, strict=True)],
        output_type="generate_until",
        doc_to_text="{{q}}",
        doc_to_target="{{a}}",
        generation_kwargs=options,
        metric_list=metrics("exact_match"),
    )


@pytest.fixture(autouse=True, scope="module")
def harness(tmp_path_factory, tasks):
    """Local tasks and ARC's, no network and a fresh cache; without what takes the harness long: its
    own 14,000 tasks, and a description of the machine for each result."""
    import datasets
    import lm_eval.evaluator
    import lm_eval.tasks
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        local = functools.partial(
            lm_eval.tasks.TaskManager, include_defaults=False, include_path=[tasks, ARC]
        )
        patch.setattr(lm_eval.tasks, "TaskManager", local)
        patch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture
def evaluate(call):
    """Run the script on local tasks; returns the newest measurement of the first run."""

    def run(folder, names, *arguments):
        downstream.load_tasks.cache_clear()  # as the next command is another process
        common = (f"--tasks={names}", f"--max_length={MAX_LENGTH}", "--device=cpu")
        call(downstream, *common, folder, *arguments)
        return read_json(folder / "downstream.json")[-1]

    return run


@pytest.fixture
def run(tmp_path):
    return saved_run(tmp_path / "run", small_model("softmax.py").float())


def log_probabilities(model, ids):
    """Log-probabilities [L, 257] after ids, RoPE's base grown by hand as dynamic NTK does it."""
    d = model.config.d_head
    factor = max(1, len(ids) / model.config.block_size)
    model.scale_rope("none", theta=10000 * factor ** (d / (d - 2)))
    return model(torch.tensor([ids]))[0].detach().log_softmax(-1)


def score(model, context, continuation):
    """Log-probability of a continuation, and whether each token is the likeliest."""
    answer = list(continuation.encode())
    prompt = list(context.encode()) or [256]  # end-of-text
    ids = (prompt + answer)[-MAX_LENGTH - 1 :]
    n = len(answer)
    predicted = log_probabilities(model, ids[:-1])[-n:]
    return predicted[range(n), answer].sum().item(), predicted.argmax(-1).tolist() == answer


def greedy_text(model, text, new):
    """The greedy continuation of `new` tokens, as text."""
    ids = torch.tensor([list(text.encode())[new - MAX_LENGTH :]])
    model.scale_rope("dynamic_ntk")
    continued = generate(model, ids, new, temperature=0)[0, ids.shape[1] :]
    return bytes(i for i in continued.tolist() if i < 256).decode(errors="replace")


def share_of_right_choices(model, by_letter):
    """How many of the likeliest choices are right, the likelihood being divided by the length."""
    right = 0
    for doc in CHOICE:
        likelihoods = []
        for choice in doc["c"]:
            likelihood, _ = score(model, doc["q"], f" {choice}")
            likelihoods.append(likelihood / len(choice) if by_letter else likelihood)
        right += likelihoods.index(max(likelihoods)) == doc["a"]
    return right / len(CHOICE)


def test_scores(tasks, evaluate, tmp_path):
    model = small_model("lssar_p15.py")
    run = saved_run(tmp_path / "run", small_model("lssar_p15.py").float())
    gold = [greedy_text(model, question, 6) for question in ASKED]
    gold[3] = "wrong"
    generation(tasks, gold, max_gen_toks=6, until=["\0\0"])
    result = evaluate(run, "choice,last,gen")
    assert result["rope"] == "dynamic_ntk"
    assert result["max_length"] == MAX_LENGTH
    scores = {name: part["results"][name] for name, part in result["parts"].items()}
    assert {name: score["sample_len"] for name, score in scores.items()} == {
        "choice": 5,
        "last": 4,
        "gen": 5,
    }

    choice = scores["choice"]
    accuracy = share_of_right_choices(model, False)
    normalised = share_of_right_choices(model, True)
    assert accuracy != normalised
    assert choice["acc,none"] == pytest.approx(accuracy)
    assert choice["acc_norm,none"] == pytest.approx(normalised)

    last = scores["last"]
    likelihoods = []
    likeliest = []
    for doc in LAST:
        context, _, word = doc["t"].rpartition(" ")
        likelihood, is_likeliest = score(model, context, f" {word}")
        likelihoods.append(likelihood)
        likeliest.append(is_likeliest)
    mean = sum(likelihoods) / 4
    assert math.log(last["perplexity,none"]) == pytest.approx(-mean, rel=1e-4)
    assert last["acc,none"] == sum(likeliest) / 4

    assert scores["gen"]["exact_match,none"] == 0.8

    table = kinds.downstream("", {"columns": ["choice acc_norm", "last perplexity"]})
    assert table.values(result) == [100 * choice["acc_norm,none"], last["perplexity,none"]]


def test_a_tokenizer_file_adds_nothing_to_a_text(words_file, run):
    model = small_model(f"softmax.py --tokenizer={words_file}")
    saved_run(run, model.float())
    harness = downstream.harness_model(load_run(run, Options(device="cpu")), MAX_LENGTH)
    text = "the cat sat on the cat the cat"
    assert harness.tok_encode(text) == get_tokenizer(str(words_file)).encode(text)
    assert harness.eot_token_id == 6


def test_sequences_of_up_to_the_training_length_share_batches(run):
    loaded = load_run(run, Options(device="cpu"))
    assert downstream.harness_model(loaded, 16).batch_size == downstream.BATCH_TOKENS // 16
    assert downstream.harness_model(loaded, 17).batch_size == 1


def test_a_batch_has_the_scores_of_each_request_alone(tasks, tmp_path):
    """In the harness's own model of an exported run; beyond the training length in generation."""
    from lm_eval.models.huggingface import HFLM

    run = saved_run(tmp_path / "run", small_model("lssar_p15.py").float())
    run = load_run(run, Options(device="cpu"))
    generation(tasks, ASKED, max_gen_toks=6, until=["\0\0"])
    downstream.load_tasks.cache_clear()
    manager, loaded = downstream.load_tasks(("choice", "last", "gen"))
    for max_length, names in ((None, ("choice", "last", "gen")), (MAX_LENGTH, ("gen",))):
        answers = []
        for batch_size in (1, 8):
            harness = HFLM(
                transformers_model(run),
                tokenizer=transformers_tokenizer(run.config),
                batch_size=batch_size,
                max_length=max_length,
            )
            chosen = [task for name in names for task in loaded[name]]
            results = lm_eval.simple_evaluate(harness, tasks=chosen, task_manager=manager)
            answers.append(
                {
                    (name, sample["doc_id"]): sample["filtered_resps"]
                    for name, samples in results["samples"].items()
                    for sample in samples
                }
            )
        alone, batched = answers
        assert len(alone) == (14 if max_length is None else 5)
        for key, answer in alone.items():
            if key[0] == "gen":
                assert batched[key] == answer
            else:
                torch.testing.assert_close(torch.tensor(batched[key]), torch.tensor(answer))


def test_a_whole_document_has_the_score_that_it_has_alone(tmp_path):
    """Also beside a longer one, beyond the training length."""
    from lm_eval.api.instance import Instance

    run = saved_run(tmp_path / "run", small_model("lssar_p15.py").float())
    harness = downstream.harness_model(load_run(run, Options(device="cpu")), MAX_LENGTH)
    requests = []
    for text in (
        "a short one",
        "a text of 24 characters.",
        "a text that is longer than the others",
    ):
        requests.append(Instance("loglikelihood_rolling", {}, (text,), 0))
    together = harness.loglikelihood_rolling(requests)
    alone = [harness.loglikelihood_rolling([request])[0] for request in requests]
    assert together == pytest.approx(alone, rel=1e-5)


def test_a_measurement_is_made_once(evaluate, run, monkeypatch, capsys):
    measured = []
    simple_evaluate = lm_eval.simple_evaluate

    def recorded(*arguments, tasks, **settings):
        measured.extend(task.task_name for task in tasks)
        return simple_evaluate(*arguments, tasks=tasks, **settings)

    monkeypatch.setattr(lm_eval, "simple_evaluate", recorded)
    first = evaluate(run, "choice,last")
    assert evaluate(run, "last") == first
    assert measured == ["choice", "last"]
    for change, samples in (("--rope=none", 4), ("--limit=2", 2), ("--max_length=30", 4)):
        capsys.readouterr()
        parts = evaluate(run, "last", change)["parts"]
        assert list(parts) == ["last"]
        assert parts["last"]["results"]["last"]["sample_len"] == samples
        key, value = change.removeprefix("--").split("=")
        assert re.search(rf"step 7, .*{key}[ =]{value}\b", capsys.readouterr().out)
    assert measured == ["choice", "last", "last", "last", "last"]
    assert read_json(run / "downstream.json")[0] == first  # nothing is dropped


def test_a_table_of_each_run(evaluate, tmp_path, capsys):
    runs = {}
    for name in ("softmax", "lssar_p15"):
        runs[name] = saved_run(tmp_path / name, small_model(f"{name}.py").float())
    evaluate(runs["softmax"], "choice,last", runs["lssar_p15"])
    tables = re.split(r"^(\w+): step 7, .*$", capsys.readouterr().out, flags=re.M)[1:]
    assert tables[::2] == list(runs)
    for run, table in zip(runs.values(), tables[1::2], strict=True):
        (result,) = read_json(run / "downstream.json")
        for task, metric in (("choice", "acc"), ("last", "perplexity")):
            scores = result["parts"][task]["results"][task]
            value = f"{scores[f'{metric},none']:.4f}"
            error = f"{scores[f'{metric}_stderr,none']:.4f}"
            assert re.search(rf"\|{metric} *\|.*\| *{value}\|± *\| *{error}\|", table)


def test_a_group_and_its_tasks(tasks, evaluate, run, capsys):
    group = {
        "group": "both",
        "task": ["choice", "last"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }
    (tasks / "both.yaml").write_text(json.dumps(group))
    scores = evaluate(run, "both")["parts"]["both"]["results"]
    right = 5 * scores["choice"]["acc,none"] + 4 * scores["last"]["acc,none"]
    assert scores["both"]["acc,none"] == pytest.approx(right / 9)
    table = capsys.readouterr().out
    assert re.findall(r"^\| *(both|- choice|- last)\b", table, re.M) == [
        "both",
        "- choice",
        "- last",
    ]


def test_refuses(tasks, evaluate, run, refused):
    refused(evaluate, run, "choise", says=("task choise cannot be loaded", "lm_eval ls tasks"))
    needs = "needs the data in HF_HOME, and HF_HUB_OFFLINE=1"
    refused(evaluate, run, "arc_easy", says=needs)
    generation(tasks, ASKED, max_gen_toks=MAX_LENGTH, until=["."])
    too_long = "max tokens to generate (40) must be less than model's maximum sequence length (40)"
    refused(evaluate, run, "gen", says=("task gen cannot be evaluated: ", too_long))
    too_long = "task choice cannot be evaluated: an answer has no tokens or over 8"
    refused(evaluate, run, "choice", "--max_length=8", says=too_long)
    assert not (run / "downstream.json").exists()
