"""nanoGPT's ckpt.pt as a run and as initial weights, beside GPT2LMHeadModel with its weights."""

import os
import shutil

import pytest
import torch

import train
from data.shards import write_shard
from errors import UserError
from layers.build import build_model
from runtime import checkpoint
from runtime.config_files import load_config
from runtime.pretrained import check_initial, load_initial
from scripts import eval_length
from scripts.common.runs import load_run
from tests.helpers import Malicious, measured_losses

transformers = pytest.importorskip("transformers")
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16}


def gpt(vocab_size, bias=True):
    """transformers' GPT-2 with the exact GELU of nanoGPT's model.py, and large weights."""
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": vocab_size, "n_positions": 32}
    config = transformers.GPT2Config(
        **sizes, initializer_range=0.3, activation_function="gelu", attn_implementation="eager"
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name.endswith("bias"):
                x.normal_(std=0.5 if bias else 0)
    return model


def save(path, model, bias=True, prefix="", **more):
    """Write the ckpt.pt that nanoGPT's train.py would write for these weights."""
    weights = {}
    for name, x in model.state_dict().items():
        if name.endswith("bias") and not bias:
            continue
        is_matrix = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        weights[prefix + name] = x.T.contiguous() if is_matrix else x
    vocab_size = model.config.vocab_size
    args = SIZES | {"block_size": 32, "bias": bias, "vocab_size": vocab_size, "dropout": 0.0}
    training = {"dataset": "shakespeare", "batch_size": 4, "gradient_accumulation_steps": 3}
    content = {
        "model": weights,
        "optimizer": {"state": {}, "param_groups": [{"lr": 1e-3}]},
        "model_args": args,
        "iter_num": 250,
        "best_val_loss": torch.tensor(1.5),
        "config": args | training | {"learning_rate": 1e-3, "compile": True},
    }
    path.parent.mkdir(exist_ok=True)
    torch.save(content | more, path)
    return path


def losses(model, tokens):
    """The loss of each token [L] after the first, in float64."""
    with torch.no_grad():
        logits = model.double()(tokens[None, :-1]).logits[0]
    return -logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]


@pytest.mark.parametrize(
    "vocab_size, bias, prefix",
    [(50257, True, ""), (50304, False, "_orig_mod."), (130, True, "_orig_mod.")],
)
@torch.no_grad()
def test_the_logits_are_nanogpts(vocab_size, bias, prefix, tmp_path, words_file):
    """Of every id, padding of the vocabulary included."""
    reference = gpt(vocab_size, bias)
    path = save(tmp_path / "nano/ckpt.pt", reference, bias, prefix)
    if vocab_size == 130:
        shutil.copy(words_file, path.with_name("tokenizer.json"))
    run = load_run(path)
    tokens = torch.randint(vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    expected = reference.double()(tokens).logits
    torch.testing.assert_close(run.model.double()(tokens), expected, rtol=1e-9, atol=1e-9)
    assert run.facts["step"] == 250
    assert run.config.total_batch_size == 3 * 4 * 32


def test_evaluations_take_it_as_a_run(tmp_path, call, pictures, refused):
    reference = gpt(50304)
    path = save(tmp_path / "nano/ckpt.pt", reference)
    tokens = torch.randint(50257, (65,), generator=torch.Generator().manual_seed(0))
    write_shard(tmp_path / "text_val_000000.bin", tokens.numpy())
    call(eval_length, path, f"--data_dir={tmp_path}", "--lengths=16,32", "--tokens=64")
    (measured,) = measured_losses(path.parent)
    for length, loss in zip((16, 32), measured["loss"], strict=True):
        windows = [losses(reference, tokens[i : i + length + 1]) for i in range(0, 64, length)]
        assert loss == pytest.approx(torch.cat(windows).mean().item(), abs=1e-5)
    says = "a length of 64 is beyond its learned positions, which end at block_size = 32"
    refused(call, eval_length, path, f"--data_dir={tmp_path}", "--lengths=64", says=says)
    refused(call, eval_length, path, says="data/shakespeare does not exist")


def test_values_of_nanogpt_are_explained(tmp_path, refused, monkeypatch):
    """Before any work. A checkpoint without nanogpt: would not set the model's sizes."""
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "ckpt.pt", gpt(50304))
    for source, says in {
        "scratch": "here, leave init_from out",
        "resume": "--resume RUN",
        "gpt2-xl": "--init_from=hf:gpt2-xl",
        str(path): f"--init_from=nanogpt:{path}",
    }.items():
        refused(train.main, load_config([f"--init_from={source}", "--dry_run"]), says=says)
    says = "gpt2_lssar does not exist"
    refused(train.main, load_config(["--init_from=gpt2_lssar", "--dry_run"]), says=says)
    check_initial(f"nanogpt:{path}")
    check_initial("")


def load(path, *settings):
    """A float64 model that starts from a ckpt.pt, and the checkpoint."""
    config = load_config([f"--init_from=nanogpt:{path}", "--batch_size=1", *settings])
    model = build_model(config)
    initial = load_initial(model, config.init_from)
    return model.double().eval(), initial


@torch.no_grad()
def test_a_run_starts_from_its_weights_and_sizes(tmp_path, words_file):
    reference = gpt(50257, bias=False).double()
    path = save(tmp_path / "ckpt.pt", reference.float(), bias=False)
    tokens = torch.randint(50257, (2, 8), generator=torch.Generator().manual_seed(0))
    expected = reference.double()(tokens).logits
    for settings in ([], ["--block_size=8"]):
        model, initial = load(path, *settings)
        torch.testing.assert_close(model(tokens), expected, rtol=1e-9, atol=1e-9)
    assert model.config.block_size == 8
    assert initial["step"] == 250

    # of characters: end-of-text is another id, which its text does not have
    characters = gpt(128)
    path = save(tmp_path / "characters/ckpt.pt", characters)
    file = shutil.copy(words_file, path.with_name("tokenizer.json"))
    model, _ = load(path, f"--tokenizer={file}", "--vocab_size=129")
    assert model.wte.weight.shape == (256, 16)
    expected = characters.double()(tokens % 128).logits
    torch.testing.assert_close(model(tokens % 128)[..., :128], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "settings, says",
    [
        ("--n_layer=3 --positions=rope", "has n_layer = 2, positions = 'learned': leave these"),
        ("--bias=True --mlp=gelu", "has bias = False, mlp = 'gelu_erf': leave these"),
        ("--block_size=64", "has block_size = 32: leave"),
        ("--tokenizer=bytes", "differs: tokenizer is gpt2 there, bytes here"),
    ],
)
def test_settings_that_contradict_it_are_refused(tmp_path, settings, says):
    path = save(tmp_path / "ckpt.pt", gpt(50304, bias=False), bias=False)
    with pytest.raises(UserError, match=says):
        load(path, *settings.split())


def test_other_files_are_refused(tmp_path, trained, capsys):
    reference = gpt(128)
    path = save(tmp_path / "ckpt.pt", reference)
    says = "its 128 ids are not GPT-2's: their tokenizer.json must be beside it"
    with pytest.raises(UserError, match=says):
        load_run(path)
    save(path, gpt(50304), config=Malicious())
    with pytest.raises(UserError, match="ckpt.pt: .* it has an object of .*print, not"):
        load_run(path)
    assert "run" not in capsys.readouterr().out
    save(path, gpt(50304), model_args={"n_layer": 2})
    says = "ckpt.pt: no checkpoint of nanoGPT's train.py: KeyError.'n_head'"
    with pytest.raises(UserError, match=says):
        load_run(path)
    with pytest.raises(UserError, match="is no checkpoint of nanoGPT's train.py"):
        load(trained / "step_000006.pt")
    with pytest.raises(UserError, match="none.pt: the checkpoint cannot be read"):
        load(tmp_path / "none.pt")


def test_weights_that_nanogpt_replaces_meanwhile_are_refused(tmp_path, monkeypatch):
    """Its training overwrites the file: the hash would be of other weights."""
    path = save(tmp_path / "ckpt.pt", gpt(50304))
    copy_weights = checkpoint.copy_weights

    def copy_slowly(*arguments):
        copy_weights(*arguments)
        os.utime(path, ns=(1, 1))

    monkeypatch.setattr(checkpoint, "copy_weights", copy_slowly)
    with pytest.raises(UserError, match=f"{path} was replaced or deleted meanwhile"):
        load(path)
