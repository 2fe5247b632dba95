"""A layer's attention, computed by the fastest path that its variant, device and dtype allow.

SelfAttention (model.py) calls Attention with q, k and v. `Attention.path` picks one of

    sdpa        sdpa.py         softmax at any scale, by torch
    varlen      varlen.py       the same within windows and documents, by torch on a GPU
    triton      fused.py        variants with a kernel, by the kernels of kernels/
    blocked     blocked.py      any variant: `reference`, a block of queries at a time
    reference   reference.py    any variant: attention.attention_weights, then the product with v

All take the scales of scores from `Attention.rows`. A single query with T6's factors of k and v
takes factored.py instead.
"""

import math
from typing import Any

import torch
from torch import Tensor

from attention import Rows, Variant
from attention_paths.blocked import blocked, first_key
from attention_paths.check import check_variant, name_of
from attention_paths.factored import Factors, factored
from attention_paths.fused import fused, unsupported_reason, variant_unsupported_reason
from attention_paths.reference import NO_CONTEXT, Context, ReferenceAttention
from attention_paths.sdpa import sdpa
from attention_paths.varlen import varlen, varlen_unsupported_reason
from errors import UserError, check_choice


class Attention(ReferenceAttention):
    """ReferenceAttention, computed by the path that `impl` names; 'auto' picks the fastest.

    For a single query k and v may be Factors. Raises UserError for a variant that `check_variant`
    refuses, for a p, sink or s that the variant lacks or cannot have, and for a path that cannot
    compute the variant.
    """

    log_base: float | None = None  # set for evaluation: GPT.scale_scores
    is_local = False  # heads of a hybrid that have a local_window

    def __init__(
        self,
        variant: Variant,
        n_head: int,
        *arguments: Any,
        impl: str = "auto",
        **settings: Any,
    ):
        check_variant(variant, n_head)
        super().__init__(variant, n_head, *arguments, **settings)
        self.impl = impl
        name = name_of(variant)
        check_choice("attention_impl", impl, ("auto", "triton", "blocked", "reference"))
        if variant.needs_p and self.p is None:
            raise UserError(
                f"attention = {name!r} needs p, the power of its re-weighting, such as p = 15"
            )
        if self.p is not None and not variant.takes_p:
            raise UserError(
                f"attention = {name!r} cannot have p = {self.p}: re-weighting needs l1 and weights "
                "that are never negative, or a `reweight` that reads p (needs_p=True)"
            )
        check_choice("sink", settings.get("sink", "none"), ("none", "one", "learned"))
        if self.has_sink and not variant.takes_sink:
            raise UserError(
                f"attention = {name!r} cannot have a sink, which needs l1, a phi that is >= 0, and "
                "> 0 at 0, and a variant without `reweight` or `row_weights`"
            )
        s = settings.get("s", 1.0)
        if s != 1.0 and "s" not in variant.learnable:
            raise UserError(f"attention = {name!r} cannot have s_init = {s}: it has no learned s")
        if self.p is not None and self.p < 1:  # masked keys, whose weight is 0, would have 0^0 = 1
            raise UserError(f"p = {self.p} must be at least 1")
        if impl == "triton" and (reason := variant_unsupported_reason(variant, self.head_size)):
            raise UserError(f"attention_impl = 'triton' cannot compute {name!r}: {reason}")

    def forward(
        self,
        q: Tensor,
        k: Tensor | Factors,
        v: Tensor | Factors,
        context: Context = NO_CONTEXT,
    ) -> Tensor:
        """Return the output [B, H, Lq, d] of ReferenceAttention.forward, by `path`."""
        if q.shape[1] != self.n_head:
            raise UserError(
                f"queries of shape {tuple(q.shape)} must be [B, n_head = {self.n_head}, L, d]"
            )
        if isinstance(k, Factors) and isinstance(v, Factors):
            if self.impl in ("auto", "blocked"):
                return factored(self, q, k, v, context)
            k, v = k.expand(), v.expand()
        assert isinstance(k, Tensor) and isinstance(v, Tensor)
        first = first_key(k.shape[2] - q.shape[2], self.window)  # no query sees the keys before it
        k, v = k[:, :, first:], v[:, :, first:]
        context = context.select(keys=slice(first, None))
        path = self.path(q, k.shape[2], context)
        if path == "reference":
            return super().forward(q, k, v, context)
        compute = {"triton": fused, "sdpa": sdpa, "varlen": varlen, "blocked": blocked}[path]
        with torch.autocast(q.device.type, enabled=False):
            return compute(self, q, k, v, context)

    def rows(
        self,
        q: Tensor,
        Lk: int,
        context: Context,
    ) -> Rows:
        """Return ReferenceAttention.rows; log_base = a multiplies their scores by log_a(a + n)."""
        rows = super().rows(q, Lk, context)
        if self.log_base is not None:
            growth = (rows.n + self.log_base).log() / math.log(self.log_base)  # like n
            rows.score_scale = rows.score_scale * growth
        return rows

    def path(self, q: Tensor, Lk: int, context: Context = NO_CONTEXT) -> str:
        """Return the path to take: 'sdpa', 'varlen', 'triton', 'blocked' or 'reference'.

        Softmax at any scale takes torch's SDPA. On a GPU, SDPA's FlashAttention supports no mask,
        so windows and documents take varlen_attn, or the Triton kernels if varlen_attn cannot run.
        Raises UserError if `impl` requires kernels that cannot run.
        """
        if self.impl == "triton":
            reason = unsupported_reason(self, q)
            if reason is not None:
                raise UserError(f"attention_impl = 'triton' cannot be used: {reason}")
            return "triton"
        if self.impl != "auto":
            return self.impl
        is_softmax = self.is_plain_softmax(context)
        prefers_varlen = self.prefers_varlen(q, Lk, context)
        if is_softmax and not prefers_varlen:
            return "sdpa"
        if prefers_varlen and varlen_unsupported_reason(self, q, Lk) is None:
            return "varlen"
        if q.is_cuda and unsupported_reason(self, q) is None:
            return "triton"
        return "sdpa" if is_softmax else "blocked"

    def prefers_varlen(self, q: Tensor, Lk: int, context: Context) -> bool:
        """Tell whether it is softmax on a GPU with a mask that SDPA's FlashAttention lacks."""
        has_window = self.window is not None and self.window < Lk
        masked = has_window or context.document_positions is not None
        return self.impl == "auto" and self.is_plain_softmax(context) and masked and q.is_cuda

    def is_plain_softmax(self, context: Context) -> bool:
        """Tell whether it is softmax at any scale, without a setting that SDPA cannot compute."""
        return (
            self.variant.is_softmax
            and self.p is None
            and self.softcap is None
            and self.alibi_heads == 0
            and not self.has_sink
            and context.log_forget is None
        )
