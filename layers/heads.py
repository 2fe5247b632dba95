"""The attention of a layer's heads, built from a Config and checked."""

import functools

from attention import VARIANTS
from attention_paths.module import Attention
from config import Config
from errors import check_choice


def build_attentions(config: Config, layer: int) -> list[Attention]:
    """Build a layer's attention modules: one or, with both kinds of heads of a hybrid, two.

    With a local_window the heads with positions are softmax over that many keys, whatever attention
    the heads without positions have. Raises UserError if settings contradict the variant.
    """
    check_choice("attention", config.attention, VARIANTS)
    all_heads = range(config.n_head)
    window = config.layer_window(layer)
    if config.local_window is None:
        return [build_heads(config, all_heads, window)]
    nope_heads = config.nope_heads(layer)
    groups = []
    if nope_heads > 0:
        groups.append(build_heads(config, all_heads[:nope_heads], window))
    if nope_heads < config.n_head:
        local = build_heads(local_config(config), all_heads[nope_heads:], config.local_window)
        local.is_local = True
        groups.append(local)
    return groups


@functools.cache  # building a Config reads the tokenizer's file: all layers share this Config
def local_config(config: Config) -> Config:
    """Return the config of a hybrid's heads with positions: softmax, without re-weighting."""
    return config.replace(attention="softmax", p=None, s_init=Config.s_init)


def check_attention(config: Config) -> None:
    """Raise UserError if settings contradict the attention, by building every layer's."""
    for layer in range(config.n_layer):
        build_attentions(config, layer)


def build_heads(config: Config, heads: range, window: int | None) -> Attention:
    """Build the attention of these heads of a layer.

    To use a subclass of Attention, construct it here (docs/variants.md).
    """
    return Attention(
        VARIANTS[config.attention],
        len(heads),
        config.d_head,
        config.block_size,
        p=config.p,
        window=window,
        softcap=config.softcap,
        alibi_heads=alibi_heads(config, heads),
        sink=config.sink,
        s=config.s_init,
        impl=config.attention_impl,
    )


def alibi_heads(config: Config, heads: range) -> int:
    """How many of these heads of a layer have ALiBi."""
    if config.positions != "alibi":
        return 0
    nope_heads = config.nope_heads(layer=0)  # of every layer: nope_every needs RoPE
    return sum(head >= nope_heads for head in heads)
