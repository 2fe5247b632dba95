"""A layer's attention as attention.py defines it: its learned scalars, its rows, its weights."""

from dataclasses import dataclass, field

import torch
import torch.nn as nn
from torch import Tensor

from attention import Rows, Variant, attention_weights, l2_normalise
from attention_paths.power import fast_normalised_power

ALL = slice(None)


@dataclass(frozen=True)
class Context:
    """What a layer's attention depends on besides q, k and v.

    `ReferenceAttention.rows` makes the Rows of attention.py from it and the layer's settings.
    """

    # the factor on every score, such as the square of YaRN's attention factor; where sequences,
    # heads or documents differ, [1 or B, 1 or H, 1 or Lq, 1]
    score_scale: float | Tensor = 1.0
    row_inputs: dict[str, Tensor] = field(default_factory=dict)  # [B, H, Lq]: Variant.from_input
    log_forget: Tensor | None = None  # [B, H, Lk]: the logarithms of the keys' forget gates
    # [B, Lq]: each query's position in its document, whose first token is the first key that it
    # sees; None: a sequence is one document
    document_positions: Tensor | None = None

    def select(
        self,
        sequences: slice | None = None,
        heads: slice | None = None,
        queries: slice | None = None,
        keys: slice | None = None,
    ) -> "Context":
        """Return the context of these sequences, heads, queries and keys; None: of all."""
        # no defaults of ALL: torch.compile of torch 2.11 breaks its graph at a slice as a default
        sequences = sequences or ALL
        heads = heads or ALL
        queries = queries or ALL
        keys = keys or ALL
        row_inputs = {name: x[sequences, heads, queries] for name, x in self.row_inputs.items()}
        log_forget = self.log_forget
        if log_forget is not None:
            log_forget = log_forget[sequences, heads, keys]
        score_scale = self.score_scale
        if isinstance(score_scale, Tensor):
            B, H, Lq, _ = score_scale.shape  # size 1: the same factor for all
            score_scale = score_scale[
                sequences if B > 1 else ALL,
                heads if H > 1 else ALL,
                queries if Lq > 1 else ALL,
            ]
        document_positions = self.document_positions
        if document_positions is not None:
            document_positions = document_positions[sequences, queries]
        return Context(score_scale, row_inputs, log_forget, document_positions)


NO_CONTEXT = Context()


@dataclass(frozen=True)
class Keys:
    """Keys [B, Hk, Lk, d]; their scores are multiplied by inverse_norm, if it is set."""

    k: Tensor
    inverse_norm: Tensor | None = None  # 1 / |k|, [B, H, 1, Lk]

    def select(self, sequences: slice, keys: slice) -> "Keys":
        """Return these keys of these sequences."""
        inverse_norm = self.inverse_norm
        if inverse_norm is not None:
            inverse_norm = inverse_norm[sequences, ..., keys]
        return Keys(self.k[sequences, :, keys], inverse_norm)

    def dot(self, q: Tensor) -> Tensor:
        """Return the dot products [B, H, Lq, Lk] with q [B, H, Lq, d]."""
        products = grouped_product(q, self.k.to(q.dtype).mT)
        if self.inverse_norm is None:
            return products
        return products * self.inverse_norm


class ReferenceAttention(nn.Module):
    """The attention of a layer's heads, or of one of the two kinds of heads of a hybrid layer.

    It computes any entry of `VARIANTS` as attention.py defines it, from q, k and v; the projections
    are SelfAttention's (model.py). Models use the subclass attention_paths.module.Attention.
    """

    s: nn.Parameter | None
    b: nn.Parameter | None
    p_n: nn.Parameter | None
    sink: nn.Parameter | None

    def __init__(
        self,
        variant: Variant,
        n_head: int,
        head_size: int,
        trained_length: int = 1024,
        *,
        p: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        alibi_heads: int = 0,
        sink: str = "none",
        s: float = 1.0,
    ) -> None:
        """Most arguments are settings of config.py; the last `alibi_heads` heads have ALiBi.

        `trained_length` is the T of the formulas, which most variants do not use; `s` is the
        initial value of a learned s.
        """
        super().__init__()
        self.variant = variant
        self.n_head = n_head
        self.head_size = head_size
        self.trained_length = trained_length
        self.p = p
        self.window = window
        self.softcap = softcap
        self.alibi_heads = alibi_heads
        self.has_sink = sink != "none"
        initial = {
            "s": torch.full((n_head,), s),
            "b": torch.zeros(n_head),
            "p_n": torch.ones(trained_length),
            "sink": torch.zeros(n_head),
        }
        learned = [*variant.learnable]
        if sink == "learned":
            learned.append("sink")
        for name, value in initial.items():
            self.register_parameter(name, nn.Parameter(value) if name in learned else None)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context = NO_CONTEXT,
    ) -> Tensor:
        """Return the output [B, H, Lq, d] in v's dtype.

        q is [B, H, Lq, d], k and v are [B, Hk, Lk, d], all after RoPE, with Lq <= Lk: the queries
        are the last Lq positions. With Hk < H, each head of keys and values serves H / Hk
        consecutive heads of queries. Scores and weights are computed in float32 (float64 for
        float64 inputs), with autocast off.
        """
        with torch.autocast(q.device.type, enabled=False):
            q, keys = self.normalise_q_and_k(q, k)
            return self.output(q, keys, v, context)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        context: Context = NO_CONTEXT,
    ) -> Tensor:
        """Return the weights [B, H, Lq, Lk], float32 or float64, 0 for masked keys."""
        with torch.autocast(q.device.type, enabled=False):
            q, keys = self.normalise_q_and_k(q, k)
            rows = self.rows(q, k.shape[2], context)
            return attention_weights(self.variant, q, keys.dot, rows)

    def output(
        self,
        q: Tensor,
        keys: Keys,
        v: Tensor,
        context: Context,
    ) -> Tensor:
        """Return the output for q and keys as `normalise_q_and_k` returns them."""
        rows = self.rows(q, v.shape[2], context)
        weights = attention_weights(self.variant, q, keys.dot, rows)
        return grouped_product(weights.to(v.dtype), v)

    def normalise_q_and_k(self, q: Tensor, k: Tensor) -> tuple[Tensor, Keys]:
        """Return q and k, at unit length if the variant normalises them.

        For a single query, its scores are divided by |k| instead, which is less work than
        normalising a whole cache of keys.
        """
        if not self.variant.l2_normalise:
            return q, Keys(k)
        if q.shape[2] > 1:
            return l2_normalise(q), Keys(l2_normalise(k))
        dtype = torch.promote_types(k.dtype, torch.float32)
        squared_norm = torch.linalg.vector_norm(k, dim=-1, dtype=dtype).square()
        inverse_norm = torch.rsqrt(squared_norm + 1e-12)
        inverse_norm = inverse_norm.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return l2_normalise(q), Keys(k, inverse_norm[:, :, None])

    def rows(
        self,
        q: Tensor,
        Lk: int,
        context: Context,
    ) -> Rows:
        """Return the Rows of queries q [B, H, Lq, d], the last Lq of Lk positions."""
        kv_idx = torch.arange(Lk, device=q.device)
        q_idx = kv_idx[Lk - q.shape[2] :, None]
        # n is in float32 at least: bfloat16 cannot count past 256. It is not an integer tensor,
        # because Inductor folds min(constant, index) into an expression that it cannot compare.
        dtype = torch.promote_types(q.dtype, torch.float32)
        document_positions = context.document_positions
        if document_positions is None:
            n = (q_idx + 1).to(dtype)
        else:
            document_positions = document_positions[:, None, :, None]
            n = (document_positions + 1).to(dtype)
        if self.window is not None:
            n = n.clamp_max(self.window)
        head = torch.arange(self.n_head, device=q.device)[:, None, None]
        rows = Rows(
            n=n,
            q_idx=q_idx,
            kv_idx=kv_idx,
            head=head,
            window=self.window,
            d=self.head_size,
            T=self.trained_length,
            p=self.p,
            power_then_l1=fast_normalised_power,
            document_positions=document_positions,
            score_scale=context.score_scale,
            softcap=self.softcap,
        )
        for name in self.variant.from_input:
            value = context.row_inputs.get(name, q_idx.new_zeros(1, 1, 1))  # 0 without an input
            setattr(rows, name, value[..., None].to(dtype))
        if self.s is not None:
            rows.s = self.s[:, None, None]
        if self.b is not None:
            rows.b = self.b[:, None, None]
        if self.p_n is not None:  # beyond the training length, the last value
            index = (n - 1).clamp_max(len(self.p_n) - 1)
            rows.p_n = self.p_n[index.long()]
        if self.alibi_heads:
            h = (head - (self.n_head - self.alibi_heads) + 1).to(dtype)
            slopes = torch.exp2(-8 * h / self.alibi_heads)
            rows.slopes = slopes.masked_fill(h <= 0, 0)  # not times 0: they may be infinite
        if context.log_forget is not None:
            rows.cumulative_log_forget = context.log_forget.to(dtype).cumsum(-1)
        if self.sink is not None:
            rows.sink = self.sink[:, None, None].to(dtype)
        elif self.has_sink:
            rows.sink = n.new_zeros(len(head), 1, 1)
        return rows


def grouped_product(x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y of x [B, H, n, m] and y [B, Hk, m, l]: a head of y serves H / Hk heads of x."""
    if x.shape[1] == y.shape[1]:
        return x @ y
    by_group = x.reshape(len(x), y.shape[1], -1, x.shape[3])  # [B, Hk, H / Hk * n, m]
    return (by_group @ y).view(*x.shape[:3], -1)


def share_p_n(layers: list[ReferenceAttention]) -> None:
    """Make all layers share SSMax's p_n, as in the paper."""
    learning = [layer for layer in layers if layer.p_n is not None]
    for layer in learning[1:]:
        layer.p_n = learning[0].p_n
