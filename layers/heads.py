"""The attention of a layer's heads, built from a Config and checked."""

from collections.abc import Callable

from attention import VARIANTS, Variant
from attention_paths.module import Attention
from config import Config
from errors import UserError, check_choice

# Which variants take a setting, and why the others do not.
TAKES: dict[str, tuple[Callable[[Variant], bool], str]] = {
    "p": (lambda v: v.takes_p, "re-weighting needs l1 and weights that are never negative"),
    "sink": (lambda v: v.takes_sink, "it needs l1, and a phi that is >= 0, and > 0 at 0"),
    "s_init": (lambda v: "s" in v.learnable, "it is the first value of a learned s"),
}


def build_attentions(config: Config, layer: int) -> list[Attention]:
    """Build a layer's attention modules: one or, with both kinds of heads of a hybrid, two.

    With a local_window the heads with positions are softmax over that many keys, whatever attention
    the heads without positions have. Raises UserError if settings contradict the variant.
    """
    check_settings(config)
    if config.local_window is None:
        return [build_heads(config, range(config.n_head), config.layer_window(layer))]
    local_config = config.replace(attention="softmax", p=None)
    all_heads = range(config.n_head)
    nope_heads = config.nope_heads(layer)
    groups = []
    if nope_heads > 0:
        groups.append(build_heads(config, all_heads[:nope_heads], config.layer_window(layer)))
    if nope_heads < config.n_head:
        local = build_heads(local_config, all_heads[nope_heads:], config.local_window)
        local.is_local = True
        groups.append(local)
    return groups


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
    return len([head for head in heads if head >= config.nope_heads()])


def check_settings(config: Config) -> None:
    """Raise UserError for an unknown variant, and for a setting that the variant does not take."""
    check_choice("attention", config.attention, VARIANTS)
    variant = VARIANTS[config.attention]
    for key, (takes, reason) in TAKES.items():
        value = getattr(config, key)
        if value == getattr(Config, key) or takes(variant):
            continue
        able = [name for name, other in VARIANTS.items() if takes(other)]
        raise UserError(
            f"attention = {config.attention!r} does not support {key} = {value}: {reason}, as in "
            f"{', '.join(able)}"
        )
