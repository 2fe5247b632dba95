"""The attention of a layer's heads, built from a Config and checked; in a hybrid in two parts."""

from collections.abc import Callable

from attention import VARIANTS, Variant
from attention_paths.fingerprint import fingerprint
from attention_paths.module import Attention
from config import Config
from errors import UserError, check_choice

# Settings that some variants take: which, and why the others do not.
TAKES: dict[str, tuple[Callable[[Variant], bool], str]] = {
    "p": (lambda v: v.takes_p, "re-weighting needs l1 and weights that are never negative"),
    "sink": (lambda v: v.takes_sink, "a sink shares l1 with keys whose weights are never 0"),
    "s_init": (lambda v: "s" in v.learnable, "it is the first value of a learned s"),
    "b_init": (lambda v: "b" in v.learnable, "it is the first value of a learned b"),
    "gamma": (lambda v: "gamma" in v.constants, "it is a constant of a formula"),
}


def build_attention(config: Config, heads: range) -> Attention:
    """The attention of these heads of a layer."""
    alibi = [h for h in heads if h >= config.nope_heads() and config.positions == "alibi"]
    return Attention(
        VARIANTS[config.attention],
        len(heads),
        config.d_head,
        config.block_size,
        p=config.p,
        window=config.window,
        softcap=config.softcap,
        alibi_heads=len(alibi),
        sink=config.sink,
        scalars={"s": config.s_init, "b": config.b_init, "gamma": config.gamma},
        impl=config.attention_impl,
    )


def build_parts(config: Config, layer: int = -1) -> tuple[Attention, Attention | None]:
    """The attention of a layer's heads or, where they differ, of the first heads and of the others.

    With a local_window the heads with positions are softmax over that many keys, whatever attention
    the heads without positions have; the default layer has such heads. Raises UserError where
    settings contradict the variant.
    """
    check_choice("attention", config.attention, VARIANTS)
    check_settings(config, VARIANTS[config.attention])
    heads = range(config.n_head)
    parts = [(config, heads)]
    if config.local_window is not None:
        local = config.replace(attention="softmax", p=None, window=config.local_window)
        split = config.nope_heads(layer)
        parts = [(config, heads[:split]), (local, heads[split:])]
    first, *others = [build_attention(settings, heads) for settings, heads in parts if heads]
    return first, others[0] if others else None


def formulas_hash(config: Config) -> str:
    """The fingerprint of the formulas of a layer's attention."""
    local = [VARIANTS["softmax"]] if config.local_window else []
    return fingerprint(VARIANTS[config.attention], *local)


def check_settings(config: Config, variant: Variant) -> None:
    """Raise UserError for a setting that the variant does not take."""
    for key, (takes, reason) in TAKES.items():
        value = getattr(config, key)
        if value != getattr(Config, key) and not takes(variant):
            able = ", ".join(name for name, other in VARIANTS.items() if takes(other))
            raise UserError(
                f"attention = {config.attention!r} takes no {key} ({key} = {value}): {reason}, as "
                f"in {able}"
            )
