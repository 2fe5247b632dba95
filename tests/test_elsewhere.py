"""docs/elsewhere.md: variants in other people's models."""

import copy
import re
import sys

import pytest
import torch
import torch.nn as nn

from attention import VARIANTS
from attention_paths.elsewhere import attach, attend, read_positions
from attention_paths.reference import ReferenceAttention
from errors import UserError
from tests.runs import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/elsewhere.md").read_text(), re.S)
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
    config = type("GPTConfig", (), {"n_head": 2, "n_embd": 16, "block_size": 32})
    exec(source, scope := {"torch": torch})
    q, k, v = torch.randn(3, 2, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    expected = ReferenceAttention(VARIANTS["lssar"], 2, 8, 32, p=15.0)(q, k, v)
    torch.testing.assert_close(scope["CausalSelfAttention"](config)(q, k, v), expected)


@pytest.fixture(params=["Llama", "Qwen3", "Gemma2"])
def build(request):
    transformers = pytest.importorskip("transformers")
    sliding = {"sliding_window": 6} if request.param == "Gemma2" else {}
    config = getattr(transformers, f"{request.param}Config")(**SIZES, **sliding)

    def new() -> nn.Module:
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()

    return new


def generated(model, prompts=x, mask=None, **options):
    return model.generate(
        prompts,
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        attention_mask=torch.ones_like(prompts) if mask is None else mask,
        disable_compile=True,
        **options,
    )


def test_softmax_is_the_models_own_attention(build):
    """With its scale, sliding window and soft-capping."""
    torch.testing.assert_close(attach(build(), "softmax")(x).logits, build()(x).logits)


@pytest.mark.parametrize("name, p", [("lssar", 15.0), ("ssmax", None)])
def test_variants_train_and_generate(build, name, p):
    model = attach(build(), name, p)
    model(x, labels=x).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    learned = [key for key, _ in model.named_parameters() if key.endswith("self_attn.variant.s")]
    assert len(learned) == (2 if name == "ssmax" else 0)
    assert not torch.allclose(model(x).logits, build()(x).logits, atol=1e-4)
    rest = model(x[:, 12:], past_key_values=model(x[:, :12]).past_key_values).logits
    torch.testing.assert_close(rest, model(x).logits[:, 12:])
    whole = generated(model, use_cache=False)
    assert torch.equal(generated(model), whole)
    assert torch.equal(generated(model, cache_implementation="static"), whole)


@torch.no_grad()
@pytest.mark.parametrize("name, p", [("lssar", 15.0), ("ssmax", None)])
def test_padding_and_packed_documents_change_nothing(build, name, p):
    """With a cache, too, and one that has room for later keys."""
    model = attach(build().double(), name, p)
    lengths = [9, 20, 11]
    prompts = x.repeat(2, 1)[:3]
    mask = (torch.arange(24) < torch.tensor(lengths)[:, None]).long()  # all are padded
    right = torch.cat((prompts, x.new_zeros(3, 4)), dim=1)
    left = torch.stack([row.roll(24 - n) for row, n in zip(right, lengths, strict=True)])
    alone = [model(row[None, :n]).logits[0] for row, n in zip(right, lengths, strict=True)]

    on_the_right = model(right, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(on_the_right, torch.cat(alone))
    mask = mask.flip(1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    on_the_left = model(left, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    torch.testing.assert_close(on_the_left, torch.cat(alone))
    packed = {"input_ids": left[mask.bool()][None], "position_ids": positions[mask.bool()][None]}
    torch.testing.assert_close(model(**packed, use_cache=False).logits[0], torch.cat(alone))

    for options in ({"use_cache": False}, {}, {"cache_implementation": "static"}):
        texts = generated(model, left, mask, **options)
        for text, row, n in zip(texts, right, lengths, strict=True):
            assert torch.equal(text[24 - n :], generated(model, row[None, :n])[0])


def test_padding_is_one_document():
    """varlen_attn has room for few documents."""
    is_token = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0]])
    mask = torch.ones(7, 7).tril() * is_token[:, None] * is_token[..., None]
    positions = read_positions(mask.bool(), None, None)
    assert positions.tolist() == [
        [0, 1, 2, 0, 1, 2, 3],
        [0, 1, 2, 0, 1, 2, 3],
        [0, 1, 0, 1, 0, 1, 2],
    ]


def test_what_would_compute_another_attention_is_refused(build):
    """Masks with holes, documents that the mask does not have, dropout and learned sinks."""
    model, hole = attach(build(), "lssar", 15.0), torch.ones_like(x)
    hole[0, 3] = 0
    with pytest.raises(UserError, match="mask is neither causal nor"):
        model(x, attention_mask=hole)
    packed = torch.arange(10).repeat(2, 2)
    with pytest.raises(UserError, match="position_ids restart within a document of the"):
        model(x, position_ids=packed, use_cache=True)
    attention, (q, k, v) = model.model.layers[0].self_attn, torch.randn(3, 1, 4, 5, 8)
    with pytest.raises(UserError, match="dropout and learned sinks"):
        attend(attention, q, k, v, None, s_aux=torch.zeros(4))
    attention.attention_dropout = 0.1
    model(x)
    with pytest.raises(UserError, match="dropout and learned sinks"):
        model.train()(x)


def test_what_a_variant_needs_is_refused_at_once(build):
    refusals = [("asentmax", {}, "layer's"), ("lssa", {"window": 4}, "cap"), ("lss", {}, "lssa")]
    for name, settings, says in refusals:
        with pytest.raises(UserError, match=says):
            attach(build(), name, **settings)
    encoder = build()
    encoder.model.layers[1].self_attn.is_causal = False
    for model in (encoder, nn.Linear(2, 2)):
        with pytest.raises(UserError, match="all of its attention must be causal"):
            attach(model, "softmax")
