"""GPT-2 with any variant of attention.py: trunk, head, cache, generation."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention import VARIANTS, Attention, Factors, FromInput, share_parameters
from config import Config
from errors import UserError

# Tokens whose logits the chunked training loss and evaluation hold at once, and how many of a
# token's logits evaluation holds on a CPU: 512 to 4096 differed by less than two runs of one.
TRAIN_LOSS_CHUNK = 1024
EVAL_LOSS_CHUNK = 1024
EVAL_LOGITS_CPU = 4096
# From so many new tokens on, generation on CUDA is recorded, which takes as long as several tokens.
RECORDED_TOKENS = 64

# RoPE's cos and sin of the positions' angles, [L, d/2], and the factor on every attention score.
Rotation = tuple[Tensor, Tensor, float]
HeadTransform = Callable[[Tensor], Tensor]  # QK norm, then RoPE, of x [B, .., L, d]


@dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021), and how they are scaled beyond the training length."""

    head_size: int
    trained_length: int
    theta: float = 10000.0
    scaling: str = "none"
    # s in 'linear', 'ntk', 'yarn' (None: length / trained_length); alpha in 'dynamic_ntk' (None: 1)
    factor: float | None = None

    SCALINGS = ("none", "linear", "ntk", "dynamic_ntk", "yarn")

    def __post_init__(self) -> None:
        if self.scaling not in self.SCALINGS:
            raise UserError(
                f"rope scaling = {self.scaling!r}; it is one of {', '.join(self.SCALINGS)}"
            )
        # below 1e100 its powers are finite too
        if self.factor is not None and not 1 <= self.factor < 1e100:
            raise UserError(f"rope factor = {self.factor} must be at least 1 and below 1e100")
        if not 1 < self.theta < math.inf:
            raise UserError(f"rope theta = {self.theta} must be above 1 and finite")

    def frequencies(self, length: int) -> tuple[Tensor, float]:
        """Angles per position [d/2] in float64, and the factor on every score, at this length."""
        d, s = self.head_size, max(1.0, length / self.trained_length)
        pairs = torch.arange(0, d, 2, dtype=torch.float64) / d
        power = d / max(d - 2, 1)  # with a single pair any base is the same
        factor = s if self.factor is None else self.factor
        if self.scaling == "linear":  # positions interpolated (Chen et al. 2023)
            return self.theta**-pairs / factor, 1.0
        if self.scaling == "ntk":  # bloc97: the slowest pair interpolated by s, the fastest kept
            return (self.theta * factor**power) ** -pairs, 1.0
        if self.scaling == "dynamic_ntk":  # emozilla: the same with the s of the current length
            alpha = 1.0 if self.factor is None else self.factor
            growth = alpha * s - (alpha - 1) if s > 1 else 1.0
            return (self.theta * growth**power) ** -pairs, 1.0
        if self.scaling == "yarn":
            return self._yarn(pairs, factor)
        return self.theta**-pairs, 1.0

    def _yarn(self, pairs: Tensor, s: float) -> tuple[Tensor, float]:
        """YaRN (Peng et al. 2023).

        Over the training length, pairs that turn more than 32 times (beta_fast) are kept, those
        that turn less than once (beta_slow) are interpolated, and a ramp lies between. Its factor
        0.1 ln s + 1 on q and k is squared on the scores.
        """

        def pair_that_turns(times: int) -> float:
            turn = self.trained_length / (times * 2 * math.pi)
            return self.head_size * math.log(turn) / (2 * math.log(self.theta))

        low = max(math.floor(pair_that_turns(32)), 0)
        high = min(math.ceil(pair_that_turns(1)), self.head_size - 1)
        index = torch.arange(len(pairs), dtype=torch.float64)
        ramp = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
        frequencies = self.theta**-pairs
        return frequencies * (1 - ramp) + frequencies / s * ramp, (0.1 * math.log(s) + 1) ** 2


def rotate(x: Tensor, cos: Tensor, sin: Tensor, first: int = 0) -> Tensor:
    """x [B, H, L, d] with every pair (x_i, x_{i + d/2}) turned by its angle; cos, sin [L, d/2].

    The heads before `first` are left as they are.
    """
    if first:
        return torch.cat((x[:, :first], rotate(x[:, first:], cos, sin)), dim=1)
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class KVCache:
    """Keys (after RoPE) and values, or their factors, of up to `size` positions of every layer.

    A layer with a window keeps a ring of them: position i is at i modulo the window.
    """

    def __init__(self, size: int):
        self.size, self.length = size, 0
        self.layers: dict[tuple[int, int], list[Tensor]] = {}
        # in a RecordedStep the length, [1], which its kernels read: theirs have fixed shapes
        self.position: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for layer in self.layers.values() for kept in layer)

    def append(
        self, key: tuple[int, int], new: list[Tensor], window: int | None, ordered: bool
    ) -> list[Tensor]:
        """Append tensors [B, .., new, ..] of new positions; returns what these positions see.

        `key` is the layer and the part of its heads. What is returned is [B, .., length + new, ..]
        or, with a window, at most window - 1 + new positions: in order, but for a single new
        position without `ordered`, which attends to them all, in the ring's order.
        """
        if key not in self.layers:
            room = self.size if window is None else min(self.size, window)
            self.layers[key] = [x.new_zeros(*x.shape[:2], room, *x.shape[3:]) for x in new]
        pairs = zip(self.layers[key], new, strict=True)
        if self.position is not None:
            return [self._insert(kept, x, self.position, ordered) for kept, x in pairs]
        return [self._extend(kept, x, window, ordered) for kept, x in pairs]

    def filled(self, key: tuple[int, int]) -> Tensor | None:
        """In a RecordedStep, how many of a part's keys there are, the new one included, [1]."""
        if self.position is None:
            return None
        return (self.position + 1).clamp_max(self.layers[key][0].shape[2])

    def _insert(self, kept: Tensor, x: Tensor, position: Tensor, ordered: bool) -> Tensor:
        """All of `kept`, with a single new position in it; `ordered`, the oldest comes first."""
        room = kept.shape[2]
        kept.index_copy_(2, position % room, x)
        if room == self.size or not ordered:
            return kept
        oldest = (position + 1 - room).clamp_min(0)
        return kept.index_select(2, (oldest + torch.arange(room, device=x.device)) % room)

    def _extend(self, kept: Tensor, x: Tensor, window: int | None, ordered: bool) -> Tensor:
        new, start = x.shape[2], self.length
        end = start + new
        if window is None or end <= window:
            kept[:, :, start:end] = x
            return kept[:, :, :end]
        if new == 1 and not ordered:
            kept[:, :, start % window] = x[:, :, 0]
            return kept
        past = torch.arange(max(0, start - window + 1), start, device=x.device) % window
        x = torch.cat((kept[:, :, past], x), dim=2)
        kept[:, :, torch.arange(end - window, end, device=x.device) % window] = x[:, :, -window:]
        return x


def build_norm(config: Config) -> nn.RMSNorm | nn.LayerNorm:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=1e-5)
    return nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)


def build_attention(config: Config, heads: range | None = None) -> Attention:
    """The attention of a layer's heads, or of some of them."""
    heads = range(config.n_head) if heads is None else heads
    alibi = [h for h in heads if h >= config.nope_heads and config.positions == "alibi"]
    return Attention(
        VARIANTS[config.attention],
        p=config.p,
        n_head=len(heads),
        head_size=config.d_head,
        trained_length=config.block_size,
        follow_length=config.attention_length == "current",
        impl=config.attention_impl,
        s_init=config.s_init,
        b_init=config.b_init,
        gamma=config.gamma,
        window=config.window,
        p_law=config.p_law,
        softcap=config.softcap,
        alibi_heads=len(alibi),
        sink=config.sink,
    )


class LinearProjections:
    """q, k and v are linear in the input; the cache keeps k, after RoPE, and v."""

    def __init__(self, config: Config) -> None:
        self.heads = config.n_head, config.kv_heads, config.kv_heads  # of q, k and v
        self.columns = sum(self.heads) * config.d_head
        self.products = 0  # multiplications per token beyond those with weights

    def split(
        self, u: Tensor, to_q: HeadTransform, to_k: HeadTransform
    ) -> tuple[Tensor, list[Tensor]]:
        """q [B, H, L, d] and what is cached, k and v [B, Hk, L, d], from u [B, L, columns]."""
        heads = u.unflatten(-1, (sum(self.heads), -1)).transpose(1, 2)
        q, k, v = heads.split(self.heads, dim=1)
        return to_q(q), [to_k(k), v]

    def of_heads(self, kept: list[Tensor], heads: slice) -> list[Tensor]:
        """What is cached of some heads of k and v."""
        return [x[:, heads] for x in kept]

    def keys_and_values(self, kept: list[Tensor], decoding: bool) -> list[Tensor]:
        return kept


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

    def split(
        self, u: Tensor, to_q: HeadTransform, to_k: HeadTransform
    ) -> tuple[Tensor, list[Tensor]]:
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

    def of_heads(self, kept: list[Tensor], heads: slice) -> list[Tensor]:
        """All of it: heads without positions of their own, and local ones, are refused."""
        return kept

    def keys_and_values(self, kept: list[Tensor], decoding: bool) -> list[Factors] | list[Tensor]:
        """k and v [B, H, Lk, d], or, for the single query of `decoding`, their factors as such."""
        a_k, b_k, a_v, b_v = kept
        factors = [Factors(a_k, b_k), Factors(a_v, b_v)]
        return factors if decoding else [x.expand() for x in factors]


class SelfAttention(nn.Module):
    """Attention between its two projections.

    The first heads, `nope_share` of them, have no positions. With a local_window the others are
    softmax over that many keys, whatever the first are.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        n, H, d, bias = config.n_embd, config.n_head, config.d_head, config.bias
        self.n_head = H
        self.nope_heads, self.group = config.nope_heads, H // config.kv_heads
        self.projections: LinearProjections | TensorProductProjections
        if config.projections == "tpa":
            self.projections = TensorProductProjections(config)
        else:
            self.projections = LinearProjections(config)
        self.c_attn = nn.Linear(n, self.projections.columns, bias=bias)
        self.c_proj = nn.Linear(H * d, n, bias=bias)
        self.local: Attention | None = None
        if config.local_window is None:
            self.attention = build_attention(config)
        else:
            local = config.replace(
                attention="softmax", p=None, p_law="constant", window=config.local_window
            )
            self.attention = build_attention(config, range(config.nope_heads))
            self.local = build_attention(local, range(config.nope_heads, H))
        self.q_norm = nn.RMSNorm(d, eps=1e-5) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(d, eps=1e-5) if config.qk_norm else None
        gates = {"none": 0, "head": H, "element": H * d}[config.gate]
        self.c_gate = nn.Linear(n, gates, bias=bias) if gates else None
        # FoX has a bias whatever the other layers have, ASEntmax none (their authors' code)
        self.c_forget = nn.Linear(n, H) if config.forget else None
        self.row_numbers = names = VARIANTS[config.attention].from_input
        self.c_rows = nn.Linear(n, len(names) * H, bias=False) if names else None

    def forward(
        self, x: Tensor, rotation: Rotation | None, cache: KVCache | None, layer: int
    ) -> Tensor:
        def transform(norm: nn.Module | None, first: int) -> HeadTransform:
            def apply(x: Tensor) -> Tensor:
                x = x if norm is None else norm(x)
                return x if rotation is None else rotate(x, *rotation[:2], first)

            return apply

        q_first, k_first = self.nope_heads, self.nope_heads // self.group
        to_q, to_k = transform(self.q_norm, q_first), transform(self.k_norm, k_first)
        q, kv = self.projections.split(self.c_attn(x), to_q, to_k)
        score_scale = 1.0 if rotation is None else rotation[2]
        decoding = cache is not None and x.shape[1] == 1
        numbers = self.from_input(x)
        out, filled = [], None
        for part, (attention, heads) in enumerate(self.parts()):
            kv_heads = slice(heads.start // self.group, heads.stop // self.group)
            cached, inputs = self.projections.of_heads(kv, kv_heads), numbers.heads(heads)
            if cache is not None:
                gates = [] if inputs.log_forget is None else [inputs.log_forget]
                ordered = attention.ordered or gates != []
                cached = cache.append((layer, part), cached + gates, attention.window, ordered)
                filled = cache.filled((layer, part))
                if gates:
                    inputs = replace(inputs, log_forget=cached.pop())
            k, v = self.projections.keys_and_values(cached, decoding)
            length = cache.size if cache else None
            scale = 1.0 if heads.stop <= self.nope_heads else score_scale
            out.append(
                attention(q[:, heads], k, v, scale, length, from_input=inputs, filled=filled)
            )
        # joining the heads of one part copies nothing: kernels lay them out side by side
        y = (out[0] if len(out) == 1 else torch.cat(out, dim=1)).transpose(1, 2)  # [B, L, H, d]
        if self.c_gate is not None:  # [B, L, H, 1 or d]
            y = y * self.c_gate(x).sigmoid().unflatten(2, (self.n_head, -1))
        return self.c_proj(y.flatten(2))

    def parts(self) -> list[tuple[Attention, slice]]:
        """The attention of each part of the heads."""
        H, split = self.n_head, self.nope_heads
        if self.local is None:
            return [(self.attention, slice(0, H))]
        return [(self.attention, slice(0, split)), (self.local, slice(split, H))]

    def from_input(self, x: Tensor) -> FromInput:
        """The numbers of rows and the logarithms of forget gates, [B, H, L] of x [B, L, n_embd]."""
        rows, gates = {}, None
        if self.c_rows is not None:
            numbers = self.c_rows(x).unflatten(2, (len(self.row_numbers), -1)).permute(2, 0, 3, 1)
            rows = dict(zip(self.row_numbers, numbers.unbind(), strict=True))
        if self.c_forget is not None:
            gates = self.c_forget(x)
            dtype = torch.promote_types(gates.dtype, torch.float32)
            gates = F.logsigmoid(gates.to(dtype)).transpose(1, 2)
        return FromInput(rows, gates)


class MLP(nn.Module):
    """GPT-2's MLP, or SwiGLU (Shazeer 2020)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config.mlp_hidden or 4 * config.n_embd
        self.swiglu = config.mlp == "swiglu"
        self.c_fc = nn.Linear(config.n_embd, hidden * (2 if self.swiglu else 1), bias=config.bias)
        self.c_proj = nn.Linear(hidden, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        if self.swiglu:
            gate, x = x.chunk(2, dim=-1)
            x = F.silu(gate) * x
        else:
            x = F.gelu(x, approximate="tanh")  # GPT-2's own approximation
        return self.c_proj(x)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1, self.attn = build_norm(config), SelfAttention(config)
        self.ln_2, self.mlp = build_norm(config), MLP(config)

    def forward(
        self, x: Tensor, rotation: Rotation | None, cache: KVCache | None, layer: int
    ) -> Tensor:
        x = x + self.attn(self.ln_1(x), rotation, cache, layer)
        return x + self.mlp(self.ln_2(x))


class Trunk(nn.Module):
    """Positions, blocks and the final norm: embeddings [B, L, n_embd] to hidden states."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        learned = config.positions == "learned"
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if learned else None
        blocks = [Block(config) for _ in range(config.n_layer)]
        share_parameters([block.attn.attention for block in blocks])
        self.blocks = nn.ModuleList(blocks)
        self.ln_f = build_norm(config)
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        if config.positions == "rope":
            self.set_rope(
                Rope(config.d_head, config.block_size, config.rope_theta), config.block_size
            )

    def set_rope(self, rope: Rope, length: int) -> None:
        """Compute the rotations of positions 0 to length - 1, scaled for this length."""
        frequencies, self.score_scale = rope.frequencies(length)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies  # [length, d/2]
        like = self.ln_f.weight
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.cos = angles.cos().to(dtype).to(like.device)
        self.sin = angles.sin().to(dtype).to(like.device)
        self.rope, self.rope_length = rope, length

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Trunk":
        # called by .to(): rotations are computed again in the new dtype, not cast from the old one
        super()._apply(fn, recurse)
        if self.config.positions == "rope":
            self.set_rope(self.rope, self.rope_length)
        return self

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        start = cache.length if cache else 0
        length = cache.size if cache else x.shape[1]
        end = start + x.shape[1]
        positions: slice | Tensor = slice(start, end)
        if cache and cache.position is not None:
            positions = cache.position
        rotation = None
        if self.config.positions == "rope":
            if length != self.rope_length:
                self.set_rope(self.rope, length)
            rotation = self.cos[positions], self.sin[positions], self.score_scale
        if self.wpe is not None:
            if length > len(self.wpe.weight):
                raise UserError(
                    f"a length of {length} is beyond the {len(self.wpe.weight)} learned positions "
                    "of this model (block_size)"
                )
            x = x + self.wpe.weight[positions]
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation if self._rotates(layer) else None, cache, layer)
        if cache:
            cache.length = end
        return self.ln_f(x)

    def _rotates(self, layer: int) -> bool:
        every = self.config.nope_every
        return every == 0 or (layer + 1) % every != 0


class PairEmbedding(nn.Embedding):
    """Pairs of tokens [.., 2] to [.., n_embd]: a table for each coordinate, and a linear layer."""

    def __init__(self, rows: int, n_embd: int) -> None:
        super().__init__(2 * rows, n_embd)  # the two tables, one below the other
        self.rows = rows
        self.linear = nn.Linear(2 * n_embd, n_embd)

    def forward(self, pairs: Tensor) -> Tensor:
        x, y = pairs.unbind(-1)
        return self.linear(super().forward(torch.stack((x, y + self.rows), -1)).flatten(-2))


class PairHead(nn.Linear):
    """Hidden states [.., n_embd] to the logits of both coordinates, [.., 2, rows]."""

    def __init__(self, n_embd: int, rows: int) -> None:
        super().__init__(n_embd, 2 * rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(-1, (2, -1))


class GPT(nn.Module):
    """Embedding, trunk and head; a position is a token or, for orbits, a pair of them [.., 2]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.n_vocab = config.n_vocab
        padded = -(-self.n_vocab // 128) * 128  # for speed; padding is never predicted
        n_embd, pairs = config.n_embd, config.task == "orbits"
        self.wte = PairEmbedding(padded, n_embd) if pairs else nn.Embedding(padded, n_embd)
        self.trunk = Trunk(config)
        self.lm_head = PairHead(n_embd, padded) if pairs else nn.Linear(n_embd, padded, bias=False)
        self.tables = 2 if pairs else 1  # of wte, and of lm_head
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self._initialise()

    def attention_layers(self) -> list[SelfAttention]:
        return [module for module in self.modules() if isinstance(module, SelfAttention)]

    @torch.no_grad()
    def _initialise(self) -> None:
        """GPT-2's initialisation: weights normal(0, 0.02), biases 0.

        The deviation is smaller where a projection adds to the residual stream. With projections =
        'tpa' such a projection is 0 at first and factors have their own, as its authors have it.
        """
        tpa = self.config.projections == "tpa"
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                depth = 2 * self.config.n_layer if name.endswith("c_proj") else 1
                std = 0.0 if tpa and depth > 1 else 0.02 / math.sqrt(depth)
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.trunk.wpe is not None:
            nn.init.normal_(self.trunk.wpe.weight, std=0.02)
        for layer in self.attention_layers():
            if isinstance(layer.projections, TensorProductProjections):
                layer.projections.initialise(layer.c_attn.weight)
        nn.init.normal_(self.wte.weight, std=0.02)
        for weight in (self.wte.weight, self.lm_head.weight):
            nn.init.zeros_(weight.unflatten(0, (self.tables, -1))[:, self.n_vocab :])

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Logits [B, L, n_vocab] of idx [B, L]; with targets [B, L], the mean loss in nats.

        For orbits the shapes are [B, L, 2, n_vocab], [B, L, 2] and [B, L, 2].
        """
        x = self.trunk(self.wte(idx), cache)
        if targets is None:
            return self.logits(x)
        x, targets = x.flatten(0, 1), targets.flatten()
        if self._has_chunked_loss(x):
            options = nn.LinearCrossEntropyOptions(batch_chunk_size=TRAIN_LOSS_CHUNK)
            head = self.lm_head.weight[: self.n_vocab]
            return F.linear_cross_entropy(x, head, targets, options=options)
        return F.cross_entropy(self.logits(x).flatten(0, -2), targets)

    def _has_chunked_loss(self, x: Tensor) -> bool:
        """Whether torch computes the loss without all logits, which on a CPU is faster too."""
        large = (
            self.tables == 1 and len(x) >= TRAIN_LOSS_CHUNK and self.n_vocab > self.config.n_embd
        )
        chunked = hasattr(F, "linear_cross_entropy") and not torch.compiler.is_compiling()
        # it would round each loss to a 16-bit dtype of x
        return chunked and large and x.is_cpu and x.dtype.itemsize >= 4

    def logits(self, x: Tensor) -> Tensor:
        """Logits [.., n_vocab] of hidden states [.., n_embd]."""
        return self.lm_head(x)[..., : self.n_vocab]

    @torch.no_grad()
    def token_losses(self, idx: Tensor, targets: Tensor) -> Tensor:
        """The loss in nats of every target, in their shape and float32; never holds all logits."""
        x = self.trunk(self.wte(idx)).flatten(0, 1)
        by_parts = x.is_cpu and self.tables == 1
        losses = self._losses_by_parts if by_parts else self._losses_of_logits
        chunks = loss_chunks(x, targets.flatten(0, 1))
        return torch.cat([losses(h, t) for h, t in chunks]).view(targets.shape)

    def _losses_of_logits(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(x).float().flatten(0, -2)
        return F.cross_entropy(logits, targets.flatten(), reduction="none")

    def _losses_by_parts(self, x: Tensor, targets: Tensor) -> Tensor:
        """The losses of tokens, from the logits of a part of the vocabulary at a time.

        On a CPU this takes two thirds of the time of torch's linear_cross_entropy, whose chunks are
        of tokens: each of a few tokens reads all of the head's weights again, and the logits of
        many are larger than any cache.
        """
        sums, own = [], None  # the log-sum-exp of each part, and the logits of the targets
        for start in range(0, self.n_vocab, EVAL_LOGITS_CPU):
            end = min(start + EVAL_LOGITS_CPU, self.n_vocab)
            logits = F.linear(x, self.lm_head.weight[start:end])
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            sums.append(logits.logsumexp(-1))
            theirs = logits.gather(1, (targets - start).clamp(0, end - start - 1)[:, None])[:, 0]
            own = theirs if own is None else torch.where(targets >= start, theirs, own)
        assert own is not None
        return (torch.stack(sums).logsumexp(0) - own).float()

    def _records(self, idx: Tensor, max_new_tokens: int) -> bool:
        """Whether generation records its steps."""
        return idx.is_cuda and max_new_tokens >= RECORDED_TOKENS

    def next_logits(self, new: Tensor, cache: KVCache) -> Tensor:
        """Logits [B, n_vocab], in float32, of the token after those in the cache and new [B, L]."""
        return self.logits(self.trunk(self.wte(new), cache)[:, -1]).float()

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        never: int | None = None,
        stop: Callable[[Tensor], bool] | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Continue idx [B, L >= 1] by max_new_tokens; returns [B, L + max_new_tokens].

        Temperature 0 takes the likeliest token; the token `never` is excluded. Ends early once
        `stop` is True for the tokens so far, [B, L + new]. A length-dependent RoPE scaling uses
        the final length from the start, so that cached keys stay valid. Pass an empty `cache` of
        that size to inspect it afterwards. On CUDA many tokens are generated by a RecordedStep.
        Raises UserError for an empty prompt, a negative temperature, and top_k below 1.
        """
        if idx.shape[1] == 0:
            raise UserError("the prompt is empty: generation starts from at least one token")
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise UserError(f"temperature = {temperature} must be >= 0 and top_k = {top_k} >= 1")
        new, cache = idx, cache or KVCache(idx.shape[1] + max_new_tokens)
        recorded = None
        for i in range(max_new_tokens):
            if i == 1 and self._records(idx, max_new_tokens):
                recorded = RecordedStep(self, cache, new)
            logits = self.next_logits(new, cache) if recorded is None else recorded(new)
            if never is not None:
                logits[:, never] = -math.inf
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                if top_k is not None and top_k < self.n_vocab:
                    smallest = logits.topk(top_k).values[:, -1:]
                    logits = logits.masked_fill(logits < smallest, -math.inf)
                probabilities = (logits / temperature).softmax(-1)
                new = torch.multinomial(probabilities, 1, generator=generator)
            idx = torch.cat((idx, new), dim=1)
            if stop is not None and stop(idx):
                break
        cache.position = None
        return idx

    def scale_rope(
        self, scaling: str, factor: float | None = None, theta: float | None = None
    ) -> "GPT":
        """Switch to another RoPE scaling for evaluation (see Rope) and return self.

        A model without RoPE stays as it is. Raises UserError if it was to be scaled, and for YaRN,
        which scales the scores too, where some heads of one attention have no positions.
        """
        if self.config.positions != "rope":
            if scaling != "none" or theta is not None:
                raise UserError(f"positions = {self.config.positions!r}: there is no RoPE to scale")
            return self
        if scaling == "yarn" and self.config.nope_heads and self.config.local_window is None:
            raise UserError(
                "rope scaling = 'yarn' scales the scores of all heads of a layer, but nope_share = "
                f"{self.config.nope_share} leaves some of them without RoPE"
            )
        theta = self.config.rope_theta if theta is None else theta
        rope = replace(self.trunk.rope, scaling=scaling, factor=factor, theta=theta)
        self.trunk.set_rope(rope, self.trunk.rope_length)
        return self

    def parameter_groups(self) -> list[dict]:
        """Parameters with weight decay (two or more dimensions) and those without."""
        return [
            {"params": [p for p in self.parameters() if p.dim() >= 2]},
            {"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]

    def count_parameters(self) -> int:
        """Number of parameters, without the embedding's padding, tied weights counted once."""
        count = sum(p.numel() for p in self.parameters())
        tied = 1 if self.config.tie_embeddings else 2
        return count - tied * self.padding()

    def padding(self) -> int:
        """Parameters of the embedding that stand for no token; the head has as many."""
        return (self.wte.num_embeddings - self.tables * self.n_vocab) * self.config.n_embd

    def flops_per_token(self) -> float:
        """FLOPs of a training step per token.

        6 per weight of a matrix product (2 forward, 4 backward), and per product of the factors of
        'tpa'; and softmax attention's products with the keys that rows see, for every variant, so
        that runs can be compared: the causal half of L keys or, with a window of W, W - W^2 / 2 L
        of them on average.
        """
        c = self.config
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        matrices += sum(layer.projections.products for layer in self.attention_layers())
        L, attention = c.block_size, 0
        for part, heads in (part for layer in self.attention_layers() for part in layer.parts()):
            W = L if part.window is None else min(part.window, L)
            width = (heads.stop - heads.start) * c.d_head
            attention += 6 * width * W * (2 * L - W)  # 3 x 2 products
        return 6 * (matrices - self.padding()) + attention // L


class RecordedStep:
    """A step of generation as a CUDA graph: logits [B, n_vocab] of the token after new [B, 1].

    Launching the kernels of a step one by one takes the host longer than the GPU needs to run them;
    a graph is launched at once. It repeats the same kernels, so their shapes are those of a full
    cache, and what differs between steps, the token and its position, is in tensors that they
    read. To be called under the autocast that it was made under, whose copies of weights it reads.
    """

    def __init__(self, model: GPT, cache: KVCache, new: Tensor) -> None:
        self.model, self.cache, self.new = model, cache, new.clone()
        cache.position = new.new_tensor([cache.length])
        self._step()  # compiles the kernels, which cannot be done while they are recorded
        self.graph = record(self._step, new.device)

    def _step(self) -> Tensor:
        length = self.cache.length
        logits = self.model.next_logits(self.new, self.cache)
        self.cache.length = length
        return logits

    def __call__(self, new: Tensor) -> Tensor:
        assert self.cache.position is not None
        self.new.copy_(new)
        self.cache.position.fill_(self.cache.length)
        self.cache.length += 1
        return self.graph()


def record(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """A function that launches a step's kernels as one CUDA graph.

    It returns the same tensor each time, with new values. Recording does not run the step, which
    must neither wait for the GPU nor compile anything.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        out = step()

    def replay() -> Tensor:
        with torch.cuda.device(device):
            graph.replay()
        return out

    return replay


def loss_chunks(hidden: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of hidden states [n, n_embd] and targets [n, ..] whose logits may be held at once."""
    return zip(hidden.split(EVAL_LOSS_CHUNK), targets.split(EVAL_LOSS_CHUNK), strict=True)


def compile_model(model: GPT) -> nn.Module:
    """The model under torch.compile, with its own parameters: on CUDA as a whole.

    Elsewhere its blocks, in place: they share their code, which takes half a minute to compile in
    place of minutes, and the rest of the model would gain nothing.
    """
    if next(model.parameters()).is_cuda:
        return cast(nn.Module, torch.compile(model))  # of a module it makes a module
    for block in model.trunk.blocks:
        block.compile()
    return model
