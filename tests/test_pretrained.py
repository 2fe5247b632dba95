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


def tokens():
    return torch.randint(257, (2, 11), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_logits_are_those_of_transformers(folder):
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder).double().eval()
    model = GPT(load_config(SIZES))
    found = load_initial(model, f"hf:{folder}")
    ours, expected = model.double().eval()(tokens()), theirs(tokens()).logits
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    assert found.step == 0 and len(found.sha256) == 64
    again = load_initial(GPT(load_config(SIZES)), f"hf:{folder}")
    assert again.sha256 == found.sha256
    assert not model.wte.weight[257:].any()  # padding stays 0


@torch.no_grad()
def test_any_attention_may_use_the_weights(folder):
    """SSMax with s such that the mean of its scale is softmax's, LSSAR, and fewer positions."""
    softmax, ssmax = GPT(load_config(SIZES)), GPT(load_config([*SIZES, "--attention=ssmax"]))
    for model in (softmax, ssmax):
        load_initial(model, f"hf:{folder}")
    assert [*ssmax.trunk.blocks[0].attn.attention.s] == [1, 1]
    assert not torch.allclose(softmax(tokens()), ssmax(tokens()))
    lssar = GPT(load_config([*SIZES, "--attention=lssar", "--p=3", "--sink=learned"]))
    load_initial(lssar, f"hf:{folder}")
    short = GPT(load_config([*SIZES, "--block_size=8", "--total_batch_size=8"]))
    load_initial(short, f"hf:{folder}")
    torch.testing.assert_close(short(tokens()[:, :8]), softmax(tokens()[:, :8]))


def test_what_does_not_fit_is_refused_by_name(folder, tmp_path):
    def refused(*settings, name=folder):
        with pytest.raises(UserError) as caught:
            load_initial(GPT(load_config([*SIZES, *settings])), f"hf:{name}")
        return str(caught.value)

    weights = transformers.GPT2LMHeadModel
    with pytest.MonkeyPatch.context() as patch:  # before the weights are read
        patch.setattr(weights, "from_pretrained", lambda name: pytest.fail("the weights"))
        assert "positions = 'rope', but hf:" in refused("--positions=rope")
    assert "n_layer = 3, but hf:" in refused("--n_layer=3")
    assert "n_vocab = 300, but hf:" in refused("--vocab_size=300")
    assert "gate = 'head', but hf:" in refused("--gate=head")
    assert "asentmax' has weights that hf:" in refused("--attention=asentmax")
    long = refused("--block_size=32", "--total_batch_size=32")
    assert "block_size = 32 is beyond the 16 positions of hf:" in long
    assert f"hf:{tmp_path / 'none'} cannot be loaded" in refused(name=tmp_path / "none")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "is a llama model" in refused(name=tmp_path)


def test_train_begins_with_them(folder, train):
    run = train("run", "--positions=learned", f"--init_from=hf:{folder}", "--max_iters=0")
    began = json.loads((run / "began_with.json").read_text())
    assert began["step"] == 0 and len(began["sha256"]) == 64
