"""How q, k and v come from the input of a layer, and what the cache keeps of k and v."""

import math
from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor

from attention_paths.factored import Factors
from config import Config

Transform = Callable[[Tensor], Tensor]  # QK norm, then RoPE, of x [B, .., L, d]


class LinearProjections:
    """q, k and v are linear in the input; the cache keeps k, after RoPE, and v."""

    def __init__(self, config: Config) -> None:
        self.heads = config.n_head, config.kv_heads, config.kv_heads  # of q, k and v
        self.columns = sum(self.heads) * config.d_head
        self.products = 0  # multiplications per token besides products with weights

    def split(self, u: Tensor, to_q: Transform, to_k: Transform) -> tuple[Tensor, list[Tensor]]:
        """q [B, H, L, d] and what is cached, k and v [B, Hk, L, d], from u [B, L, columns]."""
        heads = u.unflatten(-1, (sum(self.heads), -1)).transpose(1, 2)
        q, k, v = heads.split(self.heads, dim=1)
        return to_q(q), [to_k(k), v]

    def of_heads(self, cached: list[Tensor], heads: slice) -> list[Tensor]:
        """The keys and values that serve these heads of q."""
        group = self.heads[0] // self.heads[1]
        return [x[:, heads.start // group : heads.stop // group] for x in cached]

    def keys_and_values(self, cached: list[Tensor], decoding: bool) -> list[Tensor]:
        return cached


class TensorProductProjections:
    """Tensor Product Attention (Zhang et al. 2025): q, k and v are means of R outer products.

    In q = 1/R sum_r a_r b_r^T, a_r [H] and b_r [d] are linear in the input. RoPE acts on b_r, which
    is the same as on q. The cache keeps the factors of k and v: 2 R (H + d) numbers a position.
    """

    def __init__(self, config: Config) -> None:
        self.n_head, self.head_size = config.n_head, config.d_head
        self.q_rank, self.kv_rank = config.q_rank, config.kv_rank
        kv = [self.kv_rank * self.n_head, self.kv_rank * self.head_size]
        if self.q_rank is None:  # the paper's KVonly: q is linear in the input
            q = [self.n_head * self.head_size]
        else:
            q = [self.q_rank * self.n_head, self.q_rank * self.head_size]
        self.sizes = q + kv + kv
        self.columns = sum(self.sizes)
        ranks = (self.q_rank or 0) + 2 * self.kv_rank
        self.products = ranks * self.n_head * self.head_size

    @torch.no_grad()
    def initialise(self, weight: Tensor) -> None:
        """Xavier's uniform weights in place, [columns, n_embd].

        As in the authors' code, torch counts the inputs and outputs of a as a tensor [n_embd, H, R]
        and of b as [n_embd, R, d]: R (n_embd + H) and d (n_embd + R) of them.
        """
        H, d, n = self.n_head, self.head_size, weight.shape[1]
        fans = [n + H * d] if self.q_rank is None else []
        for R in (self.q_rank, self.kv_rank, self.kv_rank):
            fans += [] if R is None else [R * (n + H), d * (n + R)]
        for part, fan in zip(weight.split(self.sizes), fans, strict=True):
            nn.init.uniform_(part, -math.sqrt(6 / fan), math.sqrt(6 / fan))

    def split(self, u: Tensor, to_q: Transform, to_k: Transform) -> tuple[Tensor, list[Tensor]]:
        """q [B, H, L, d] and what is cached, the factors of k and v, each [B, R, L, H or d]."""
        *q_parts, a_k, b_k, a_v, b_v = u.split(self.sizes, dim=-1)

        def by_rank(part: Tensor, rank: int) -> Tensor:
            return part.unflatten(-1, (rank, -1)).transpose(1, 2)

        if self.q_rank is None:
            q = to_q(by_rank(q_parts[0], self.n_head))
        else:
            a_q, b_q = (by_rank(part, self.q_rank) for part in q_parts)
            q = Factors(a_q / self.q_rank, to_q(b_q)).expand()
        a_k, b_k, a_v, b_v = (by_rank(part, self.kv_rank) for part in (a_k, b_k, a_v, b_v))
        return q, [a_k / self.kv_rank, to_k(b_k), a_v / self.kv_rank, b_v]

    def of_heads(self, cached: list[Tensor], heads: slice) -> list[Tensor]:
        """All factors: the settings refuse 'tpa' with heads in two parts."""
        return cached

    def keys_and_values(self, cached: list[Tensor], decoding: bool) -> list[Factors] | list[Tensor]:
        """k and v [B, H, Lk, d], or, for the single query of `decoding`, their factors."""
        a_k, b_k, a_v, b_v = cached
        factors = [Factors(a_k, b_k), Factors(a_v, b_v)]
        return factors if decoding else [x.expand() for x in factors]


def build_projections(config: Config) -> LinearProjections | TensorProductProjections:
    if config.projections == "tpa":
        return TensorProductProjections(config)
    return LinearProjections(config)
