"""OpenAI's GPT-2 as initial weights, on randomly initialised models of transformers."""

import json

import pytest
import torch

from config import load_config
from errors import UserError
from model import GPT
from runtime.pretrained import load_initial

transformers = pytest.importorskip("transformers")
SIZES = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16", "--batch_size=1"]
SIZES += ["--total_batch_size=16", "--tokenizer=bytes", "--positions=learned"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=257, n_positions=16, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3
    )
    path = tmp_path_factory.mktemp("gpt2")
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    return path


@torch.no_grad()
def test_logits_are_those_of_transformers(folder):
    tokens = torch.randint(257, (2, 11), generator=torch.Generator().manual_seed(0))
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder).double().eval()
    model = GPT(load_config(SIZES))
    found = load_initial(model, f"hf:{folder}")
    ours, expected = model.double().eval()(tokens), theirs(tokens).logits
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    assert found.step == 0 and len(found.sha256) == 64
    assert not model.wte.weight[257:].any()  # padding stays 0
    short = GPT(load_config([*SIZES, "--block_size=8", "--total_batch_size=8"]))
    assert load_initial(short, f"hf:{folder}").sha256 == found.sha256
    expected = theirs(tokens[:, :8]).logits
    torch.testing.assert_close(short.double().eval()(tokens[:, :8]), expected)
    ssmax = GPT(load_config([*SIZES, "--attention=ssmax", "--sink=learned"]))
    load_initial(ssmax, f"hf:{folder}")
    assert [*ssmax.trunk.blocks[0].attn.attention.s] == [1, 1]  # its own initial values


REFUSED = {
    "--positions=rope": "positions = 'rope', but hf:",
    "--vocab_size=300": "n_vocab = 300, but hf:",
    "--gate=head": "gate = 'head', but hf:",
    "--attention=asentmax": "asentmax' has weights that hf:",
    "--block_size=32 --total_batch_size=32": "block_size = 32, but hf:",
}


@pytest.mark.parametrize("settings", REFUSED)
def test_what_does_not_fit_is_refused_by_name(folder, settings, monkeypatch):
    weights = transformers.GPT2LMHeadModel
    if "asentmax" not in settings:  # the others before the weights are read
        monkeypatch.setattr(weights, "from_pretrained", lambda name: pytest.fail("the weights"))
    with pytest.raises(UserError, match=REFUSED[settings]):
        load_initial(GPT(load_config([*SIZES, *settings.split()])), f"hf:{folder}")


def test_what_is_no_gpt2_is_refused(tmp_path):
    model = GPT(load_config(SIZES))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name, message in (("none", "none cannot be loaded"), ("", "is a llama model")):
        with pytest.raises(UserError, match=message):
            load_initial(model, f"hf:{tmp_path / name}")


def test_train_begins_with_them(folder, train):
    run = train("run", "--positions=learned", f"--init_from=hf:{folder}", "--max_iters=0")
    began = json.loads((run / "began_with.json").read_text())
    assert began["step"] == 0 and len(began["sha256"]) == 64
