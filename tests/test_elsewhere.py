"""docs/elsewhere.md: variants in other people's models."""

import copy
import re
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from attention import VARIANTS
from attention_paths import elsewhere
from attention_paths.elsewhere import attach, attend, count_keys, read_positions
from attention_paths.module import Attention
from attention_paths.reference import ReferenceAttention
from errors import UserError
from tests.runs import ROOT

PAGE = (ROOT / "docs/elsewhere.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
x = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))


def test_nanogpt(monkeypatch):
    """The lines of the page, in a class with the names of nanoGPT's."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    head, init, forward = BLOCKS[:3]
    source = f"""{head.replace("REPOSITORY", str(ROOT))}
class CausalSelfAttention(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        {init}
    def forward(self, q, k, v):
        {forward}
        return y
"""
    scope = {"torch": torch}
    exec(source, scope)
    config = SimpleNamespace(n_head=2, n_embd=16, block_size=32)
    attention = scope["CausalSelfAttention"](config)
    reference = ReferenceAttention(VARIANTS["lssar"], 2, 8, 32, p=15.0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 40, 8, generator=generator)
    torch.testing.assert_close(attention(q, k, v), reference(q, k, v))


@pytest.mark.parametrize("name", ["softmax", "lssa", "lssar"])
def test_a_layer_that_scales_its_queries_itself(name):
    """As OPT's, which passes scaling = 1."""
    attention = ReferenceAttention(VARIANTS[name], 2, 8, 32, p=3.0 if name == "lssar" else None)
    q, k, v = torch.randn(3, 2, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    y, _ = attend(SimpleNamespace(variant=attention), q / 8**0.5, k, v, None, scaling=1.0)
    torch.testing.assert_close(y.transpose(1, 2), attention(q, k, v))


@pytest.fixture(params=["Llama", "Qwen3", "Gemma2"])
def build(request):
    transformers = pytest.importorskip("transformers")
    settings = dict(SIZES)
    if request.param == "Gemma2":
        settings["sliding_window"] = 6
        settings["attn_logit_softcapping"] = 0.01  # below the scores of a model at random
    make_config = getattr(transformers, f"{request.param}Config")
    config = make_config(**settings)

    def new() -> nn.Module:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            attn_implementation="eager",  # SDPA has no soft-capping
        )
        return model.eval()

    return new


def generated(model, prompts=x, mask=None, **options):
    if mask is None:
        mask = torch.ones_like(prompts)
    return model.generate(
        prompts,
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        attention_mask=mask,
        disable_compile=True,
        **options,
    )


def test_softmax_is_the_models_own_attention(build):
    """With its scale, sliding window and soft-capping."""
    model = attach(build(), "softmax")
    original = build()
    torch.testing.assert_close(model(x).logits, original(x).logits)


@pytest.mark.parametrize("name, p", [("lssar", 15.0), ("ssmax", None)])
def test_variants_train_and_generate(build, name, p):
    model = attach(build(), name, p)
    model(x, labels=x).loss.backward()
    learned = []
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        if key.endswith("self_attn.variant.s"):
            learned.append(key)
    assert len(learned) == (2 if name == "ssmax" else 0)

    original = build()
    logits = model(x).logits
    assert not torch.allclose(logits, original(x).logits, atol=1e-4)
    start = model(x[:, :12])
    rest = model(x[:, 12:], past_key_values=start.past_key_values)
    torch.testing.assert_close(rest.logits, logits[:, 12:])

    without_cache = generated(model, use_cache=False)
    assert torch.equal(generated(model), without_cache)
    with_static_cache = generated(model, cache_implementation="static")
    assert torch.equal(with_static_cache, without_cache)


@pytest.mark.parametrize("settings, trained_length", [({}, 64), ({"trained_length": 16}, 16)])
def test_the_training_length_is_the_models_or_is_given(build, settings, trained_length):
    model = attach(build(), "lssar", 15.0, **settings)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    assert [layer.trained_length for layer in layers] == [trained_length] * 2


@torch.no_grad()
def test_padding_and_packed_documents_change_nothing(build):
    """With a cache, too, and one that has room for later keys."""
    model = attach(build().double(), "lssar", 15.0)
    lengths = [9, 20, 11]
    prompts = x.repeat(2, 1)[:3]
    padding = x.new_zeros(3, 4)  # behind the longest, too
    padded_right = torch.cat((prompts, padding), dim=1)
    padded_left = torch.empty_like(padded_right)
    logits_alone = []
    for number, length in enumerate(lengths):
        row = padded_right[number]
        padded_left[number] = row.roll(24 - length)
        alone = model(row[None, :length])
        logits_alone.append(alone.logits[0])
    expected = torch.cat(logits_alone)

    is_token = torch.arange(24) < torch.tensor(lengths)[:, None]
    on_the_right = model(padded_right, attention_mask=is_token.long())
    torch.testing.assert_close(on_the_right.logits[is_token], expected)

    is_token = is_token.flip(1)
    mask = is_token.long()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    on_the_left = model(padded_left, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(on_the_left.logits[is_token], expected)

    packed = model(
        padded_left[is_token][None],
        position_ids=positions[is_token][None],
        use_cache=False,
    )
    torch.testing.assert_close(packed.logits[0], expected)

    for options in (
        {"use_cache": False},
        {},
        {"cache_implementation": "static"},
    ):
        texts = generated(model, padded_left, mask, **options)
        for text, row, length in zip(texts, padded_right, lengths, strict=True):
            (alone,) = generated(model, row[None, :length])
            assert torch.equal(text[24 - length :], alone)


@torch.no_grad()
def test_a_mask_that_is_added_to_scores(build):
    """Packed documents of 5 tokens, which no window cuts, by a mask [B, 1, L, L] of both kinds."""
    plain = build().double()
    document = torch.arange(20) // 5
    visible = (document[:, None] == document) & torch.ones(20, 20, dtype=torch.bool).tril()
    lowest = torch.finfo(torch.float64).min
    added = torch.zeros(20, 20, dtype=torch.float64).masked_fill(~visible, lowest)
    expected = plain(x, attention_mask=added.expand(len(x), 1, 20, 20)).logits
    model = attach(plain, "softmax")
    for mask in (visible, added):
        logits = model(x, attention_mask=mask.expand(len(x), 1, 20, 20)).logits
        torch.testing.assert_close(logits, expected)


@torch.no_grad()
def test_layers_share_what_was_read_of_their_mask(build, monkeypatch):
    """Gemma 2 has a mask with a window and another without."""
    masks = []

    def count(mask):
        masks.append(mask)
        return count_keys(mask)

    monkeypatch.setattr(elsewhere, "count_keys", count)
    model = attach(build(), "softmax")
    model(x)
    assert len(masks) == (2 if model.config.model_type == "gemma2" else 1)


def test_padding_is_one_document():
    """varlen_attn has room for few documents."""
    rows = [
        [0, 0, 0, 1, 1, 1, 1],
        [1, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
    ]
    is_token = torch.tensor(rows)
    causal = torch.ones(7, 7).tril()
    mask = causal * is_token[:, None] * is_token[..., None]
    positions = read_positions(mask.bool(), None, None)
    assert positions.tolist() == [
        [0, 1, 2, 0, 1, 2, 3],
        [0, 1, 2, 0, 1, 2, 3],
        [0, 1, 0, 1, 0, 1, 2],
    ]


def test_what_would_compute_another_attention_is_refused(build):
    """Masks with holes, documents that the mask does not have, dropout and learned sinks."""
    model = attach(build(), "lssar", 15.0)
    with_hole = torch.ones_like(x)
    with_hole[0, 3] = 0
    with pytest.raises(UserError, match="mask is neither causal nor"):
        model(x, attention_mask=with_hole)
    packed = torch.arange(10).repeat(2, 2)
    with pytest.raises(UserError, match="position_ids restart within a document of the"):
        model(x, position_ids=packed, use_cache=True)
    attention = model.model.layers[0].self_attn
    q, k, v = torch.randn(3, 1, 4, 5, 8)
    with pytest.raises(UserError, match=r"learned sinks \(s_aux\) are not supported"):
        attend(attention, q, k, v, None, s_aux=torch.zeros(4))
    with pytest.raises(UserError, match="a bias for each pair of positions"):  # Inkling's
        attend(attention, q, k, v, None, position_bias=torch.zeros(1, 4, 5, 5))
    with pytest.raises(UserError, match="have 8 numbers and its values 6, where both must have 8"):
        attend(attention, q, k, v[..., :6], None)
    with pytest.raises(UserError, match="multi-head latent attention is not supported"):
        attend(attention, *torch.randn(3, 1, 4, 5, 16), None)
    attention.attention_dropout = 0.1
    model(x)
    model.train()
    with pytest.raises(UserError, match=r"dropout .* \(0.1\) .* attention_dropout"):
        model(x)


def test_what_a_variant_needs_is_refused_at_once(build):
    for name, settings, says in (
        ("asentmax", {}, "attention = 'asentmax' reads the layer's input"),
        ("lssa", {"window": 4}, "the window and the soft cap are the model's: set them in its"),
        ("lss", {}, r"attention = 'lss'; did you mean lssa\?"),
        ("lssar", {"p": 0.5}, "p = 0.5 must be at least 1"),
    ):
        model = build()
        with pytest.raises(UserError, match=says):
            attach(model, name, **settings)
    encoder = build()
    encoder.model.layers[1].self_attn.is_causal = False
    for model in (encoder, nn.Linear(2, 2)):
        with pytest.raises(UserError, match="all of its attention must be causal"):
            attach(model, "softmax")


def test_a_saved_model_is_loaded_as_on_the_page_and_not_measured_without_its_variant(
    tmp_path, monkeypatch
):
    """With tied weights, which a file has once."""
    transformers = pytest.importorskip("transformers")
    from scripts.common.hf_models import read_model

    monkeypatch.setattr(sys, "path", [*sys.path])
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    model = attach(transformers.AutoModelForCausalLM.from_config(config), "ssmax", s=0.3).eval()
    model.model.layers[1].self_attn.variant.s.data.fill_(0.7)
    model.save_pretrained(tmp_path)
    scope = {"folder": str(tmp_path), "attach": attach}
    scope["AutoModelForCausalLM"] = transformers.AutoModelForCausalLM
    exec(textwrap.dedent(next(block for block in BLOCKS if "load_model" in block)), scope)
    torch.testing.assert_close(scope["model"].eval()(x).logits, model(x).logits)
    with pytest.raises(UserError, match="was saved after attach"):
        read_model(f"hf:{tmp_path}", None)


@torch.no_grad()
def test_a_window_that_only_the_mask_has():
    """Qwen2-MoE's layers do not pass their window, which varlen_attn has to know."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2MoeConfig(
        **SIZES,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention"] * 2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    expected = model(x).logits
    attach(model, "softmax")
    torch.testing.assert_close(model(x).logits, expected)
    windows = [layer.self_attn.variant.window for layer in model.model.layers]
    assert windows == [6, 6]


def test_a_model_with_attention_code_of_its_own_is_refused():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    falcon = transformers.FalconConfig(**sizes, vocab_size=50)
    with pytest.raises(UserError, match="transformers cannot replace its attention"):
        attach(transformers.FalconForCausalLM(falcon), "softmax")
