"""GPT-2, with any variant of attention.py and with RoPE or other positions."""

import math
from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention_paths.module import Attention
from attention_paths.reference import Context, share_p_n
from config import Config
from errors import UserError
from layers.cache import KVCache
from layers.documents import positions_in_documents
from layers.heads import build_attentions
from layers.losses import LinearCrossEntropy, softmax_, token_losses
from layers.rope import Rope, RopeTable, Rotation, rotate

# Projections that GPT-2 lacks: gates, FoX's forget gates, ASEntmax's row inputs.
EXTRA_PROJECTIONS = ("c_gate", "c_forget", "c_rows")


def build_norm(config: Config) -> nn.RMSNorm | nn.LayerNorm:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=1e-5)
    return nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)


class SelfAttention(nn.Module):
    """Causal self-attention.

    Subclasses override what differs: layers/hybrid.py, in which some heads have no positions
    (apply_rope, context) and two Attention modules may compute the heads (add_attention,
    attentions, attend); layers/tpa.py, which makes q, k and v from factors (projected_widths,
    project, attend, initialise).
    """

    attention: Attention
    extra_multiplications = 0  # per token outside of nn.Linear; T6 has them
    # the standard deviation of c_proj's initial weights (attention, MLP), times sqrt(2 n_layer)
    residual_std = 0.02

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        n_embd = config.n_embd
        self.n_head = config.n_head
        self.n_kv_head = config.kv_heads
        self.d_head = config.d_head
        self.nope_heads = config.nope_heads(layer)
        width = self.n_head * self.d_head
        projected_width = sum(self.projected_widths(config))
        self.c_attn = nn.Linear(n_embd, projected_width, bias=config.bias)
        self.c_proj = nn.Linear(width, n_embd, bias=config.bias)
        self.add_attention(config, layer)
        self.q_norm = nn.RMSNorm(self.d_head, eps=1e-5) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.d_head, eps=1e-5) if config.qk_norm else nn.Identity()
        self.row_input_names = self.attention.variant.from_input  # ASEntmax: u and w
        # these draw no random numbers from the seed: all other weights are the same without them
        with torch.random.fork_rng(devices=[]):
            self.add_extra_projections(config)

    @staticmethod
    def projected_widths(config: Config) -> list[int]:
        """Return the widths of q, k and v in the output of c_attn."""
        kv_width = config.kv_heads * config.d_head
        return [config.n_head * config.d_head, kv_width, kv_width]

    def add_attention(self, config: Config, layer: int) -> None:
        """Build self.attention; a subclass may build two modules."""
        (self.attention,) = build_attentions(config, layer)

    def add_extra_projections(self, config: Config) -> None:
        """Add the projections that GPT-2 does not have: EXTRA_PROJECTIONS."""
        n_embd = config.n_embd
        self.c_gate = None
        if config.gate == "head":
            self.c_gate = nn.Linear(n_embd, self.n_head, bias=config.bias)
        elif config.gate == "element":
            self.c_gate = nn.Linear(n_embd, self.n_head * self.d_head, bias=config.bias)
        # as in the authors' code, FoX's gates always have a bias, ASEntmax's u and w never
        self.c_forget = None
        if config.forget:
            self.c_forget = nn.Linear(n_embd, self.n_head)
        self.c_rows = None
        if self.row_input_names:
            row_width = len(self.row_input_names) * self.n_head
            self.c_rows = nn.Linear(n_embd, row_width, bias=False)

    def attentions(self) -> list[Attention]:
        """Return the attention modules of the heads, in the order of the heads."""
        return [self.attention]

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        cache: KVCache | None,
        document_positions: Tensor | None = None,
    ) -> Tensor:
        if self.nope_heads == self.n_head:  # no head of this layer has RoPE (nope_every)
            rotation = None
        q, k, v = self.project(x, rotation)  # [B, H, L, d], [B, Hk, L, d] twice
        context = self.context(x, rotation, document_positions)
        # the module is an argument, because a hybrid attends with two
        y = self.attend(self.attention, q, k, v, context, cache)  # [B, H, L, d]
        y = y.transpose(1, 2)  # [B, L, H, d]
        if self.c_gate is not None:
            gate = self.c_gate(x).sigmoid()
            gate = gate.unflatten(2, (self.n_head, -1))  # [B, L, H, 1 or d]
            y = y * gate
        return self.c_proj(y.flatten(2))

    def project(
        self,
        x: Tensor,
        rotation: Rotation | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [B, H, L, d], k and v [B, Hk, L, d] of x [B, L, n_embd]."""
        heads = self.c_attn(x).unflatten(2, (-1, self.d_head))
        head_counts = (self.n_head, self.n_kv_head, self.n_kv_head)
        q, k, v = (part.transpose(1, 2) for part in heads.split(head_counts, dim=2))
        q = self.q_norm(q).to(q.dtype)  # RMSNorm's autocast on CUDA returns float32
        k = self.k_norm(k).to(k.dtype)
        if rotation is not None:
            q = self.apply_rope(q, rotation)
            k = self.apply_rope(k, rotation)
        return q, k, v

    def apply_rope(self, x: Tensor, rotation: Rotation) -> Tensor:
        return rotate(x, rotation)

    def context(
        self,
        x: Tensor,
        rotation: Rotation | None,
        document_positions: Tensor | None,
    ) -> Context:
        """Return what attention depends on besides q, k and v, for x [B, L, n_embd]."""
        row_inputs = {}
        if self.c_rows is not None:
            columns = self.c_rows(x).unflatten(2, (-1, self.n_head))
            columns = columns.permute(2, 0, 3, 1)  # [row inputs, B, H, L]
            row_inputs = dict(zip(self.row_input_names, columns, strict=True))
        log_forget = None
        if self.c_forget is not None:
            gates = self.c_forget(x)
            dtype = torch.promote_types(gates.dtype, torch.float32)
            gates = gates.to(dtype)
            log_forget = F.logsigmoid(gates).transpose(1, 2)  # [B, H, L]
        score_scale = 1.0 if rotation is None else rotation.score_scale
        return Context(score_scale, row_inputs, log_forget, document_positions)

    def attend(
        self,
        attention: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        cache: KVCache | None,
    ) -> Tensor:
        """Return the output [B, H, L, d] of these heads: new queries, cached and new keys."""
        if cache is not None:
            new = (k, v, context.log_forget)
            k, v, log_forget = cache.append(attention, new)
            context = replace(context, log_forget=log_forget)
        return attention(q, k, v, context)  # attention_paths.module picks one of its paths

    def initialise(self) -> None:
        """Draw the initial weights that are not drawn as GPT-2's are."""


class MLP(nn.Module):
    """GPT-2's MLP, with the tanh approximation of GELU or exact GELU, or SwiGLU (Shazeer 2020)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden = config.mlp_hidden or 4 * config.n_embd
        self.swiglu = config.mlp == "swiglu"
        self.approximate = "none" if config.mlp == "gelu_erf" else "tanh"
        width = 2 * hidden if self.swiglu else hidden  # SwiGLU: the gate and the value
        self.c_fc = nn.Linear(config.n_embd, width, bias=config.bias)
        self.c_proj = nn.Linear(hidden, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        if self.swiglu:
            gate, x = x.chunk(2, dim=-1)
            x = F.silu(gate) * x
        else:
            x = F.gelu(x, approximate=self.approximate)
        return self.c_proj(x)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(
        self,
        config: Config,
        layer: int,
        layer_class: type[SelfAttention],
    ) -> None:
        super().__init__()
        self.ln_1 = build_norm(config)
        self.attn = layer_class(config, layer)
        self.ln_2 = build_norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        cache: KVCache | None,
        document_positions: Tensor | None = None,
    ) -> Tensor:
        x = x + self.attn(self.ln_1(x), rotation, cache, document_positions)
        return x + self.mlp(self.ln_2(x))


class Trunk(nn.Module):
    """Positions, blocks and the final norm: embeddings [B, L, n_embd] to hidden states."""

    def __init__(
        self,
        config: Config,
        layer_class: type[SelfAttention],
    ) -> None:
        super().__init__()
        self.config = config
        self.wpe: nn.Embedding | None = None
        if config.positions == "learned":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        blocks = [Block(config, layer, layer_class) for layer in range(config.n_layer)]
        share_p_n([block.attn.attention for block in blocks])
        self.blocks = nn.ModuleList(blocks)
        self.ln_f = build_norm(config)
        self.rope: RopeTable | None = None
        if config.positions == "rope":
            rope = Rope(
                config.d_head,
                config.block_size,
                config.rope_theta,
                share=config.rope_share,
            )
            self.rope = RopeTable(rope)

    def forward(
        self,
        x: Tensor,
        cache: KVCache | None = None,
        document_positions: Tensor | None = None,
    ) -> Tensor:
        start = 0 if cache is None else cache.length
        end = start + x.shape[1]
        final_length = end
        if cache is not None:
            cache.check_capacity(end)
            final_length = cache.size  # scales RoPE from the start, so that cached keys stay valid
        if self.wpe is not None and document_positions is not None:
            if end > self.config.block_size:  # only then: max() makes the host wait for the GPU
                self.check_length(int(document_positions.max()) + 1)
            x = x + self.wpe(document_positions)
        elif self.wpe is not None:
            self.check_length(end)
            x = x + self.wpe.weight[start:end]
        rotation = None
        if self.rope is not None:
            rotation = self.rope(start, end, final_length, document_positions)
        for block in self.blocks:
            x = block(x, rotation, cache, document_positions)
        if cache is not None:
            cache.length = end
        return self.ln_f(x)

    def check_length(self, length: int) -> None:
        """Raise UserError if this many positions exceed the learned positions."""
        if self.wpe is not None and length > self.config.block_size:
            raise UserError(
                f"a length of {length} is beyond the {self.config.block_size} learned positions of "
                "this model (block_size)"
            )


class GPT(nn.Module):
    """Embedding, trunk and head. layers.build.build_model picks the class of attention layer."""

    def __init__(
        self,
        config: Config,
        layer_class: type[SelfAttention],
    ) -> None:
        super().__init__()
        self.config = config
        self.n_vocab = config.n_vocab
        # the id of the token that begins a document; None: attention crosses documents
        self.document_start = config.end_of_text if config.document_mask else None
        padded = 128 * math.ceil(self.n_vocab / 128)  # for speed; padding is never predicted
        self.wte = self.build_embedding(padded)
        self.trunk = Trunk(config, layer_class)
        self.lm_head = self.build_head(padded)
        self.loss_softmax = softmax_  # compile_model replaces it
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self._initialise(layer_class.residual_std)

    def build_embedding(self, size: int) -> nn.Embedding:
        return nn.Embedding(size, self.config.n_embd)

    def build_head(self, size: int) -> nn.Linear:
        return nn.Linear(self.config.n_embd, size, bias=False)

    def attention_layers(self) -> list[SelfAttention]:
        return [module for module in self.modules() if isinstance(module, SelfAttention)]

    @torch.no_grad()
    def _initialise(self, residual_std: float) -> None:
        """Draw GPT-2's initial weights: normal(0, 0.02); biases and padding rows are 0.

        The standard deviation of c_proj, whose output is added to the residual stream, is
        residual_std / sqrt(2 n_layer). `SelfAttention.initialise` may draw other weights.
        """
        extra = []
        for name, module in self.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            if module.bias is not None:
                nn.init.zeros_(module.bias)
            if name.endswith(EXTRA_PROJECTIONS):
                extra.append(module)
            elif name.endswith("c_proj"):
                std = residual_std / math.sqrt(2 * self.config.n_layer)
                nn.init.normal_(module.weight, std=std)
            else:
                nn.init.normal_(module.weight, std=0.02)
        if self.trunk.wpe is not None:
            nn.init.normal_(self.trunk.wpe.weight, std=0.02)
        for layer in self.attention_layers():
            layer.initialise()
        nn.init.normal_(self.wte.weight, std=0.02)
        for module in extra:  # last: variants with and without them share all other weights
            nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(self.padding_rows(self.wte.weight))
        nn.init.zeros_(self.padding_rows(self.lm_head.weight))

    def padding_rows(self, weight: Tensor) -> Tensor:
        """Return the rows of the weights of wte or lm_head that stand for no token."""
        return weight[self.n_vocab :]

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Return logits [B, L, n_vocab] of idx [B, L]; with targets [B, L], the mean loss in nats.

        Negative targets are ignored.
        """
        x = self.hidden(idx)
        if targets is None:
            return self.logits(x)
        # computes the gradients, too, a chunk of tokens at a time, and never holds all logits
        return LinearCrossEntropy.apply(
            x.flatten(0, 1),
            self.lm_head.weight,
            targets.flatten(0, 1),
            self.n_vocab,
            self.loss_softmax,
        )

    def hidden(
        self,
        idx: Tensor,
        cache: KVCache | None = None,
        is_start: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [B, L, n_embd] of idx [B, L], the tokens after the cached ones.

        A token sees its own document only. `is_start` [B, L] marks the first token of each
        document; by default, end-of-text does if the model has document_mask. Else a sequence is
        one document.
        """
        # how many tokens of each sequence's last document the cache holds
        earlier: Tensor | int = 0
        if cache is not None:
            earlier = cache.length if cache.document_length is None else cache.document_length
        if is_start is None:
            if self.document_start is not None:
                is_start = idx == self.document_start
            elif isinstance(earlier, Tensor):  # the cache's documents go on
                is_start = torch.zeros_like(idx, dtype=torch.bool)
        document_positions = None
        if is_start is not None:
            document_positions = positions_in_documents(is_start, earlier)
            if cache is not None:
                cache.document_length = document_positions[:, -1:] + 1
        return self.trunk(self.wte(idx), cache, document_positions)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [.., n_vocab] of hidden states [.., n_embd]."""
        return self.lm_head(x)[..., : self.n_vocab]

    @torch.no_grad()
    def token_losses(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Return the loss in nats of every target, in their shape, without holding all logits.

        Negative targets have a loss of 0.
        """
        x = self.hidden(idx).flatten(0, 1)
        losses = token_losses(x, self.lm_head.weight, targets.flatten(0, 1), self.n_vocab)
        return losses.view(targets.shape)

    def scale_rope(
        self,
        scaling: str,
        factor: float | None = None,
        theta: float | None = None,
    ) -> "GPT":
        """Switch to another RoPE scaling for evaluation (see Rope) and return self.

        Raises UserError if a scaling, factor or theta is asked of a model without RoPE.
        """
        table = self.trunk.rope
        if table is None:
            if scaling != "none" or factor is not None or theta is not None:
                raise UserError(f"positions = {self.config.positions!r}: there is no RoPE to scale")
            return self
        if theta is None:
            theta = self.config.rope_theta
        rope = replace(
            table.rope,
            scaling=scaling,
            factor=factor,
            theta=theta,
        )
        table.set(rope, table.length)
        return self

    def scale_scores(self, log_base: float | None) -> "GPT":
        """Multiply scores by log_a(a + n) for evaluation, a = log_base, and return self.

        n is the number of keys that a query sees (SWAN-GPT, arXiv 2504.08719). The local heads of
        a hybrid have no such factor.
        """
        for module in self.modules():
            if isinstance(module, Attention) and not module.is_local:
                module.log_base = log_base
        return self

    def count_parameters(self) -> int:
        """Count parameters without the embedding's padding; tied weights count once."""
        count = sum(p.numel() for p in self.parameters())
        padding = self.padding_rows(self.wte.weight).numel()
        if not self.config.tie_embeddings:
            padding *= 2
        return count - padding

    def flops_per_token(self) -> float:
        """Count the FLOPs of a training step per token.

        These are 6 (2 forward, 4 backward) per weight of a matrix, and per multiplication with T6's
        factors. Attention is charged, for every variant, as softmax over the visible keys, so that
        runs can be compared: T / 2 keys on average or, with a window of W, W - W^2 / (2 T). nanoGPT
        charges T keys, and so counts twice the FLOPs of attention.
        """
        weights = 0
        for module in self.modules():
            if isinstance(module, nn.Linear):
                weights += module.weight.numel()
        weights -= self.padding_rows(self.lm_head.weight).numel()
        T = self.config.block_size
        sequence_attention_flops = 0
        for layer in self.attention_layers():
            weights += layer.extra_multiplications
            for attention in layer.attentions():
                W = min(attention.window or T, T)
                width = attention.n_head * attention.head_size
                # 12 width for each of the T W - W^2 / 2 visible pairs: two products, 6 each
                sequence_attention_flops += 6 * width * W * (2 * T - W)
        return 6 * weights + sequence_attention_flops // T


def compile_model(model: GPT) -> None:
    """Compile the model's blocks and loss, in place.

    The blocks share their code, so the time this takes does not grow with n_layer. The rest of
    the model, embeddings and the last norm, would gain little.
    """
    # optimize_ddp would split one graph at DDP's buckets; here each block is a graph already
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = 32  # lengths of batches, kinds of blocks
    # None would make training's graph dynamic at validation's last batch, which may be smaller
    dynamic = None if model.config.varied_lengths else False
    for block in model.trunk.blocks:
        block.compile(dynamic=dynamic)
    model.loss_softmax = torch.compile(softmax_)
