"""OpenAI's GPT-2 as initial weights, on randomly initialised models of transformers."""

import json
import shutil

import pytest
import torch

from errors import UserError
from layers.build import build_model
from runtime.config_files import load_config
from runtime.hf_config import load_hf_config
from runtime.pretrained import load_initial

transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

SIZES = {
    "vocab_size": 257,
    "n_positions": 16,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_inner": 80,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.GPT2Config(**SIZES, initializer_range=0.3)
    path = tmp_path_factory.mktemp("gpt2")
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    return path


def load(folder, *settings):
    """A float64 model with the folder's weights."""
    config = load_config(
        [f"--init_from=hf:{folder}", "--tokenizer=bytes", "--batch_size=1", *settings]
    )
    model = build_model(config)
    load_initial(model, config.init_from)
    return model.double().eval()


@torch.no_grad()
def test_sizes_and_logits_are_as_in_transformers(folder):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(257, (2, 11), generator=generator)
    reference = transformers.GPT2LMHeadModel.from_pretrained(folder).double().eval()
    model = load(folder)
    expected = reference(tokens).logits
    torch.testing.assert_close(model(tokens), expected, rtol=1e-9, atol=1e-9)
    assert not model.wte.weight[257:].any()  # padding stays 0

    short = load(folder, "--block_size=8")
    assert short.config.block_size == 8
    tokens = tokens[:, :8]
    expected = reference(tokens).logits
    torch.testing.assert_close(short(tokens), expected)


def test_a_config_file_with_init_from_resumes(folder, tmp_path):
    """The command is the same with --resume: the model's sizes are from the weights."""
    file = tmp_path / "tuned.py"
    file.write_text(f"init_from = 'hf:{folder}'\ntokenizer = 'bytes'\nbatch_size = 1\n")
    config = load_config([str(file)])
    resumed = load_config([str(file), "--resume"])
    assert resumed == config.replace(resume=True)
    assert resumed.block_size == 16


def test_scalars_that_gpt2_does_not_have_keep_their_initial_values(folder):
    model = load(folder, "--attention=ssmax", "--sink=learned")
    attention = model.trunk.blocks[0].attn.attention
    assert attention.s.tolist() == [1, 1]
    assert attention.sink.tolist() == [0, 0]


@pytest.mark.parametrize(
    "setting, says",
    [
        ("--gate=head", "differs: trunk.blocks.0.attn.c_gate.bias is missing there"),
        ("--attention=asentmax", "differs: trunk.blocks.0.attn.c_rows"),
        ("--norm=rmsnorm", "differs: norm is layernorm there, rmsnorm here"),
        ("--block_size=32 --n_head=2", "has block_size = 16: leave"),
        ("--n_layer=3 --n_embd=63 --positions=rope", "has n_layer = 2, n_embd = 32, positions"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_name(folder, setting, says):
    with pytest.raises(UserError, match=says):
        load(folder, *setting.split())


def test_weights_that_are_missing_or_damaged_are_refused(folder, tmp_path):
    """transformers draws missing ones at random, as where a wrapped model's names have a prefix."""
    shutil.copy(folder / "config.json", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(folder / file.name)
    save_file({f"module.{name}": x for name, x in weights.items()}, file, {"format": "pt"})
    with pytest.raises(UserError, match="lacks 29 weights, such as lm_head.weight"):
        load(tmp_path)
    content = (folder / file.name).read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=f"hf:{tmp_path} cannot be loaded: "):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": "two"}')
    load_hf_config.cache_clear()
    with pytest.raises(UserError, match=f"hf:{tmp_path} cannot be loaded: .*n_layer"):
        load(tmp_path)


@pytest.mark.parametrize(
    "setting, value",
    [
        ("model_type", "llama"),
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("tie_word_embeddings", False),
    ],
)
def test_another_function_of_the_same_weights_is_refused_by_name(folder, tmp_path, setting, value):
    config = json.loads((folder / "config.json").read_text()) | {setting: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"has {setting} = {value!r}, which"):
        load(tmp_path)
    with pytest.raises(UserError, match="none cannot be loaded"):
        load(tmp_path / "none")
