"""A variant of attention.py in a model of Hugging Face's transformers; see docs/elsewhere.md."""

from typing import Any

import torch
from torch import Tensor

from attention import VARIANTS
from attention_paths.module import Attention
from attention_paths.reference import Context
from errors import UserError, check_choice

NAME = "attention_paths"  # of the attention, in config._attn_implementation


def attach(model: Any, name: str, p: float | None = None, **settings: Any) -> Any:
    """Let every causal self-attention of a transformers model use a variant; returns the model.

    Each layer gets a module `variant` with the variant's learned scalars, such as SSMax's s, so
    attach it before the optimizer is made. `settings` are those of Attention, such as
    trained_length (by default config.max_position_embeddings), without a window or soft cap: they
    are the model's. Raises UserError for a variant that needs more than queries, keys and values,
    and for a model whose attention is not causal.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if settings.keys() & {"window", "softcap"}:
        raise UserError("the window and the soft cap are the model's: set them in its config")
    check_choice("attention", name, VARIANTS)
    variant = VARIANTS[name]
    if variant.from_input:
        raise UserError(f"attention = {name!r} reads the layer's input")
    if p and not variant.takes_p:
        raise UserError(f"attention = {name!r} cannot have p = {p}")
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "is_causal")]
    if not layers or not all(layer.is_causal for layer in layers):
        raise UserError(f"{type(model).__name__}: all of its attention must be causal")
    for layer in layers:
        config = layer.config
        heads = config.num_attention_heads
        head_size = getattr(layer, "head_dim", config.hidden_size // heads)
        layer_settings = {"trained_length": config.max_position_embeddings} | settings
        attention = Attention(variant, heads, head_size, p=p, **layer_settings)
        layer.variant = attention.to(next(layer.parameters()).device)
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, whole_mask)
    model.set_attn_implementation(NAME)
    return model


def whole_mask(*arguments: Any, **options: Any) -> Tensor | None:
    """The mask [B or 1, 1, Lq, Lk] of a model's layers, True where a query sees a key."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*arguments, **(options | {"allow_is_causal_skip": False}))


def attend(
    layer: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The output [B, L, H, d] of queries [B, H, L, d], as transformers calls an attention.

    Raises UserError for dropout, for learned sinks, and for a mask that is not causal, as with
    padding or packed documents: the formulas count the keys that a row sees.
    """
    attention = layer.variant
    if dropout or s_aux is not None:
        raise UserError("dropout and learned sinks (s_aux) do not go with a variant's formulas")
    attention.window = sliding_window
    attention.softcap = softcap
    if mask is not None:
        # a static cache has room for keys that are not there yet
        length = int(mask[0, 0, -1].nonzero().max()) + 1
        k = k[:, :, :length]
        v = v[:, :, :length]
        mask = mask[..., :length]
        positions = torch.arange(length, device=q.device)
        distance = positions[-q.shape[2] :, None] - positions
        causal = (distance >= 0) & (distance < (sliding_window or length))
        if not torch.equal(mask.bool(), causal.expand_as(mask)):
            raise UserError(
                "the attention mask is not causal: give sequences of one length without padding, "
                "and no packed documents"
            )
    scale = 1.0 if scaling is None else scaling * q.shape[-1] ** 0.5
    out = attention(q, k, v, Context(score_scale=scale))
    return out.transpose(1, 2), None
