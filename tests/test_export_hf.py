"""An exported run in transformers, by a process that does not know this repository."""

import ast
import json
import os
import re
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
from scripts import export_hf
from tests.helpers import saved_run, small_model
from tests.test_data_tokenizer import TEXTS, random_texts

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("transformers", "safetensors", "tokenizers")),
    reason="pip install -r requirements-eval.txt has transformers",
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
# What a user of an exported folder does; it knows nothing of this repository.
USER = """
import importlib, json, sys
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
    answer = {"ids": [tokenizer.encode(text) for text in asked["texts"]]}
    answer["texts"] = [tokenizer.decode(ids) for ids in answer["ids"]]
    answer["eot"] = [tokenizer.eos_token_id, model.generation_config.eos_token_id]
    answer["parameters"] = sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        answer["logits"] = [model(torch.tensor(ids)).logits for ids in asked["ids"]]
        ids = torch.tensor(asked["ids"][0])
        answer["loss"] = model(ids, labels=ids).loss
        answer["last"] = model(ids, logits_to_keep=2).logits
        greedy = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
        greedy["attention_mask"] = torch.ones_like(ids)
        for name, beams in (("greedy", 1), ("beams", 2)):
            more = greedy | {"num_beams": beams}
            answer[name] = [model.generate(ids, use_cache=use, **more) for use in (True, False)]
        padded = torch.cat((ids, ids[:, :3]), 1)
        mask = torch.tensor([[1] * 5 + [0] * 3] * len(ids))
        answer["right"] = model(padded, attention_mask=mask).logits[:, :5]
        for call in (
            lambda: model(padded, attention_mask=mask.flip(1)),
            lambda: model.generate(padded, **greedy | {"attention_mask": mask}),
        ):
            try:
                call()
            except ValueError as error:
                assert "no padding on the left" in str(error)
            else:
                raise AssertionError
    answers.append(answer)
package = type(model).__module__.rpartition(".")[0]
for name in asked["modules"]:
    importlib.import_module(f"{package}.{name}")
torch.save(answers, "answers.pt")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The user's folder, with all CASES exported, and beside it the runs."""
    folder = tmp_path_factory.mktemp("export")
    for number, (case, options) in enumerate(CASES.items()):
        run = saved_run(folder / f"run{number}", small_model(case).float())
        export(run, folder / f"user/model{number}", *options)
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
        "modules": sorted(path.stem for path in (user / "model0").glob("*.py")),
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
def test_an_export_is_the_run(pair, ids):
    model, answer = pair
    for part, logits in zip(ids, answer["logits"], strict=True):
        torch.testing.assert_close(logits, model(part), rtol=0, atol=1e-6)
    logits = model(ids[0])
    torch.testing.assert_close(answer["last"], logits[:, -2:], rtol=0, atol=1e-6)
    torch.testing.assert_close(answer["right"], logits, rtol=1e-4, atol=1e-4)
    loss = model(ids[0][:, :-1], ids[0][:, 1:].contiguous())
    torch.testing.assert_close(answer["loss"], loss)
    assert answer["parameters"] == sum(p.numel() for p in model.parameters())
    own = generate(model, ids[0], 20, temperature=0)
    assert torch.equal(answer["greedy"][0], own) and len(own[0]) == 25
    if model.trunk.rope.rope.scaling == "none":  # where the length so far does not turn the keys
        assert torch.equal(answer["greedy"][1], own)
        assert torch.equal(*answer["beams"])


def test_texts_have_the_ids_of_the_runs_tokenizer(pair):
    model, answer = pair
    own = get_tokenizer(model.config.tokenizer)
    assert answer["eot"] == [own.eot, own.eot]
    texts = [text for text in TEXTS if text]
    assert answer["ids"] == [own.encode(text) for text in texts]
    assert answer["texts"] == texts


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_odd_texts_have_the_same_ids(name):
    tokenizer, own = export_hf.byte_level_bpe(name), get_tokenizer(name)
    tokenizer.encode_special_tokens = True  # the end-of-text mark in a text is ordinary text
    assert tokenizer.get_vocab_size() == own.n_vocab
    for text in [*TEXTS, Path(export_hf.__file__).read_text(), *random_texts(200, 60)]:
        assert tokenizer.encode(text).ids == own.encode(text), repr(text)


def test_the_folder_says_what_it_is(folder):
    values = json.loads((folder / "user/model0/config.json").read_text())
    assert values["run"]["variant"] == "lssar_p15" and values["run"]["step"] == 7
    assert values["settings"]["p"] == 15 and "out_dir" not in values["settings"]
    assert str(folder) not in json.dumps(values["settings"])  # no path of the exporting machine
    assert values["vocab_size"] == 257 and values["max_position_embeddings"] == 16
    assert (folder / "user/model0/LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_its_code_is_this_repositorys(folder):
    """Identical but for the imports, none of which leads out of the folder."""
    modules = {"_".join(p.relative_to(ROOT).parts): p for p in ROOT.rglob("*.py")}
    modules["hf_modeling.py"] = export_hf.MODELING
    own = {path.name.removesuffix(".py") for path in ROOT.iterdir()}
    paths = list((folder / "user/model0").glob("*.py"))
    assert {"hf_modeling", "model", "attention_paths_tiles"} <= {path.stem for path in paths}
    for path in paths:
        found = []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                found.append(str(node.module))
            elif isinstance(node, ast.Import):
                found += [one.name for one in node.names]
        assert not {name.partition(".")[0] for name in found} & own, path.name
        here, there = (
            re.sub(r"^ *(from|import) .*\n", "", p.read_text(), flags=re.M)
            for p in (modules[path.name], path)
        )
        assert here == there, path.name


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
    def fails():
        raise KeyError("half-way")

    target = tmp_path / "new/model"
    with monkeypatch.context() as patch:
        patch.setattr(export_hf, "sources", fails)
        with pytest.raises(KeyError):
            export(folder / "run0", target)
    assert not list((tmp_path / "new").iterdir())
    target.mkdir()  # an empty one is as good as none
    export(folder / "run0", target)
    same = [path.name for path in (folder / "user/model0").iterdir()]
    assert sorted(path.name for path in target.iterdir()) == sorted(same)
    assert list((tmp_path / "new").iterdir()) == [target]


def test_what_is_missing_is_said(tmp_path, folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "scripts.common.hf_modeling", None)
    with pytest.raises(SystemExit) as stop:
        export(folder / "run0", tmp_path / "new")
    assert stop.value.code == 2 and "pip install -r requirements-eval" in capsys.readouterr().err
