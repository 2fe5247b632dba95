"""An exported run in transformers, by a process that does not know this repository."""

import json
import os
import re
import subprocess
import sys
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

pytest.importorskip("transformers", reason="pip install -r requirements-eval.txt")

ROOT = Path(__file__).parent.parent
# case -> options of the export; all that is shared between layers, or not, and a scaled RoPE
CASES = {
    "t6_lssar_p15.py --head_size=6 --mlp_hidden=24": [],
    "softmax.py --tokenizer=gpt2 --vocab_size=50300": ["--rope", "none"],
    "relu_wortsman.py --mlp=swiglu --norm=rmsnorm --bias=False": ["--rope", "yarn"],
    "ablations/ssmax_probe.py --tie_embeddings=False": ["--rope_theta", "5e5"],
}
# What a user of an exported folder does; it knows nothing of this repository.
USER = """
import importlib, pathlib
from importlib.util import find_spec
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

assert not any(find_spec(name) for name in ("attention", "model", "config", "errors"))
torch.set_grad_enabled(False)
for folder, run in torch.load("runs.pt").items():
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert [tokenizer.encode(text) for text in run["texts"]] == run["ids"]
    assert [tokenizer.decode(ids) for ids in run["ids"]] == run["texts"]
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == run["eot"]
    assert sum(p.numel() for p in model.parameters()) == run["parameters"]
    for x, logits in run["logits"]:
        assert_close(model(x).logits, logits, rtol=0, atol=1e-6)
    x, logits = run["logits"][0]
    assert_close(model(x, labels=x).loss, run["loss"])
    assert_close(model(x, logits_to_keep=2).logits, logits[:, -2:], rtol=0, atol=1e-6)
    greedy = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
    ones = torch.ones_like(x)
    assert torch.equal(model.generate(x, attention_mask=ones, **greedy), run["greedy"])
    for beams in (1, 2) if run["rope"] == "none" else ():  # else the length so far turns the keys
        more = greedy | {"attention_mask": ones, "num_beams": beams}
        fast, slow = (model.generate(x, use_cache=use, **more) for use in (True, False))
        assert torch.equal(fast, slow)
    padded, mask = torch.cat((x, x[:, :3]), 1), torch.cat((ones, 0 * ones[:, :3]), 1)
    right = model(padded, attention_mask=mask).logits[:, :5]
    assert_close(right, logits, rtol=1e-4, atol=1e-4)
    for call in (
        lambda: model(padded, attention_mask=mask.flip(1)),
        lambda: model.generate(padded, attention_mask=mask, **greedy),
    ):
        try:
            call()
        except ValueError as error:
            assert "no padding on the left" in str(error)
        else:
            raise AssertionError
package = type(model).__module__.rpartition(".")[0]
for path in pathlib.Path(folder).glob("*.py"):
    importlib.import_module(f"{package}.{path.stem}")
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


@torch.no_grad()
def expected(run, options):
    """What the run's own model and tokenizer give, with the RoPE of its export."""
    model = GPT(checkpoint.read_config(run)).eval()
    checkpoint.load_weights(model, run)
    rope = options[1] if "--rope" in options else "dynamic_ntk"
    model.scale_rope(rope, theta=5e5 if "--rope_theta" in options else None)
    generator = torch.Generator().manual_seed(0)  # the training length is 16
    inputs = [torch.randint(257, (2, n), generator=generator) for n in (5, 16, 40)]
    x, tokenizer = inputs[0], get_tokenizer(model.config.tokenizer)
    texts = [text for text in TEXTS if text]
    return {
        "rope": rope,
        "texts": texts,
        "ids": [tokenizer.encode(text) for text in texts],
        "eot": tokenizer.eot,
        "parameters": sum(p.numel() for p in model.parameters()),
        "logits": [(x, model(x)) for x in inputs],
        "loss": model(x[:, :-1], x[:, 1:].contiguous()),
        "greedy": generate(model, x, 20, temperature=0),
    }


def test_an_export_is_the_run(folder):
    user = folder / "user"
    runs = {
        f"model{number}": expected(folder / f"run{number}", options)
        for number, options in enumerate(CASES.values())
    }
    torch.save(runs, user / "runs.pt")
    (user / "user.py").write_text(USER)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "user.py"]
    done = subprocess.run(command, cwd=user, env=environment, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_odd_texts_have_the_same_ids(name):
    tokenizer, own = export_hf.byte_level_bpe(name), get_tokenizer(name)
    tokenizer.encode_special_tokens = True  # the end-of-text mark in a text is ordinary text
    assert tokenizer.get_vocab_size() == own.n_vocab
    for text in [*TEXTS, *random_texts(200, 60)]:
        assert tokenizer.encode(text).ids == own.encode(text), repr(text)


def test_the_folder_says_what_it_is(folder):
    values = json.loads((folder / "user/model0/config.json").read_text())
    assert values["run"]["variant"] == "lssar_p15" and values["run"]["step"] == 7
    assert values["settings"]["p"] == 15 and "out_dir" not in values["settings"]
    assert str(folder) not in json.dumps(values["settings"])  # no path of the exporting machine
    assert values["vocab_size"] == 257 and values["max_position_embeddings"] == 16
    assert (folder / "user/model0/LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_its_code_is_this_repositorys(folder):
    """Identical but for the imports, which a user's own process has made."""
    modules = {"_".join(p.relative_to(ROOT).parts): p for p in ROOT.rglob("*.py")}
    modules["hf_modeling.py"] = ROOT / "scripts/common/hf_modeling.py"
    paths = list((folder / "user/model0").glob("*.py"))
    assert {"hf_modeling", "model", "attention_paths_tiles"} <= {path.stem for path in paths}
    for path in paths:
        here, there = (
            re.sub(r"^ *(from|import) .*\n", "", p.read_text(), flags=re.M)
            for p in (modules[path.name], path)
        )
        assert here == there, path.name


@pytest.mark.parametrize("there", ["new", "new/file.txt"])
def test_a_folder_with_something_in_it_is_left_alone(tmp_path, folder, capsys, there):
    (tmp_path / there).parent.mkdir(exist_ok=True)
    (tmp_path / there).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        export(folder / "run0", tmp_path / "new")
    assert stop.value.code == 2 and "is not an empty folder" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_is_whole_or_not_there(tmp_path, folder, monkeypatch):
    target = tmp_path / "new/model"
    with monkeypatch.context() as patch:
        patch.setattr(export_hf, "sources", lambda: {}["half-way"])
        with pytest.raises(KeyError):
            export(folder / "run0", target)
    assert not list((tmp_path / "new").iterdir())
    target.mkdir()  # an empty one is as good as none
    export(folder / "run0", target)
    same = [path.name for path in (folder / "user/model0").iterdir()]
    assert sorted(path.name for path in target.iterdir()) == sorted(same)
    assert list((tmp_path / "new").iterdir()) == [target]
