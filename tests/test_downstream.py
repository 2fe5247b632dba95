"""Tasks of lm-evaluation-harness, against scores computed one request at a time in float64."""

import functools
import math
from pathlib import Path

import pytest
import torch

from data.tokenizer import get_tokenizer
from generation import generate
from runtime.files import read_json
from scripts import downstream
from scripts.common.runner import Options, load_run
from tests.helpers import saved_run, small_model, write_task

lm_eval = pytest.importorskip("lm_eval", reason="pip install -r requirements-eval.txt")

# The training length is 16 tokens, the largest one here 40. Bytes: a token is a letter.
MAX_LENGTH = 40
CHOICE = [
    {"q": "the cat", "c": ["x", "y", "z"], "a": 1},
    {"q": "a longer question of some length", "c": ["no", "yes, it is", "maybe"], "a": 0},
    {"q": "one, two, three", "c": ["four", "five", "s"], "a": 2},
    {"q": "q", "c": ["abcdefgh", "ab", "abcd"], "a": 0},
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
    choice = {
        "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{c}}",
        "doc_to_target": "a", "metric_list": metrics("acc", "acc_norm"),
    }  # fmt: skip
    write_task(folder, "choice", CHOICE, **choice)
    write_task(
        folder, "last", LAST, output_type="loglikelihood",
        doc_to_text="{{t.split(' ')[:-1]|join(' ')}}", doc_to_target="{{' ' + t.split(' ')[-1]}}",
        metric_list=[{"metric": "perplexity"}, *metrics("acc")],
    )  # fmt: skip
    return folder


def generation(folder, gold, **options):
    """Write the task `gen`: is the answer to ASKED the gold one?"""
    docs = [{"q": q, "a": a} for q, a in zip(ASKED, gold, strict=True)]
    write_task(
        folder, "gen", docs, output_type="generate_until", doc_to_text="{{q}}",
        doc_to_target="{{a}}", generation_kwargs=options, metric_list=metrics("exact_match"),
    )  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def harness(tmp_path_factory, tasks):
    """Local tasks and ARC's, no network and a fresh cache; without what takes the harness long: its
    own 14,000 tasks, and a description of the machine for each result."""
    import datasets
    import lm_eval.evaluator
    import lm_eval.tasks
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        own = functools.partial(
            lm_eval.tasks.TaskManager, include_defaults=False, include_path=[tasks, ARC]
        )
        patch.setattr(lm_eval.tasks, "TaskManager", own)
        patch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture
def evaluate(call):
    """Run the script on local tasks; returns the newest measurement of downstream.json."""

    def run(folder, names, *more, also=()):
        downstream.load_tasks.cache_clear()  # as the next command is another process
        common = ("--max_length", MAX_LENGTH, "--device", "cpu")
        call(downstream, folder, *also, "--tasks", names, *common, *more)
        return read_json(folder / "downstream.json")[-1]

    return run


@pytest.fixture
def run(tmp_path):
    return saved_run(tmp_path / "run", small_model("softmax.py").float())


def log_chances(model, ids):
    """Log-probabilities [L, 257] after ids, RoPE's base grown by hand as dynamic NTK does it."""
    d, s = model.config.d_head, len(ids) / model.config.block_size
    model.scale_rope("none", theta=10000 * max(1, s) ** (d / (d - 2)))
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
    """The greedy continuation, as text."""
    ids = torch.tensor([list(text.encode())[new - MAX_LENGTH :]])
    said = generate(model.scale_rope("dynamic_ntk"), ids, new, temperature=0)[0, ids.shape[1] :]
    return bytes(i for i in said.tolist() if i < 256).decode(errors="replace")


def test_scores(tasks, evaluate, tmp_path):
    model = small_model("lssar_p15.py")
    run = saved_run(tmp_path / "run", small_model("lssar_p15.py").float())
    answers = [say(model, q, 6) for q in ASKED]
    generation(tasks, [*answers[:3], "wrong", answers[4]], max_gen_toks=6, until=["\0\0"])
    result = evaluate(run, "choice,last,gen")
    scores = {name: entry["scores"][name] for name, entry in result["parts"].items()}
    found = {name: score["metrics"] for name, score in scores.items()}

    for metric, power in (("acc", 0), ("acc_norm", 1)):
        right = []
        for doc in CHOICE:
            chances = [answer(model, doc["q"], " " + c)[0] / len(c) ** power for c in doc["c"]]
            right.append(chances.index(max(chances)) == doc["a"])
        assert found["choice"][metric]["value"] == pytest.approx(sum(right) / 5)

    splits = [doc["t"].rpartition(" ") for doc in LAST]
    words = [answer(model, context, " " + word) for context, _, word in splits]
    mean = sum(chance for chance, _ in words) / 4
    assert math.log(found["last"]["perplexity"]["value"]) == pytest.approx(-mean, rel=1e-4)
    assert found["last"]["acc"]["value"] == sum(greedy for _, greedy in words) / 4

    assert found["gen"]["exact_match"]["value"] == 0.8
    assert [scores[name]["samples"] for name in scores] == [5, 4, 5]
    assert result["rope"] == "dynamic_ntk" and result["max_length"] == MAX_LENGTH


def test_a_tokenizer_file_adds_nothing_to_a_text(words_file, run):
    model = small_model(f"softmax.py --tokenizer={words_file}")
    saved_run(run, model.float())
    harness = downstream.harness_model(load_run(run, Options(device="cpu")), MAX_LENGTH)
    text = "the cat sat on the cat the cat"
    assert harness.tok_encode(text) == get_tokenizer(str(words_file)).encode(text)
    assert harness.eot_token_id == 6
    # sequences of up to the training length share batches
    sizes = [harness._batch_scheduler(0, [(None, [1] * n, [1, 2])]) for n in (15, 16)]
    assert sizes == [downstream.BATCH_TOKENS // 16, 1]


def test_a_measurement_is_made_once(evaluate, run, monkeypatch):
    asked, simple_evaluate = [], lm_eval.simple_evaluate

    def counted(*arguments, tasks, **more):
        asked.extend(task.task_name for task in tasks)
        return simple_evaluate(*arguments, tasks=tasks, **more)

    monkeypatch.setattr(lm_eval, "simple_evaluate", counted)
    first = evaluate(run, "choice,last")
    assert evaluate(run, "last") == first and asked == ["choice", "last"]
    for change in ("--rope=none", "--limit=2", "--max_length=30"):
        assert list(evaluate(run, "last", change)["parts"]) == ["last"]
    assert asked == ["choice", *["last"] * 4]
    assert read_json(run / "downstream.json")[0] == first  # nothing is dropped


def test_several_runs_in_one_table(evaluate, tmp_path, capsys):
    names = ["softmax", "lssar_p15"]
    runs = [saved_run(tmp_path / n, small_model(f"{n}.py").float()) for n in names]
    evaluate(runs[0], "choice,last", also=runs[1:])
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    for run, name in zip(runs, names, strict=True):
        (result,) = read_json(run / "downstream.json")
        for task, metric, factor in (("choice", "acc", 100), ("last", "perplexity", 1)):
            score = result["parts"][task]["scores"][task]["metrics"][metric]
            cells = [f"{factor * score[key]:.2f}" for key in ("value", "stderr")]
            assert [task, metric, name, *cells] in [line[:5] for line in table]


def test_refuses(evaluate, run, refused):
    for names, message in (
        ("choise", "no task 'choise'; similar names: choice"),
        ("arc_easy", "needs the data in HF_HOME, and HF_HUB_OFFLINE=1"),
    ):
        refused(evaluate, run, names, says=message)
    assert not (run / "downstream.json").exists()
