"""An exported run in transformers, by a process that does not know this repository."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from data.tokenizer import get_tokenizer
from generation import generate
from model import GPT
from runtime import checkpoint
from scripts import downstream, export_hf
from tests.helpers import saved_run, small_model, write_task
from tests.test_data_tokenizer import TEXTS, random_texts

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("transformers", "safetensors", "tokenizers")),
    reason="pip install -r requirements-dev.txt has transformers",
)

ROOT = Path(__file__).parent.parent
# case -> options of the export; all that is shared between layers, or not, and a scaled RoPE
CASES = {
    "t6_lssar_p15.py --head_size=6 --mlp_hidden=24": [],
    "softmax.py --tokenizer=gpt2 --vocab_size=50300": ["--rope", "none"],
    "relu_wortsman.py --mlp=swiglu --norm=rmsnorm --bias=False": ["--rope", "yarn"],
    "ablations/ssmax_probe.py --tie_embeddings=False": ["--rope_theta", "5e5"],
}
LENGTHS = (5, 16, 40)  # the training length is 16
TASK = "choice,text,gen"
# What a user of an exported folder does; it knows nothing of this repository.
USER = """
import json, sys
from importlib.util import find_spec
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

assert not any(find_spec(name) for name in ("attention", "model", "config", "errors"))
torch.set_num_threads(1)
asked = json.load(open("asked.json"))
answers = []
for folder in asked["folders"]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    answer = {"logits": [], "ids": [tokenizer.encode(text) for text in asked["texts"]]}
    answer["texts"] = [tokenizer.decode(ids) for ids in answer["ids"]]
    answer["eot"] = tokenizer.eos_token_id
    with torch.no_grad():
        for ids in asked["ids"]:
            answer["logits"].append(model(torch.tensor(ids)).logits)
        ids = torch.tensor(asked["ids"][0])
        answer["loss"] = model(ids, labels=ids).loss
        answer["last"] = model(ids, logits_to_keep=2).logits
        mask = torch.ones_like(ids)
        greedy = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
        answer["greedy"] = model.generate(ids, attention_mask=mask, **greedy)
        answer["beams"] = model.generate(ids, attention_mask=mask, num_beams=2, **greedy)
        answer["slow"] = model.generate(ids, attention_mask=mask, use_cache=False, **greedy)
        answer["beams slow"] = model.generate(
            ids, attention_mask=mask, num_beams=2, use_cache=False, **greedy
        )
        padded = torch.cat((ids, ids[:, :3]), 1)
        mask = torch.tensor([[1] * 5 + [0] * 3] * len(ids))
        answer["right"] = model(padded, attention_mask=mask).logits[:, :5]
        refused = [lambda: model(padded, attention_mask=mask.flip(1))]
        refused.append(lambda: model.generate(padded, attention_mask=mask, **greedy))
        for call in refused:
            try:
                call()
            except ValueError as error:
                assert "no padding on the left" in str(error)
            else:
                raise AssertionError
    model.save_pretrained(folder + "_again")
    again = AutoModelForCausalLM.from_pretrained(folder + "_again", trust_remote_code=True)
    answer["again"] = again(torch.tensor(asked["ids"][0])).logits.detach()
    answer["parameters"] = sum(p.numel() for p in again.parameters())
    answers.append(answer)
if asked["tasks"]:
    import lm_eval.evaluator
    from lm_eval.tasks import TaskManager

    lm_eval.evaluator.add_env_info = lambda results: None  # runs pip
    arguments = "pretrained=" + asked["folders"][0] + ",trust_remote_code=True,max_length=40"
    scores = lm_eval.simple_evaluate(
        "hf", arguments, asked["tasks"].split(","), device="cpu", bootstrap_iters=0,
        task_manager=TaskManager(include_path="tasks", include_defaults=False),
    )
    answers[0]["scores"] = json.loads(json.dumps(scores["results"]))
torch.save(answers, "answers.pt")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The user's folder, with tasks and all CASES exported, and beside it the runs."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "user/tasks").mkdir(parents=True)
    docs = [
        {"q": "the cat", "c": ["x", "yes", "zz"], "a": 1},
        {"q": "a", "c": ["b", "c", "d"], "a": 0},
    ]
    docs += [{"q": "more than the model was trained on", "c": ["or", "less", "?"], "a": 2}]
    write_task(
        folder / "user/tasks", "choice", docs, output_type="multiple_choice", doc_to_text="{{q}}",
        doc_to_choice="{{c}}", doc_to_target="a", metric_list=[{"metric": "acc"}],
    )  # fmt: skip
    write_task(
        folder / "user/tasks", "text", [{"t": "words, " * 10}], output_type="loglikelihood_rolling",
        doc_to_text="", doc_to_target="{{t}}", metric_list=[{"metric": "bits_per_byte"}],
    )  # fmt: skip
    for number, (case, options) in enumerate(CASES.items()):
        run = saved_run(folder / f"run{number}", small_model(case).float())
        export(run, folder / f"user/model{number}", *options)
    model = small_model([*CASES][0]).float().scale_rope("dynamic_ntk")
    for doc in docs:  # what is said to the last 32 bytes of the question
        ids = torch.tensor([list(doc["q"].encode())[-32:]])
        new = generate(model, ids, 8, temperature=0)[0, ids.shape[1] :]
        doc["said"] = get_tokenizer("bytes").decode(new)
    docs[1]["said"] = "something else"
    write_task(
        folder / "user/tasks", "gen", docs, output_type="generate_until", doc_to_text="{{q}}",
        doc_to_target="{{said}}", generation_kwargs={"max_gen_toks": 8, "until": ["\0\0"]},
        metric_list=[{"metric": "exact_match"}],
    )  # fmt: skip
    return folder


def export(run, target, *options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["export_hf", str(run), str(target), *options])
        export_hf.main()


@pytest.fixture(scope="module")
def ids():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(257, (2, n), generator=generator) for n in LENGTHS]


@pytest.fixture(scope="module")
def answers(folder, ids):
    """What the user got, for each of CASES."""
    user = folder / "user"
    asked = {
        "folders": [f"model{number}" for number in range(len(CASES))],
        "texts": [text for text in TEXTS if text],
        "ids": [part.tolist() for part in ids],
        "tasks": TASK if find_spec("lm_eval") and find_spec("accelerate") else "",
    }
    (user / "asked.json").write_text(json.dumps(asked))
    (user / "user.py").write_text(USER)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "user.py"],
        cwd=user, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return torch.load(user / "answers.pt")


@pytest.fixture(params=range(len(CASES)), ids=CASES)
def pair(request, folder, answers):
    """(the run's own model with the RoPE of its export, what the user got)."""
    run, options = folder / f"run{request.param}", [*CASES.values()][request.param]
    model = GPT(checkpoint.read_config(run)).eval()
    checkpoint.load_weights(model, run)
    scaling = options[1] if "--rope" in options else "dynamic_ntk"
    model.scale_rope(scaling, theta=5e5 if "--rope_theta" in options else None)
    return model, answers[request.param]


@torch.no_grad()
def test_logits_and_loss_are_the_models_own(pair, ids):
    model, answer = pair
    for part, logits in zip(ids, answer["logits"], strict=True):
        torch.testing.assert_close(logits, model(part), rtol=0, atol=1e-6)
    logits = model(ids[0])
    torch.testing.assert_close(answer["last"], logits[:, -2:], rtol=0, atol=1e-6)
    torch.testing.assert_close(answer["right"], logits, rtol=1e-4, atol=1e-4)
    loss = model(ids[0][:, :-1], ids[0][:, 1:].contiguous())
    torch.testing.assert_close(answer["loss"], loss)


def test_saved_again_it_is_the_same(pair, answers):
    model, answer = pair
    assert torch.equal(answer["again"], answer["logits"][0])
    assert answer["parameters"] == sum(p.numel() for p in model.parameters())


def test_greedy_generation_is_the_models_own(pair, ids):
    model, answer = pair
    own = generate(model, ids[0], 20, temperature=0)
    assert torch.equal(answer["greedy"], own) and len(own[0]) == 25
    if model.trunk.rope.rope.scaling == "none":  # where the length so far does not turn the keys
        assert torch.equal(answer["slow"], own)
        assert torch.equal(answer["beams slow"], answer["beams"])


def test_texts_have_the_ids_of_the_runs_tokenizer(pair):
    model, answer = pair
    own = get_tokenizer(model.config.tokenizer)
    assert answer["eot"] == own.eot
    texts = [text for text in TEXTS if text]
    assert answer["ids"] == [own.encode(text) for text in texts]
    assert answer["texts"] == texts


@pytest.mark.parametrize("number", [0, 1], ids=["bytes", "gpt2"])
def test_odd_texts_have_the_same_ids(folder, number):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / f"user/model{number}/tokenizer.json"))
    tokenizer.encode_special_tokens = True  # the end-of-text mark in a text is ordinary text
    own = get_tokenizer(["bytes", "gpt2"][number])
    assert tokenizer.get_vocab_size() == own.n_vocab
    for text in [*TEXTS, Path(export_hf.__file__).read_text(), *random_texts(200, 60)]:
        assert tokenizer.encode(text).ids == own.encode(text), repr(text)


def test_the_harness_scores_it_as_scripts_downstream_does(folder, answers, call, monkeypatch):
    if "scores" not in answers[0]:
        pytest.skip("pip install -r requirements-dev.txt has lm_eval and accelerate")
    import lm_eval.evaluator

    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
    arguments = ("--tasks", TASK, "--include_path", folder / "user/tasks", "--max_length", 40)
    call(downstream, folder / "run0", *arguments, "--device", "cpu")
    (result,) = json.loads((folder / "run0/downstream.json").read_text())
    for name, metric in zip(TASK.split(","), ("acc", "bits_per_byte", "exact_match"), strict=True):
        own = result["parts"][name]["scores"][name]["metrics"][metric]["value"]
        assert answers[0]["scores"][name][f"{metric},none"] == pytest.approx(own, rel=1e-5), name
    assert own == pytest.approx(2 / 3)  # of the answers that are generated


def test_the_folder_says_what_it_is(folder):
    values = json.loads((folder / "user/model0/config.json").read_text())
    assert values["run"]["variant"] == "lssar_p15" and values["run"]["step"] == 7
    assert values["settings"]["p"] == 15 and "data_dir" not in values["settings"]
    assert values["vocab_size"] == 257 and values["max_position_embeddings"] == 16
    assert (folder / "user/model0/LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_its_code_is_this_repositorys(folder):
    """Identical but for the imports."""
    modules = {"_".join(p.relative_to(ROOT).with_suffix("").parts): p for p in ROOT.rglob("*.py")}
    modules["hf_modeling"] = export_hf.MODELING
    for path in (folder / "user/model0").glob("*.py"):
        text = path.read_text()
        for flat in set(re.findall(r"^ *from \.(\w+) import", text, re.M)):
            name = ".".join(modules[flat].relative_to(ROOT).with_suffix("").parts)
            text = text.replace(
                f"from .{flat} import __name__ as _; from . import {flat}", f"import {name}"
            )
            text = text.replace(f"from .{flat} import", f"from {name} import")
        assert text == modules[path.stem].read_text(), path.name


def test_a_further_file_comes_along(tmp_path, monkeypatch):
    """A module imported with `import` or `from`, at the top of a file or inside a function."""
    for name in ("attention", "config", "errors", "model"):
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    with open(tmp_path / "attention.py", "a") as file:
        file.write("\n\ndef late():\n    import further as f\n    from second import two\n")
        file.write("    return f.one() + two\n")
    (tmp_path / "further.py").write_text("import math\nfrom second import two\n\n")
    with open(tmp_path / "further.py", "a") as file:
        file.write("def one():\n    return math.sqrt(1) + two\n")
    (tmp_path / "second.py").write_text("two = 2\n")
    (tmp_path / "unrelated.py").write_text("")
    monkeypatch.setattr(export_hf, "ROOT", tmp_path)
    files = export_hf.sources()
    names = {"hf_modeling", "attention", "config", "errors", "model", "further", "second"}
    assert files.keys() >= {f"{name}.py" for name in names} and "unrelated.py" not in files
    # transformers looks for files to copy by this pattern
    found = re.findall(r"^\s*from\s+\.(\S+)\s+import", files["attention.py"], re.M)
    assert {"further", "second"} <= set(found)
    package = tmp_path / "exported_code"
    package.mkdir()
    for name in files.keys() - {"hf_modeling.py"}:
        (package / name).write_text(files[name])
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("exported_code.attention").late() == 5


@pytest.mark.parametrize(
    "there, options, message",
    [
        ("file.txt", (), "exists and is not an empty folder"),
        ("folder/file.txt", (), "exists and is not an empty folder"),
        (None, ("--checkpoint", "best"), "no checkpoint in it (best)"),
        (None, ("--rope_factor", "0.5"), "rope factor = 0.5 must be at least 1"),
    ],
)
def test_refuses(tmp_path, folder, capsys, there, options, message):
    target = tmp_path / "new"
    if there:
        (tmp_path / there).parent.mkdir(exist_ok=True)
        (tmp_path / there).write_text("mine")
        target = tmp_path / there.split("/")[0]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        export(folder / "run0", target, *options)
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_is_whole_or_not_there(tmp_path, folder, monkeypatch):
    def fails(*arguments):
        raise KeyError("half-way")

    target = tmp_path / "new/model"
    with monkeypatch.context() as patch:
        patch.setattr(export_hf, "write_tokenizer", fails)
        with pytest.raises(KeyError):
            export(folder / "run0", target)
    assert not list((tmp_path / "new").iterdir())
    target.mkdir()  # an empty one is as good as none
    export(folder / "run0", target)
    same = [path.name for path in (folder / "user/model0").iterdir()]
    assert sorted(path.name for path in target.iterdir()) == sorted(same)
    assert list((tmp_path / "new").iterdir()) == [target]


def test_what_is_missing_is_said(tmp_path, folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(SystemExit) as stop:
        export(folder / "run0", tmp_path / "new")
    assert stop.value.code == 2 and "pip install safetensors" in capsys.readouterr().err
