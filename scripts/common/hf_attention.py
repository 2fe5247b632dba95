"""The attention of a model of transformers, a tile of queries at a time.

transformers lets a model use a custom attention function and mask. Here the mask is built for one
tile at a time, so that memory is O(L), and can be narrowed to a window. The matrix products, and
each layer's window, sinks and soft cap, still come from transformers.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from errors import UserError

NAME = "tiles"  # of the attention, in config._attn_implementation
QUERIES = 256
# Features that transformers' SDPA lacks: a soft cap of the scores, and learned sinks.
EAGER_ONLY = ("softcap", "s_aux")

# The mask of a kind of layers: from the numbers of queries and of keys, and the first query, to
# bool [B, 1, queries, keys], True where a query sees a key.
MakeMask = Callable[..., Tensor]


@dataclass
class Tiles:
    """How the attention layers of a model compute, and what records the weights of some."""

    window: int | None = None  # the most last keys that a query sees in any layer
    # called for each tile of a layer with its weights [B, H, queries, L] and the visible keys
    recorders: dict[nn.Module, Callable[[Tensor, Tensor], None]] = field(default_factory=dict)


def use_tiles(model: nn.Module) -> Tiles:
    """Let a model of transformers compute its attention in tiles, as the returned Tiles say."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lazy_mask)
    tiles = Tiles()
    for layer in attention_layers(model):
        layer.tiles = tiles  # type: ignore[assignment]
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    return tiles


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that transformers' interface may let compute another attention."""
    return [module for module in model.modules() if hasattr(module, "is_causal")]


def lazy_mask(**options: Any) -> MakeMask | None:
    """Return a function that makes the layers' mask; None if the mask is just causal."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if options["mask_function"] is causal_mask_function and options["attention_mask"] is None:
        return None
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    make_mask: Any = functools.partial(sdpa_mask, **options)
    return make_mask


def attend(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: MakeMask | None, **options: Any
) -> tuple[Tensor, None]:
    """The output [B, L, H, d] of queries [B, H, L, d], as transformers calls an attention.

    Raises UserError for a position_bias, which is added to the score of each query and key.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if options.get("position_bias") is not None:
        raise UserError("a bias for each pair of positions cannot be computed in tiles")
    tiles: Tiles = layer.tiles
    L = q.shape[2]
    needs_eager = any(options.get(name) is not None for name in EAGER_ONLY)
    record = tiles.recorders.get(layer)
    compute: Any
    if needs_eager or record is not None:
        compute = eager_attention
    elif mask is None and (tiles.window is None or tiles.window >= L):
        return sdpa_attention_forward(layer, q, k, v, None, **options)
    else:
        compute = sdpa_attention_forward
    outputs = []
    for start in range(0, L, QUERIES):
        stop = min(L, start + QUERIES)
        visible = visible_keys(mask, tiles.window, start, stop, q.device)
        first = int(visible.any(-2).flatten(0, -2).any(0).int().argmax())  # the first key in view
        keys = slice(first, stop)
        tile = (q[:, :, start:stop], k[:, :, keys], v[:, :, keys])
        y, A = compute(layer, *tile, visible[..., keys], **options)
        outputs.append(y)
        if record is not None:
            record(F.pad(A.float(), (first, L - stop)), visible)
    return torch.cat(outputs, dim=1), None


def visible_keys(
    mask: MakeMask | None, window: int | None, start: int, stop: int, device: torch.device
) -> Tensor:
    """Which keys [B or 1, 1, queries, stop] the queries from `start` to `stop` see."""
    positions = torch.arange(stop, device=device)
    distance = positions[start:, None] - positions
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    visible = visible[None, None]
    if mask is not None:
        visible = visible & mask(q_length=stop - start, kv_length=stop, q_offset=start)
    return visible


def eager_attention(
    layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """The output and the weights by the attention in the file of the layer's model.

    That function adds its mask to the scores.
    """
    forward = sys.modules[type(layer).__module__].eager_attention_forward
    lowest = torch.finfo(q.dtype).min
    mask = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, lowest)
    return forward(layer, q, k, v, mask, **options)
