"""A variant of attention.py in a model of Hugging Face's transformers; see docs/elsewhere.md."""

from typing import Any

import torch
from torch import Tensor

from attention import VARIANTS
from attention_paths.module import Attention
from attention_paths.reference import Context
from errors import UserError, check_choice

NAME = "attention_paths"  # of the attention, in config._attn_implementation
# The attribute of the model's config with the arguments of `attach`: save_pretrained writes it to
# config.json, because the weights do not tell which attention they were trained with.
ATTACHED = "attached_variant"


def attach(model: Any, name: str, p: float | None = None, **settings: Any) -> Any:
    """Let every causal self-attention of a transformers model use a variant; returns the model.

    Each layer gets a module `variant` with the variant's learned scalars, such as SSMax's s, so
    call this before the optimizer is made. `settings` are arguments of Attention, such as
    trained_length (by default config.max_position_embeddings); window and softcap are refused,
    because the model sets them. Raises UserError for a variant that needs more than queries, keys
    and values, and for a model whose attention is not causal.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if settings.keys() & {"window", "softcap"}:
        raise UserError("the window and the soft cap are the model's: set them in its config")
    check_choice("attention", name, VARIANTS)
    variant = VARIANTS[name]
    if variant.from_input:
        raise UserError(
            f"attention = {name!r} reads the layer's input, but transformers gives an attention "
            "q, k and v alone"
        )
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
    if any(layer.config._attn_implementation != NAME for layer in layers):
        raise UserError(
            f"{type(model).__name__}: transformers cannot replace its attention, whose code is in "
            "the model's own layers"
        )
    setattr(model.config, ATTACHED, {"name": name, "p": p} | settings)
    return model


def whole_mask(*arguments: Any, **options: Any) -> Tensor | None:
    """The mask [B or 1, 1, Lq, Lk] of a model's layers, True where a query sees a key."""
    from transformers.masking_utils import sdpa_mask

    mask: Any = sdpa_mask(*arguments, **(options | {"allow_is_causal_skip": False}))
    mask.readings = {}  # by window: see read_mask
    return mask


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

    In the formulas, n counts the keys that the mask shows to a query, without padding and other
    documents. Raises UserError for dropout, for learned sinks, for a position_bias, for a mask that
    is not causal within documents, and for heads whose values are not as wide as queries and keys.
    """
    attention = layer.variant
    if dropout:
        raise UserError(
            f"dropout of attention weights ({dropout}) is not supported: set the model's "
            "attention_dropout (GPT-2: attn_pdrop) to 0 in the config that it is built from"
        )
    if s_aux is not None:
        raise UserError("learned sinks (s_aux) are not supported")
    if options.get("position_bias") is not None:
        raise UserError("a bias for each pair of positions is not supported")
    if not q.shape[-1] == v.shape[-1] == attention.head_size:
        raise UserError(
            f"{type(layer).__name__}: a head's queries have {q.shape[-1]} numbers and its values "
            f"{v.shape[-1]}, where both must have {attention.head_size}: multi-head latent "
            "attention is not supported"
        )
    window = sliding_window
    document_positions = None
    if mask is not None:
        length, window, positions = read_mask(mask, window, options.get("position_ids"))
        k = k[:, :, :length]
        v = v[:, :, :length]
        if positions is not None:
            document_positions = positions.expand(len(q), -1)
    attention.window = window
    attention.softcap = softcap
    scale = 1.0
    if scaling is not None and not attention.variant.l2_normalise:
        scale = scaling * q.shape[-1] ** 0.5
    context = Context(score_scale=scale, document_positions=document_positions)
    return attention(q, k, v, context).transpose(1, 2), None


def read_mask(
    mask: Tensor, window: int | None, position_ids: Tensor | None
) -> tuple[int, int | None, Tensor | None]:
    """Return `count_keys`, the window and `read_positions` of a mask [B or 1, 1, Lq, Lk].

    On a GPU the host waits for both, so a mask of `whole_mask`, which all layers share, is read
    once, in the first layer.
    """
    readings = getattr(mask, "readings", {})
    if window not in readings:
        # a mask of floats is added to scores: 0 where a query sees a key
        visible = mask[:, 0] == 0 if mask.is_floating_point() else mask[:, 0].bool()
        length = count_keys(visible)
        positions = read_positions(visible[..., :length], window, position_ids)
        readings[window] = length, window or window_of(positions), positions
    return readings[window]


def window_of(positions: Tensor | None) -> int | None:
    """The window of a mask whose layer was not told of it, as in Qwen2-MoE; None without a window.

    At the window's end positions [B, Lq] stop counting. varlen_attn, which knows the first tokens
    of documents alone, would show all earlier keys.
    """
    if positions is None:
        return None
    later = positions[:, 1:]
    stopped = later[(later == positions[:, :-1]) & (later > 0)]
    return int(stopped[0]) + 1 if len(stopped) else None


def count_keys(mask: Tensor) -> int:
    """Return how many keys of a mask [B, Lq, Lk] are in use: a static cache has room for more.

    The last key that a query sees is its own position, unless the query is padding on the right.
    """
    query = torch.arange(mask.shape[1], device=mask.device)
    key = torch.arange(mask.shape[2], device=mask.device)
    last_key = torch.where(mask.any(0), key, -1).amax(1)
    return int((last_key - query).max()) + mask.shape[1]


def read_positions(
    mask: Tensor,
    window: int | None,
    position_ids: Tensor | None,
) -> Tensor | None:
    """The position of each query in its document [B, Lq], from the mask of its keys [B, Lq, Lk].

    With a window it is at most window - 1. Padding is a document of its own. None: a sequence is
    one document. Raises UserError for a mask that is not causal within documents, and where
    position_ids restart within a document of the mask.
    """
    Lq, Lk = mask.shape[1:]
    is_token = mask.diagonal(Lk - Lq, dim1=1, dim2=2)  # a query that does not see itself is padding
    key = torch.arange(Lk, device=mask.device)
    query = key[:Lq]
    last_token = torch.where(is_token, query, -1).cummax(1).values
    # a run of padding is one document: varlen_attn takes few
    positions = torch.where(is_token, mask.sum(-1) - 1, query - last_token - 1)
    distance = key[-Lq:, None] - key
    visible = (distance >= 0) & (distance <= positions[..., None])
    if window is not None:
        visible &= distance < window
    if (is_token[..., None] & (mask != visible)).any():
        raise UserError(
            "the attention mask is neither causal nor, with padding or packed documents, causal "
            "within each document"
        )
    if position_ids is not None and ((position_ids == 0) & is_token & (positions > 0)).any():
        raise UserError(
            "position_ids restart within a document of the attention mask: transformers masks "
            "packed documents where use_cache=False and there is no attention_mask"
        )
    in_one_document = key[-Lq:].clamp_max((window or Lk) - 1)
    if (positions == in_one_document).all():
        return None
    return positions
