"""Tiny random models of transformers: losses by length, copies, the sink, refusals."""

import codecs
import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data.shards import read_shard, write_meta, write_shard
from scripts import attention_maps, copying, eval_length, passkey
from scripts.common import hf_attention, hf_loading
from scripts.common.hf_models import read_model
from scripts.common.runs import load_run
from tests.helpers import measured_losses, not_blank, set_meta

transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 256,
}
GPT2_SIZES = {
    "vocab_size": 257,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
# What each kind of model has besides.
MODELS = {
    "Llama": {},
    "Qwen3": {},
    "GPT2": {},
    "Gemma3Text": {
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "SmolLM3": {"no_rope_layers": [1, 0]},
}


@pytest.fixture(scope="session")
def save(tmp_path_factory):
    """Save a random model with a tokenizer of bytes, large weights and attention far from uniform;
    returns its folder."""
    from scripts.export_hf import byte_level_bpe

    def new(name, **settings):
        torch.manual_seed(0)
        sizes = GPT2_SIZES if name == "GPT2" else SIZES
        values = sizes | MODELS.get(name, {}) | settings
        make_config = getattr(transformers, f"{name}Config")
        model = transformers.AutoModelForCausalLM.from_config(make_config(**values))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(8)
        folder = tmp_path_factory.mktemp("models") / name
        model.save_pretrained(folder)
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=byte_level_bpe("bytes"),
            bos_token="<|endoftext|>",
            eos_token="<|endoftext|>",
        )
        tokenizer.save_pretrained(folder)
        return folder

    return new


@pytest.fixture(scope="session", params=MODELS)
def folder(request, save):
    return save(request.param)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    letters = [chr(97 + i * i * 7 % 25) for i in range(300)]
    letters[20] = "\r\n"
    path.write_text("".join(letters), encoding="utf-8-sig", newline="")
    return path


def tokens_in(text_file):
    return torch.tensor([256, *text_file.read_bytes().removeprefix(codecs.BOM_UTF8)])


def direct_losses(folder, text_file, length, mask=None):
    """Losses [windows, length] of the first 256 tokens, by transformers' own eager attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens = tokens_in(text_file)
    rows = []
    for start in range(0, 256, length):
        x = tokens[None, start : start + length]
        with torch.no_grad():
            logits = model(x, attention_mask=mask, use_cache=False).logits[0]
        targets = tokens[start + 1 : start + length + 1]
        rows.append(F.cross_entropy(logits.double(), targets, reduction="none"))
    return torch.stack(rows)


def hand_made_mask(folder, length, window):
    """The mask [1, 1, L, L] of each kind of layer: the window, and the layers' own."""
    config = transformers.AutoConfig.from_pretrained(folder)
    lowest = torch.finfo(torch.float32).min
    masks = {}
    own_window = getattr(config, "sliding_window", None)
    for kind in ("full_attention", "sliding_attention"):
        keys = window
        if kind == "sliding_attention" and own_window is not None:
            keys = min(window, own_window)
        mask = torch.full((1, 1, length, length), lowest)
        for i in range(length):
            mask[..., i, max(0, i - keys + 1) : i + 1] = 0
        masks[kind] = mask
    if config.model_type == "gemma3_text":
        return masks
    return masks["full_attention"]


def results(folder):
    return json.loads((folder / "eval_length.json").read_text())


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles of queries, and chunks of logits, in a short window."""
    monkeypatch.setattr(hf_attention, "QUERIES", 7)
    monkeypatch.setattr(hf_loading, "LOGITS", 257 * 11)


@pytest.mark.usefixtures("pictures", "small_tiles")
def test_losses_and_the_window_are_those_of_a_plain_loop(folder, text_file, call, capsys):
    name = f"hf:{folder}"
    arguments = ["--lengths=8,16,64", "--window=16", "--tokens=256", "--per_position"]
    call(eval_length, name, "--files", text_file, *arguments)
    result, control = results(folder)
    assert result["window"] is None
    assert control["window"] == 16
    plain_at_8 = direct_losses(folder, text_file, 8).mean().item()
    plain_at_16 = direct_losses(folder, text_file, 16).mean().item()
    plain_at_64 = direct_losses(folder, text_file, 64).mean().item()
    losses = []
    for measurement, window in ((result, 64), (control, 16)):
        # windows of 16 and more hide nothing at the first two lengths
        shorter, short, long = measurement["parts"].values()
        assert shorter["loss"] == pytest.approx(plain_at_8, rel=1e-6)
        assert short["loss"] == pytest.approx(plain_at_16, rel=1e-6)
        mask = hand_made_mask(folder, 64, window)
        direct = direct_losses(folder, text_file, 64, mask).mean(0)
        assert long["loss_by_position"] == pytest.approx(direct.tolist(), rel=1e-5)
        losses.append(long["loss"])
    loss, loss_in_window = losses
    assert loss == pytest.approx(plain_at_64, rel=1e-6)
    assert abs(loss - loss_in_window) > 1e-3
    printed = capsys.readouterr().out
    assert f"{name} " in printed
    assert "sliding window of 16" in printed
    assert "gain:" in printed


@pytest.mark.usefixtures("pictures", "small_tiles")
def test_the_worth_of_a_copy(folder, text_file, call, capsys):
    """Of the second of three passages, by hand: T = 16, passages of 4, a lag of 32."""
    name = f"hf:{folder}"
    call(copying, name, "--files", text_file, "--window=16", "--passages=3", "--lags=32")
    result, control = json.loads((folder / "copying.json").read_text())
    assert list(result["parts"]) == ["4", "8", "12", "32"]
    assert f"{name}, sliding window of 16, 3 passages of 4 tokens" in capsys.readouterr().out
    tokens = tokens_in(text_file)
    start = len(tokens) // 3
    passage_before = tokens[:4]
    passage = tokens[start : start + 4]
    between = tokens[start + 4 : start + 32]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for measurement, window in ((result, 36), (control, 16)):
        mask = hand_made_mask(folder, 35, window)
        losses = []
        for first in (passage_before, passage):
            x = torch.cat((first, between, passage))
            with torch.no_grad():
                logits = model(x[None, :-1], attention_mask=mask, use_cache=False).logits[0]
            losses.append(F.cross_entropy(logits[-3:], x[-3:]).item())
        without_copy, with_copy = losses
        worth = measurement["parts"]["32"]["worth"][1]
        assert worth == pytest.approx(without_copy - with_copy, abs=1e-5)


@pytest.mark.usefixtures("small_tiles")
def test_the_sink(folder, text_file, call, capsys, pictures):
    """The first token's share and the other columns, of a layer with the model's own window."""
    name = f"hf:{folder}"
    arguments = [name, "--files", text_file, "--lengths=32", "--tokens=64", "--text=a few words"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for layer in (0, 1):
        call(attention_maps, *arguments, f"--layer={layer}")
        result = json.loads((folder / "attention_maps.json").read_text())[-1]
        assert result["layer"] == layer
        assert f"{name} " in capsys.readouterr().out
        assert pictures.pop() == folder / "attention_maps.png"
        windows = tokens_in(text_file)[:64].view(2, 32)
        with torch.no_grad():
            A = model(windows, output_attentions=True).attentions[layer]  # [2, H, 32, 32]
        keys = (A[0, 0] > 0).sum(-1)
        if folder.name == "Gemma3Text" and layer == 0:
            assert keys.max() == 12
        else:
            assert keys.tolist() == list(range(1, 33))
        rows = A[:, :, 1:].double()  # without the first query
        entropy = torch.special.entr(rows).sum(-1)
        share = entropy / keys[1:].double().log()
        measured = result["parts"]["32 tokens"]["heads"]
        for column, of_rows in (
            ("first_token", rows[..., 0]),
            ("entropy", entropy),
            ("entropy_share", share),
            ("sum", rows.sum(-1)),
            ("zeros", torch.zeros(2, 4, 31)),
        ):
            expected = of_rows.mean((0, 2)).tolist()
            assert measured[column] == pytest.approx(expected, abs=1e-5), column


@pytest.mark.usefixtures("pictures")
def test_nothing_is_measured_twice_whatever_the_window(save, text_file, call, monkeypatch):
    folder = save("Llama")
    windows = []
    measure = eval_length.mean_losses

    def record(run, batches):
        windows.append(run.facts["window"])
        return measure(run, batches)

    monkeypatch.setattr(eval_length, "mean_losses", record)

    def measured_windows(texts, *options):
        """The window of each measurement that a call makes."""
        windows.clear()
        call(eval_length, f"hf:{folder}/", "--files", *texts, "--lengths=16,64", *options)
        return windows

    # of 16 and 64 tokens; max_position_embeddings is 32
    assert measured_windows([text_file]) == [None, None, 32, 32]
    assert measured_windows([text_file], "--window=32") == []
    assert measured_windows([text_file], "--window=16") == [16, 16]
    # other weights
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert measured_windows([text_file], "--window=16") == [None, None, 16, 16]
    # another text
    other = text_file.with_name("other.txt")
    other.write_text(text_file.read_text()[::-1])
    assert measured_windows([text_file, other], "--no_control") == [None, None]
    texts = [measurement["data_dir"] for measurement in results(folder)]
    assert texts[-1] == f"{text_file}, {other}"
    assert len(set(texts)) == 2


@pytest.mark.usefixtures("pictures", "small_tiles")
def test_what_sdpa_leaves_out_is_computed(save, text_file):
    """Gemma 2's soft cap of the scores, and gpt-oss's learned sinks."""
    tokens = tokens_in(text_file)[None]
    x = tokens[:, :64]
    y = tokens[:, 1:65]
    options = eval_length.LossByLength(files=[str(text_file)])
    for name, settings in (
        ("Gemma2", {"attn_logit_softcapping": 0.1, "sliding_window": 12}),
        ("GptOss", {"sliding_window": 12, "num_local_experts": 2, "num_experts_per_tok": 1}),
    ):
        folder = save(name, **settings)
        run = load_run(read_model(f"hf:{folder}", 16), options)
        losses = run.model.token_losses(x, y)
        expected = direct_losses(folder, text_file, 64)[:1].float()
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("longest, window", [(16, None), (64, 16)])
@pytest.mark.parametrize("scaling, kind", [("yarn", "yarn"), ("dynamic_ntk", "dynamic")])
def test_another_scaling_of_rope(save, text_file, scaling, kind, longest, window):
    """RoPE is scaled from the training length: the model's or, if it is given, the window."""
    folder = save("Llama", max_position_embeddings=longest)
    options = eval_length.LossByLength(
        files=[str(text_file)],
        rope=scaling,
        rope_factor=4.0,
        rope_theta=500.0,
    )
    run = load_run(read_model(f"hf:{folder}", window), options)
    tokens = tokens_in(text_file)[None]
    config = transformers.AutoConfig.from_pretrained(folder)
    config.max_position_embeddings = 16
    config.rope_parameters = {
        "rope_type": kind,
        "factor": 4.0,
        "rope_theta": 500.0,
        "original_max_position_embeddings": 16,
    }
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for length in (8, 64, 40, 16):
        x = tokens[:, :length]
        # a new one, because transformers keeps the scaling of a longer text before this one
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config)
        with torch.no_grad():
            logits = run.model.logits(run.model.hidden(x))
            expected = model(x).logits
            unscaled = plain(x).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(logits, unscaled, atol=0.1)


def test_a_window_begins_with_what_the_tokenizer_puts_before_a_text(save, text_file):
    from tokenizers import processors

    folder = save("Llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A",
        special_tokens=[("<|endoftext|>", 256)],
    )
    tokenizer.save_pretrained(folder)
    options = eval_length.LossByLength(files=[str(text_file)])
    run = load_run(read_model(f"hf:{folder}", 16), options)
    tokens = tokens_in(text_file)[None]
    x = tokens[:, 5:25]
    y = tokens[:, 6:26]
    losses = run.model.token_losses(x, y)
    begun = x.clone()
    begun[0, 0] = 256
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(begun).logits
    expected = F.cross_entropy(logits[0], y[0], reduction="none")
    torch.testing.assert_close(losses[0], expected, rtol=1e-5, atol=1e-5)


def test_shards(save, shards, call, refused, tmp_path):
    """Their tokens must be the text that they are to the model's tokenizer."""
    folder = save("Llama")
    arguments = ["--lengths=16,64", "--window=16", "--tokens=256"]
    call(eval_length, f"hf:{folder}", f"--data_dir={shards}", *arguments)
    result, control = measured_losses(folder)
    shard = read_shard(shards / "text_val_000000.bin")
    tokens = torch.from_numpy(shard.astype(np.int64))
    windows = tokens[:256].view(4, 64)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(windows).logits
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[1:257]).item()
    assert result["loss"][1] == pytest.approx(loss, rel=1e-5)
    assert not_blank(folder / "loss_by_length.png")
    # GPT-2's first ids are other bytes
    gpt2 = tmp_path / "gpt2"
    gpt2.mkdir()
    write_meta(gpt2, set_meta("gpt2"))
    gpt2_shard = gpt2 / "text_val_000000.bin"
    write_shard(gpt2_shard, np.arange(200, dtype=np.uint16))
    arguments = (f"hf:{folder}", f"--data_dir={gpt2}", "--lengths=16")
    says = f"{gpt2} was made with another tokenizer than hf:{folder} has: token 0 is '!' there"
    refused(call, eval_length, *arguments, says=says)
    # in a model without a tokenizer only the number of ids is known
    for file in folder.glob("tokenizer*"):
        file.unlink()
    from scripts.common.hf_models import open_tokenizer

    open_tokenizer.cache_clear()
    call(eval_length, *arguments, "--tokens=64")
    write_shard(gpt2_shard, np.arange(100, 300, dtype=np.uint16))
    says = "token 157 is 257, but the vocabulary is 0 to 256"
    refused(call, eval_length, *arguments, says=says)


def test_no_code_of_a_model_is_run(save, text_file, call, refused, monkeypatch):
    """Nor does transformers ask whether to run it."""
    folder = save("Llama")
    (folder / "code.py").write_text("raise SystemExit('this was run')")
    config_file = folder / "config.json"
    settings = json.loads(config_file.read_text())
    settings["model_type"] = "new"
    settings["auto_map"] = {"AutoConfig": "code.NewConfig"}
    config_file.write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda question: "y")
    arguments = ("--files", text_file, "--lengths=16")
    refused(call, eval_length, f"hf:{folder}", *arguments, says="contains custom code")


def test_refusals(save, text_file, call, refused, run, shards, tmp_path):
    name = f"hf:{save('Llama')}"
    gpt2 = f"hf:{save('GPT2')}"
    bert = f"hf:{save('Bert', max_position_embeddings=256)}"
    mamba = f"hf:{save('Mamba', state_size=4, max_position_embeddings=None)}"
    text = ["--files", text_file, "--lengths=16,256", "--window=16"]
    (tmp_path / "empty").mkdir()
    lacking = shutil.copytree(save("GPT2"), tmp_path / "lacking")
    weights = load_file(lacking / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, lacking / "model.safetensors", {"format": "pt"})
    for arguments, says in (
        ([name, "--lengths=16"], "has no text: give it text files, or --data_dir SHARDS"),
        ([name, *text, f"--data_dir={shards}"], "a model is measured on one text"),
        ([name, run, *text], f"{run} is a run"),
        ([run, *text[:2]], "is measured on shards: `python -m data.text FILES` makes them"),
        ([name, *text, "--p=2"], "--p is for runs of this repository"),
        ([name, *text, "--rope=ntk"], "--rope ntk: for hf:"),
        ([name, *text, "--rope=yarn"], "needs --rope_factor N"),
        ([gpt2, *text], "a length of 256 is beyond its learned positions, which end at max_"),
        ([gpt2, *text, "--rope=yarn"], "no RoPE"),
        ([gpt2, "--files", text_file, "--window=4096"], "--window 4096: hf:"),
        ([mamba, "--files", text_file], "has no max_position_embeddings: --window N says"),
        ([bert, *text], "gives other logits, for example because it is not causal"),
        ([mamba, *text], "sees more than the keys of a window"),
        ([name, "--files", tmp_path / "none.txt"], "none.txt cannot be read as text"),
        ([f"hf:{tmp_path}/empty", *text], "cannot be loaded: Unrecognized model"),
        (
            [f"hf:{lacking}", *text[:2], "--lengths=16"],
            "lacks 1 weights, such as transformer.h.1.mlp.c_fc.weight",
        ),
        ([f"hf:{tmp_path}/none", *text], f"cannot be loaded: there is no folder {tmp_path}/none"),
        ([name.removeprefix("hf:"), *text], f"a model of transformers, not a run: write it {name}"),
    ):
        refused(call, eval_length, *arguments, says=says)
    refused(call, passkey, name, says="passkey measures runs of this repository")
    maps = ["--files", text_file, "--lengths=16", "--tokens=64"]
    refused(call, attention_maps, mamba, *maps, "--window=16", says="layer 1 of this model has no")
    call(eval_length, mamba, *text[:2], "--lengths=16,64", "--window=16", "--no_control")


@pytest.mark.usefixtures("pictures")
def test_default_lags_leave_room_for_the_second_copy(save, text_file, call):
    """GPT-2's learned positions end at 128, a passage has 4 tokens."""
    folder = save("GPT2")
    call(copying, f"hf:{folder}", "--files", text_file, "--window=16", "--passages=3")
    result, *_ = json.loads((folder / "copying.json").read_text())
    assert list(result["parts"]) == ["4", "8", "12", "32", "64"]


def test_a_model_of_the_hub_is_known_by_its_commit(save, text_file, call, tmp_path, monkeypatch):
    """As huggingface_hub stores what it has downloaded."""
    commit = "0123456789" * 4
    cached = tmp_path / "hub/models--team--model"
    shutil.copytree(save("Llama"), cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    call(eval_length, "hf:team/model", "--files", text_file, "--lengths=64", "--tokens=64")
    results_folder = tmp_path / "out/team/model"
    result, control = results(results_folder)
    assert result["sha256"] == commit
    assert result["variant"] == "hf:team/model"
    assert not_blank(results_folder / "loss_by_length.png")
