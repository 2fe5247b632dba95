"""GPT-2 with any variant of attention.py, with RoPE or other positions."""

import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention_paths.module import Attention
from attention_paths.reference import Context, share_parameters
from config import Config
from errors import UserError
from layers.cache import KVCache
from layers.heads import build_parts
from layers.losses import chunked_loss, chunks, has_chunked_loss, losses_by_parts
from layers.pairs import PairEmbedding, PairHead
from layers.projections import TensorProductProjections, build_projections
from layers.rope import Rope, RopeTable, Rotation, rotate


def build_norm(config: Config) -> nn.RMSNorm | nn.LayerNorm:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=1e-5)
    return nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)


class SelfAttention(nn.Module):
    """Attention between its two projections; in a hybrid the heads are in two parts."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        n, H, d, bias = config.n_embd, config.n_head, config.d_head, config.bias
        self.layer, self.nope_heads = layer, config.nope_heads(layer)
        self.n_head, self.group = H, H // config.kv_heads
        self.projections = build_projections(config)
        self.c_attn = nn.Linear(n, self.projections.columns, bias=bias)
        self.c_proj = nn.Linear(H * d, n, bias=bias)
        self.attention, self.local = build_parts(config, layer)
        self.q_norm = nn.RMSNorm(d, eps=1e-5) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(d, eps=1e-5) if config.qk_norm else None
        gates = {"none": 0, "head": H, "element": H * d}[config.gate]
        self.c_gate = nn.Linear(n, gates, bias=bias) if gates else None
        # FoX has a bias whatever the other layers have, ASEntmax none (their authors' code)
        self.c_forget = nn.Linear(n, H) if config.forget else None
        self.numbers = self.attention.variant.from_input
        self.c_rows = nn.Linear(n, len(self.numbers) * H, bias=False) if self.numbers else None

    def forward(self, x: Tensor, rotation: Rotation | None, cache: KVCache | None) -> Tensor:
        rotation = rotation if self.nope_heads < self.n_head else None
        q, kv = self.project(x, rotation)  # q [B, H, L, d]; kv: k and v [B, Hk, L, d], or factors
        context, decoding = self.context(x, rotation), cache is not None and x.shape[1] == 1
        out = []
        for part, (attention, heads) in enumerate(self.parts()):
            seen, own = self.projections.of_heads(kv, heads), self.of_heads(context, heads)
            if cache is not None:
                seen, own = cache.append((self.layer, part), seen, own, attention)
            k, v = self.projections.keys_and_values(seen, decoding)
            out.append(attention(q[:, heads], k, v, own))
        # joining the heads of one part copies nothing: kernels lay them out side by side
        y = (out[0] if len(out) == 1 else torch.cat(out, dim=1)).transpose(1, 2)  # [B, L, H, d]
        if self.c_gate is not None:  # [B, L, H, 1 or d]
            y = y * self.c_gate(x).sigmoid().unflatten(2, (self.n_head, -1))
        return self.c_proj(y.flatten(2))

    def parts(self) -> list[tuple[Attention, slice]]:
        """The attention of each part of the heads."""
        split = self.n_head if self.local is None else self.nope_heads
        parts = [(self.attention, slice(0, split)), (self.local, slice(split, self.n_head))]
        return [(attention, heads) for attention, heads in parts if attention is not None]

    def project(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, list[Tensor]]:
        """q and what the cache keeps of k and v, after QK norm and RoPE."""

        def transform(norm: nn.Module | None, first: int, x: Tensor) -> Tensor:
            x = x if norm is None else norm(x).to(x.dtype)  # autocast on CUDA norms in float32
            return x if rotation is None else rotate(x, rotation.cos, rotation.sin, first)

        to_q = partial(transform, self.q_norm, self.nope_heads)
        to_k = partial(transform, self.k_norm, self.nope_heads // self.group)
        return self.projections.split(self.c_attn(x), to_q, to_k)

    def context(self, x: Tensor, rotation: Rotation | None) -> Context:
        """YaRN's factor, and the rows' numbers and log forget gates [B, H, L] of x [B, L, n]."""
        numbers, gates = {}, None
        if self.c_rows is not None:
            rows = self.c_rows(x).unflatten(2, (len(self.numbers), -1)).permute(2, 0, 3, 1)
            numbers = dict(zip(self.numbers, rows.unbind(), strict=True))
        if self.c_forget is not None:
            gates = self.c_forget(x)
            dtype = torch.promote_types(gates.dtype, torch.float32)
            gates = F.logsigmoid(gates.to(dtype)).transpose(1, 2)
        return Context(1.0 if rotation is None else rotation.score_scale, numbers, gates)

    def of_heads(self, context: Context, heads: slice) -> Context:
        """The context of these heads; YaRN scales no scores of heads without RoPE."""
        own = context.part((slice(None), heads), slice(None), slice(None))
        return replace(own, score_scale=1.0) if heads.stop <= self.nope_heads else own


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

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.ln_1, self.attn = build_norm(config), SelfAttention(config, layer)
        self.ln_2, self.mlp = build_norm(config), MLP(config)

    def forward(self, x: Tensor, rotation: Rotation | None, cache: KVCache | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), rotation, cache)
        return x + self.mlp(self.ln_2(x))


class Trunk(nn.Module):
    """Positions, blocks and the final norm: embeddings [B, L, n_embd] to hidden states."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        learned = config.positions == "learned"
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if learned else None
        blocks = [Block(config, layer) for layer in range(config.n_layer)]
        share_parameters([block.attn.attention for block in blocks])
        self.blocks = nn.ModuleList(blocks)
        self.ln_f = build_norm(config)
        self.rope: RopeTable | None = None
        if config.positions == "rope":
            rope = Rope(config.d_head, config.block_size, config.rope_theta)
            self.rope = RopeTable(rope, config.block_size)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        start = cache.length if cache else 0
        length, end = cache.size if cache else x.shape[1], start + x.shape[1]
        self.check_length(end, cache)
        rotation = None if self.rope is None else self.rope(start, end, length)
        if self.wpe is not None:
            x = x + self.wpe.weight[start:end]
        for block in self.blocks:
            x = block(x, rotation, cache)
        if cache:
            cache.length = end
        return self.ln_f(x)

    def check_length(self, length: int, cache: KVCache | None) -> None:
        """Raise UserError where this many positions exceed the cache or the learned positions."""
        if cache and length > cache.size:
            raise UserError(f"a cache of {cache.size} positions is too small for {length}")
        if self.wpe is not None and length > self.config.block_size:
            raise UserError(
                f"a length of {length} is beyond the {self.config.block_size} learned positions of "
                "this model (block_size)"
            )


class GPT(nn.Module):
    """Embedding, trunk and head; a position holds a token or, in some tasks, a pair of tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.n_vocab = config.n_vocab
        padded = -(-self.n_vocab // 128) * 128  # for speed; padding is never predicted
        n_embd, pairs = config.n_embd, config.task == "orbits"
        trunk = Trunk(config)
        self.wte = PairEmbedding(padded, n_embd) if pairs else nn.Embedding(padded, n_embd)
        self.trunk = trunk  # modules are initialised in the order of their assignment
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

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [B, L, n_vocab] of idx [B, L]; with targets [B, L], the mean loss in nats.

        A target of -100 has no loss. Where a position holds a pair, these are [B, L, 2, n_vocab],
        [B, L, 2] and [B, L, 2].
        """
        x = self.trunk(self.wte(idx))
        if targets is None:
            return self.logits(x)
        x, targets = x.flatten(0, 1), targets.flatten()
        if self.tables == 1 and has_chunked_loss(x, self.n_vocab):
            return chunked_loss(x, self.lm_head.weight[: self.n_vocab], targets)
        return self.mean_loss(x, targets)

    def mean_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of hidden states [n, n_embd] with targets [n] or, of pairs, [2 n]."""
        return F.cross_entropy(self.logits(x).flatten(0, -2), targets)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [.., n_vocab] of hidden states [.., n_embd]."""
        return self.lm_head(x)[..., : self.n_vocab]

    @torch.no_grad()
    def token_losses(self, idx: Tensor, targets: Tensor) -> Tensor:
        """The loss in nats of every target, in their shape and float32; never holds all logits."""
        x = self.trunk(self.wte(idx)).flatten(0, 1)
        by_parts, head = x.is_cpu and self.tables == 1, self.lm_head.weight[: self.n_vocab]

        def losses(x: Tensor, targets: Tensor) -> Tensor:
            if by_parts:
                return losses_by_parts(x, head, targets)
            logits = self.logits(x).float().flatten(0, -2)
            return F.cross_entropy(logits, targets.flatten(), reduction="none")

        found = [losses(*chunk) for chunk in chunks(x, targets.flatten(0, 1))]
        return torch.cat(found).view(targets.shape)

    def scale_rope(
        self, scaling: str, factor: float | None = None, theta: float | None = None
    ) -> "GPT":
        """Switch to another RoPE scaling for evaluation (see Rope) and return self.

        A model without RoPE stays as it is. Raises UserError if it was to be scaled.
        """
        table = self.trunk.rope
        if table is None:
            if scaling != "none" or theta is not None:
                raise UserError(f"positions = {self.config.positions!r}: there is no RoPE to scale")
            return self
        theta = self.config.rope_theta if theta is None else theta
        table.set(replace(table.rope, scaling=scaling, factor=factor, theta=theta), table.length)
        return self

    def parameter_groups(self) -> list[dict]:
        """Parameters with weight decay (two or more dimensions), then parameters without it."""
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


def compile_model(model: GPT) -> GPT:
    """Compile the model's blocks and loss, in place; returns the model.

    The blocks share their code, so that the time this takes does not grow with n_layer. The rest of
    the model, embeddings and the last norm, would gain little.
    """
    # it splits one graph at DDP's buckets, to reduce gradients early; blocks are separate already
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = 32  # recall's lengths, kinds of blocks
    # False: else a smaller last batch in validation makes the graph of training dynamic too
    for block in model.trunk.blocks:
        block.compile(dynamic=None if "recall" in model.config.task else False)
    model.mean_loss = torch.compile(model.mean_loss)  # type: ignore[method-assign]
    return model
