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
    reference = transformers.GPT2LMHeadModel.from_pretrained(folder).double().eval()
    model = GPT(load_config(SIZES))
    found = load_initial(model, f"hf:{folder}")
    logits, expected = model.double().eval()(tokens), reference(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    assert found.step == 0 and len(found.sha256) == 64
    assert not model.wte.weight[257:].any()  # padding stays 0
    short = GPT(load_config([*SIZES, "--block_size=8", "--total_batch_size=8"]))
    assert load_initial(short, f"hf:{folder}").sha256 == found.sha256
    expected = reference(tokens[:, :8]).logits
    torch.testing.assert_close(short.double().eval()(tokens[:, :8]), expected)
    ssmax = GPT(load_config([*SIZES, "--attention=ssmax", "--sink=learned"]))
    load_initial(ssmax, f"hf:{folder}")
    assert [*ssmax.trunk.blocks[0].attn.attention.s] == [1, 1]  # its own initial values


def refused(settings, folder, says):
    with pytest.raises(UserError, match=says):
        load_initial(GPT(load_config([*SIZES, *settings])), f"hf:{folder}")


@pytest.mark.parametrize(
    "setting, says",
    [
        ("--positions=rope", r"differs: trunk.wpe.weight \(16, 32\) for None"),
        ("--vocab_size=300", "has vocab_size = 257, not 300"),
        ("--n_head=4", "has n_head = 2, not 4"),
        ("--gate=head", "differs: trunk.blocks.0.attn.c_gate"),
        ("--attention=asentmax", "differs: trunk.blocks.0.attn.c_rows"),
        ("--total_batch_size=32 --block_size=32", r"wpe.weight \(16, 32\) for \(32, 32\)"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_name(folder, setting, says):
    refused(setting.split(), folder, says)


@pytest.mark.parametrize(
    "setting, value",
    [
        ("model_type", "llama"),
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("tie_word_embeddings", False),
        ("n_inner", 64),
    ],
)
def test_another_function_of_the_same_weights_is_refused_by_name(folder, tmp_path, setting, value):
    """With n_inner, the weights' shapes are others."""
    config = json.loads((folder / "config.json").read_text()) | {setting: value}
    torch.manual_seed(0)
    if setting == "n_inner":
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**config)).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused([], tmp_path, "mlp.c_fc" if setting == "n_inner" else f": {setting}|has {setting} = ")
    refused([], tmp_path / "none", "none cannot be loaded")


def test_train_begins_with_them(folder, train):
    run = train("run", "--positions=learned", f"--init_from=hf:{folder}", "--max_iters=0")
    began = json.loads((run / "began_with.json").read_text())
    assert began["step"] == 0 and len(began["sha256"]) == 64
