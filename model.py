"""GPT-2 with any variant of attention.py: trunk, head, cache, generation."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention import VARIANTS, Attention, share_parameters
from config import Config
from errors import UserError

# Rows of logits (one per token) that the chunked training loss and evaluation hold at once; these
# were the fastest of 128 to 1024 on a CPU.
TRAINED_ROWS = 1024
EVALUATED_ROWS = 256

# RoPE's cos and sin of the positions' angles, [L, d/2], and the factor on every attention score.
Rotation = tuple[Tensor, Tensor, float]


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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, L, d] with every pair (x_i, x_{i + d/2}) turned by its angle; cos, sin [L, d/2]."""
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class KVCache:
    """Keys (after RoPE) and values of up to `size` positions, for every layer.

    A layer with a window keeps a ring of them: position i is at i modulo the window.
    """

    def __init__(self, size: int):
        self.size, self.length = size, 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def append(
        self, layer: int, k: Tensor, v: Tensor, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append k, v [B, Hk, new, d]; returns the keys and values that the new positions see.

        They are [B, Hk, length + new, d] or, with a window, at most [B, Hk, window - 1 + new, d]:
        in order, but for a single new position, which attends to them all, in the ring's order.
        """
        B, H, new, d = k.shape
        if layer not in self.keys:
            room = self.size if window is None else min(self.size, window)
            self.keys[layer] = k.new_empty(B, H, room, d)
            self.values[layer] = v.new_empty(B, H, room, d)
        keys, values = self.keys[layer], self.values[layer]
        start, end = self.length, self.length + new
        if window is not None and end > window:
            if new > 1:
                past = torch.arange(max(0, start - window + 1), start, device=k.device) % window
                k = torch.cat((keys[:, :, past], k), dim=2)
                v = torch.cat((values[:, :, past], v), dim=2)
                kept = torch.arange(end - window, end, device=k.device) % window
                keys[:, :, kept], values[:, :, kept] = k[:, :, -window:], v[:, :, -window:]
                return k, v
            start %= window
        keys[:, :, start : start + new], values[:, :, start : start + new] = k, v
        return keys[:, :, :end], values[:, :, :end]


def build_norm(config: Config) -> nn.RMSNorm | nn.LayerNorm:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=1e-5)
    return nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)


def build_attention(config: Config) -> Attention:
    return Attention(
        VARIANTS[config.attention],
        p=config.p,
        n_head=config.n_head,
        head_size=config.d_head,
        trained_length=config.block_size,
        follow_length=config.attention_length == "current",
        impl=config.attention_impl,
        s_init=config.s_init,
        b_init=config.b_init,
        gamma=config.gamma,
        window=config.window,
    )


class SelfAttention(nn.Module):
    """Attention between its two projections."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.n_head, config.kv_heads, config.kv_heads  # of q, k and v
        self.c_attn = nn.Linear(config.n_embd, sum(self.heads) * config.d_head, bias=config.bias)
        self.c_proj = nn.Linear(config.n_head * config.d_head, config.n_embd, bias=config.bias)
        self.attention = build_attention(config)

    def forward(
        self, x: Tensor, rotation: Rotation | None, cache: KVCache | None, layer: int
    ) -> Tensor:
        B, L, _ = x.shape
        heads = self.c_attn(x).view(B, L, sum(self.heads), -1).transpose(1, 2)
        q, k, v = heads.split(self.heads, dim=1)  # [B, H, L, d], [B, Hk, L, d]
        score_scale = 1.0
        if rotation is not None:
            cos, sin, score_scale = rotation
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.append(layer, k, v, self.attention.window)
        y = self.attention(q, k, v, score_scale, cache.size if cache else None)
        return self.c_proj(y.transpose(1, 2).flatten(2))


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
            return self.c_proj(F.silu(gate) * x)
        return self.c_proj(F.gelu(x, approximate="tanh"))  # GPT-2's own approximation


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
        rotation = None
        if self.config.positions == "rope":
            if length != self.rope_length:
                self.set_rope(self.rope, length)
            rotation = self.cos[start:end], self.sin[start:end], self.score_scale
        if self.wpe is not None:
            if length > len(self.wpe.weight):
                raise UserError(
                    f"a length of {length} is beyond the {len(self.wpe.weight)} learned positions "
                    "of this model (block_size)"
                )
            x = x + self.wpe.weight[start:end]
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
    """Embedding, trunk and head; a position is a token or, of orbits, a pair of them [.., 2]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.n_vocab = config.n_vocab
        rows = -(-self.n_vocab // 128) * 128  # padded for speed; padding is never predicted
        n_embd, pairs = config.n_embd, config.task == "orbits"
        self.wte = PairEmbedding(rows, n_embd) if pairs else nn.Embedding(rows, n_embd)
        self.trunk = Trunk(config)
        self.lm_head = PairHead(n_embd, rows) if pairs else nn.Linear(n_embd, rows, bias=False)
        self.tables = 2 if pairs else 1  # of wte, and of lm_head
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """GPT-2's initialisation: weights normal(0, 0.02), biases 0.

        The deviation is smaller where a projection adds to the residual stream.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                depth = 2 * self.config.n_layer if name.endswith("c_proj") else 1
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(depth))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.trunk.wpe is not None:
            nn.init.normal_(self.trunk.wpe.weight, std=0.02)
        nn.init.normal_(self.wte.weight, std=0.02)
        for weight in (self.wte.weight, self.lm_head.weight):
            nn.init.zeros_(weight.unflatten(0, (self.tables, -1))[:, self.n_vocab :])

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Logits [B, L, n_vocab] of idx [B, L]; with targets [B, L], the mean loss in nats.

        Of pairs they are [B, L, 2, n_vocab], [B, L, 2] and [B, L, 2].
        """
        x = self.trunk(self.wte(idx), cache)
        if targets is None:
            return self.logits(x)
        x, targets = x.flatten(0, 1), targets.flatten()
        chunked = hasattr(F, "linear_cross_entropy") and not torch.compiler.is_compiling()
        large = self.tables == 1 and len(x) >= TRAINED_ROWS and self.n_vocab > self.config.n_embd
        if chunked and large and x.is_cpu and torch.is_grad_enabled():
            # never holds all logits, and on a CPU is faster than the two steps below
            options = nn.LinearCrossEntropyOptions(batch_chunk_size=TRAINED_ROWS)
            head = self.lm_head.weight[: self.n_vocab]
            return F.linear_cross_entropy(x, head, targets, options=options)
        return F.cross_entropy(self.logits(x).flatten(0, -2), targets)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [.., n_vocab] of hidden states [.., n_embd]."""
        return self.lm_head(x)[..., : self.n_vocab]

    @torch.no_grad()
    def token_losses(self, idx: Tensor, targets: Tensor) -> Tensor:
        """The loss in nats of every target, in their shape and float32; never holds all logits."""
        x = self.trunk(self.wte(idx)).flatten(0, 1).split(EVALUATED_ROWS)
        parts = zip(x, targets.flatten(0, 1).split(EVALUATED_ROWS), strict=True)
        losses = [
            F.cross_entropy(self.logits(h).float().flatten(0, -2), t.flatten(), reduction="none")
            for h, t in parts
        ]
        return torch.cat(losses).view(targets.shape)

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
    ) -> Tensor:
        """Continue idx [B, L >= 1] by max_new_tokens; returns [B, L + max_new_tokens].

        Temperature 0 takes the likeliest token; the token `never` is excluded. Ends early once
        `stop` is True for the tokens so far, [B, L + new]. A length-dependent RoPE scaling uses
        the final length from the start, so that cached keys stay valid. Raises UserError for an
        empty prompt, a negative temperature, and top_k below 1.
        """
        if idx.shape[1] == 0:
            raise UserError("the prompt is empty: generation starts from at least one token")
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise UserError(f"temperature = {temperature} must be >= 0 and top_k = {top_k} >= 1")
        cache, new = KVCache(idx.shape[1] + max_new_tokens), idx
        for _ in range(max_new_tokens):
            x = self.trunk(self.wte(new), cache)
            logits = self.logits(x[:, -1]).float()  # [B, n_vocab]
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
        return idx

    def scale_rope(
        self, scaling: str, factor: float | None = None, theta: float | None = None
    ) -> "GPT":
        """Switch to another RoPE scaling for evaluation (see Rope) and return self.

        A model without RoPE stays as it is. Raises UserError if it was to be scaled.
        """
        if self.config.positions != "rope":
            if scaling != "none" or theta is not None:
                raise UserError(f"positions = {self.config.positions!r}: there is no RoPE to scale")
            return self
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

        6 per weight of a matrix product (2 forward, 4 backward), and softmax attention's products
        with the keys that rows see, for every variant, so that runs can be compared: the causal
        half of L keys or, with a window of W, W - W^2 / 2 L of them on average.
        """
        c = self.config
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        L = c.block_size
        W = L if c.window is None else min(c.window, L)
        attention = 6 * c.n_layer * c.n_head * c.d_head * W * (2 * L - W) // L  # 3 x 2 products
        return 6 * (matrices - self.padding()) + attention
