"""Attention layers in which some heads have no positions, such as hybrids."""

from dataclasses import replace

import torch
from torch import Tensor

from attention_paths.module import Attention
from attention_paths.reference import Context
from config import Config
from layers.cache import KVCache
from layers.heads import build_attentions
from layers.rope import Rotation
from model import SelfAttention


class HybridAttention(SelfAttention):
    """Self-attention whose first `nope_heads` heads use no positional encoding (NoPE).

    With a local_window the other heads are softmax over the last `local_window` keys: `local`
    computes them or, in a layer without NoPE heads, `attention` computes all heads so.
    """

    local: Attention | None

    def add_attention(self, config: Config, layer: int) -> None:
        self.attention, *others = build_attentions(config, layer)
        self.local = others[0] if others else None

    def attentions(self) -> list[Attention]:
        if self.local is None:
            return [self.attention]
        return [self.attention, self.local]

    def apply_rope(self, x: Tensor, rotation: Rotation) -> Tensor:
        if self.nope_heads == 0:
            return super().apply_rope(x, rotation)
        nope_heads = self.nope_heads * x.shape[1] // self.n_head  # x may be grouped keys
        rotated = super().apply_rope(x[:, nope_heads:], rotation)
        return join_heads(x[:, :nope_heads], rotated)

    def context(
        self,
        x: Tensor,
        rotation: Rotation | None,
        document_positions: Tensor | None,
    ) -> Context:
        """Return SelfAttention.context, but without YaRN's factor on heads without positions."""
        context = super().context(x, rotation, document_positions)
        is_scaled = isinstance(context.score_scale, Tensor) or context.score_scale != 1.0
        if self.nope_heads == 0 or not is_scaled:
            return context
        head = torch.arange(self.n_head, device=x.device)[:, None, None]
        has_rope = (head >= self.nope_heads)[None]  # [1, H, 1, 1]
        dtype = torch.promote_types(x.dtype, torch.float32)
        score_scale = torch.as_tensor(context.score_scale, dtype=dtype, device=x.device)
        return replace(context, score_scale=torch.where(has_rope, score_scale, 1.0))

    def attend(
        self,
        attention: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        cache: KVCache | None,
    ) -> Tensor:
        if self.local is None:
            return super().attend(attention, q, k, v, context, cache)
        H = self.nope_heads
        Hk = H * self.n_kv_head // self.n_head
        y_global = super().attend(
            attention,
            q[:, :H],
            k[:, :Hk],
            v[:, :Hk],
            context.select(heads=slice(H)),
            cache,
        )
        y_local = super().attend(
            self.local,
            q[:, H:],
            k[:, Hk:],
            v[:, Hk:],
            context.select(heads=slice(H, None)),
            cache,
        )
        return join_heads(y_global, y_local)


def join_heads(*groups: Tensor) -> Tensor:
    """Concatenate heads [B, H, L, d], in memory as [B, L, H, d]: `rotate` says why."""
    by_position = [group.transpose(1, 2) for group in groups]
    return torch.cat(by_position, dim=2).transpose(1, 2)
