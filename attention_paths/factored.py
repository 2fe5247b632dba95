"""Attention of a single query from the factors of keys and values, which T6's cache keeps."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention import attention_weights, l2_normalise
from attention_paths.reference import Context, ReferenceAttention


@dataclass(frozen=True)
class Factors:
    """Keys or values x_hj = sum_r a_rjh b_rj of all heads h, with b_rj [d] shared by the heads.

    a is [B, R, Lk, H] and b [B, R, Lk, d]. `dot`, `squared_norms` and `mix` do without
    x [B, H, Lk, d]: for a single query that takes fewer operations and reads less memory.
    """

    a: Tensor
    b: Tensor

    def expand(self) -> Tensor:
        """x, [B, H, Lk, d]."""
        return torch.einsum("brlh,brld->bhld", self.a, self.b)

    def dot(self, q: Tensor) -> Tensor:
        """The products [B, H, 1, Lk] of a single query of each head, [B, H, 1, d], with its x."""
        b_dot_q = self.b @ q.transpose(1, 2).mT  # [B, R, Lk, H]
        x_dot_q = (self.a * b_dot_q).sum(1)  # [B, Lk, H]
        return x_dot_q.mT[:, :, None]

    def squared_norms(self) -> Tensor:
        """|x|^2, [B, H, 1, Lk]: the sum over r and s of a_r a_s b_r . b_s.

        Where these terms cancel, only rounding error is left. The result is clamped to at least the
        size of that error, so that a normalised x is never much longer than 1.
        """
        a = self.a
        b = self.b
        most = (a.abs() * b.norm(dim=-1, keepdim=True)).sum(1).square()
        squares = torch.zeros_like(most)  # [B, Lk, H]
        for r in range(a.shape[1]):
            dots = (b * b[:, r, None]).sum(-1, keepdim=True)  # b_r . b_s, [B, R, Lk, 1]
            squares += a[:, r] * (a * dots).sum(1)
        smallest = 4 * torch.finfo(a.dtype).eps * most
        return squares.maximum(smallest).mT[:, :, None]

    def mix(self, weights: Tensor) -> Tensor:
        """The sums [B, H, 1, d] of x with the weights [B, H, 1, Lk] of a single query."""
        weights = weights.transpose(1, 2).mT  # [B, 1, Lk, H]
        weighted_a = (weights * self.a).to(self.b.dtype)  # [B, R, Lk, H]
        by_rank = weighted_a.mT @ self.b  # [B, R, H, d]
        return by_rank.sum(1)[:, :, None]


def factored(
    attention: ReferenceAttention,
    q: Tensor,
    k: Factors,
    v: Factors,
    context: Context,
) -> Tensor:
    """The output [B, H, 1, d] of `ReferenceAttention.forward` for a single query."""
    with torch.autocast(q.device.type, enabled=False):
        dtype = torch.promote_types(q.dtype, torch.float32)
        k = Factors(k.a.to(dtype), k.b.to(dtype))
        inverse: Tensor | float = 1.0
        if attention.variant.l2_normalise:
            q = l2_normalise(q)
            inverse = torch.rsqrt(k.squared_norms() + 1e-12)
        rows = attention.rows(q, k.a.shape[2], context)
        weights = attention_weights(attention.variant, q, lambda q: k.dot(q) * inverse, rows)
        return v.mix(weights)
