"""Tensor Product Attention (Zhang et al. 2025), the attention layer of T6."""

import math
from dataclasses import replace

import torch
import torch.nn as nn
from torch import Tensor

from attention_paths.factored import Factors
from attention_paths.module import Attention
from attention_paths.reference import Context
from config import Config
from layers.cache import KVCache
from layers.rope import Rotation
from model import SelfAttention


class TensorProductAttention(SelfAttention):
    """Self-attention whose q, k and v are sums of outer products.

    In q = 1/R sum_r a_r b_r^T, a_r [H] and b_r [d] are linear in the input. RoPE rotates b_r, which
    is equivalent to rotating q. The cache keeps the factors of k and v: 2 R (H + d) values per
    position.
    """

    residual_std = 0.0  # the authors start c_proj at 0

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, layer)
        self.q_rank = config.q_rank  # None: q is linear in the input, the paper's KVonly
        self.kv_rank = config.kv_rank
        self.widths = self.projected_widths(config)
        ranks = (self.q_rank or 0) + 2 * self.kv_rank
        self.extra_multiplications = ranks * self.n_head * self.d_head

    @staticmethod
    def projected_widths(config: Config) -> list[int]:
        H = config.n_head
        d = config.d_head
        kv_widths = [config.kv_rank * H, config.kv_rank * d]
        if config.q_rank is None:
            q_widths = [H * d]
        else:
            q_widths = [config.q_rank * H, config.q_rank * d]
        return q_widths + kv_widths + kv_widths

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw the weights of the factors from Xavier's uniform distribution.

        The authors initialise a as a tensor [n_embd, H, R] and b as [n_embd, R, d], for which torch
        computes fan_in + fan_out as R (n_embd + H) and d (n_embd + R).
        """
        n_embd = self.c_attn.in_features
        fans = []
        for rank in (self.q_rank, self.kv_rank, self.kv_rank):
            if rank is None:
                fans.append(n_embd + self.n_head * self.d_head)
            else:
                fans.append(rank * (n_embd + self.n_head))
                fans.append(self.d_head * (n_embd + rank))
        weights = self.c_attn.weight.split(self.widths)
        for weight, fan in zip(weights, fans, strict=True):
            bound = math.sqrt(6 / fan)
            nn.init.uniform_(weight, -bound, bound)

    def project(  # type: ignore[override]
        self, x: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Factors, Factors]:
        """Return q [B, H, L, d], and the factors of k and v."""
        columns = self.c_attn(x).split(self.widths, dim=-1)
        *q_columns, a_k, b_k, a_v, b_v = columns
        if self.q_rank is None:
            q = split_rows(q_columns[0], self.n_head)
            if rotation is not None:
                q = self.apply_rope(q, rotation)
        else:
            a_q, b_q = q_columns
            q = self.make_factors(a_q, b_q, self.q_rank, rotation).expand()
        k = self.make_factors(a_k, b_k, self.kv_rank, rotation)
        v = self.make_factors(a_v, b_v, self.kv_rank, None)
        return q, k, v

    def make_factors(
        self,
        a: Tensor,
        b: Tensor,
        rank: int,
        rotation: Rotation | None,
    ) -> Factors:
        """Return the factors whose product is the mean over ranks, from a [B, L, R H], b [.., R d].

        b is turned by RoPE's rotation, if there is one.
        """
        b = split_rows(b, rank)
        if rotation is not None:
            b = self.apply_rope(b, rotation)
        return Factors(split_rows(a, rank) / rank, b)

    def attend(  # type: ignore[override]
        self,
        attention: Attention,
        q: Tensor,
        k: Factors,
        v: Factors,
        context: Context,
        cache: KVCache | None,
    ) -> Tensor:
        if cache is not None:
            new = (k.a, k.b, v.a, v.b, context.log_forget)
            a_k, b_k, a_v, b_v, log_forget = cache.append(attention, new)
            k = Factors(a_k, b_k)
            v = Factors(a_v, b_v)
            context = replace(context, log_forget=log_forget)
            if q.shape[2] == 1:  # a single query needs the factors only
                return attention(q, k, v, context)
        return attention(q, k.expand(), v.expand(), context)


def split_rows(x: Tensor, rows: int) -> Tensor:
    """View the last dimension of x [B, L, rows * columns] as a matrix: [B, rows, L, columns]."""
    return x.unflatten(-1, (rows, -1)).transpose(1, 2)
