"""Loads and checks a transformers model, with the methods of GPT that evaluations call."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from errors import UserError, first_line
from runtime.hf_config import load_hf_config, load_pretrained
from scripts.common.hf_attention import NAME, attention_layers, use_tiles
from scripts.common.hf_models import ModelConfig, beginning_of_text
from scripts.common.options import Options
from scripts.common.windows import depends_on_hidden

# The names of our RoPE scalings in transformers.
ROPE_TYPES = {"linear": "linear", "dynamic_ntk": "dynamic", "yarn": "yarn"}
# Logits that are in memory at once: 128 MB in float32.
LOGITS = 2**25
# The share by which a value may differ between two ways to compute it in 16 bits.
TOLERANCE = 0.05


class CausalLM:
    """A model of transformers, with the methods of model.GPT that evaluations of text call."""

    def __init__(self, model: Any, first_token: int | None = None) -> None:
        self.model = model
        self.trunk = model.get_decoder()
        if self.trunk is model:  # Llama 4
            self.trunk = model.model
        self.tiles = use_tiles(model)
        self.first_token = first_token

    def hidden(self, idx: Tensor) -> Tensor:
        """Return the hidden states [B, L, n_embd] of ids [B, L].

        The token that the tokenizer puts before every text, such as BOS, replaces the first id, so
        that a window begins like a training text.
        """
        if self.first_token is not None:
            idx = idx.clone()
            idx[:, 0] = self.first_token
        for module in self.trunk.modules():
            if getattr(module, "rope_type", None) == "dynamic":
                # else transformers keeps the frequencies of a longer text before this one
                module.max_seq_len_cached = 0
        output = self.trunk(input_ids=idx, use_cache=False)
        self.output_type = type(output)
        return output.last_hidden_state

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [B, L, n_vocab] of some of the hidden states that `hidden` returned.

        They come out of the model's own forward pass, with these states in place of its trunk's.
        """
        output = self.output_type(last_hidden_state=x)
        idx = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)
        self.trunk.forward = lambda *arguments, **options: output
        try:
            return self.model(input_ids=idx, use_cache=False).logits
        finally:
            del self.trunk.forward  # so that the method of its class is called again

    @torch.no_grad()
    def attention_weights(
        self, idx: Tensor, layer: int, reduce: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's attention weights [B, H, L, L] for idx [B, L], and its rows' keys [L].

        The weights are reduced as by evaluation.layer_attention_weights; the keys are the number
        that each row sees. Raises UserError if the layer does not show its weights.
        """
        rows: list[Tensor] = []  # of each tile
        keys: list[Tensor] = []

        def record(A: Tensor, visible: Tensor) -> None:
            rows.append(reduce(A))
            keys.append(visible[0, 0].sum(-1))

        for module in attention_layers(self.model):
            if getattr(module, "layer_idx", None) == layer:
                self.tiles.recorders = {module: record}
        self.hidden(idx)
        self.tiles.recorders = {}
        if not rows:
            raise UserError(f"layer {layer} of this model has no attention that shows its weights")
        return torch.cat(rows, dim=2), torch.cat(keys)

    @torch.no_grad()
    def token_losses(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Return the loss in nats of every target, in their shape, without holding all logits."""
        x = self.hidden(idx).flatten(0, 1)
        losses = []
        size = max(1, LOGITS // self.model.config.get_text_config().vocab_size)
        chunks = zip(x.split(size), targets.flatten().split(size), strict=True)
        for x_chunk, chunk_targets in chunks:
            logits = self.logits(x_chunk[None])[0].float()
            losses.append(F.cross_entropy(logits, chunk_targets, reduction="none"))
        return torch.cat(losses).view(targets.shape)


@torch.no_grad()
def load_model(config: ModelConfig, options: Options, device: torch.device) -> CausalLM:
    """Load a model's weights onto a device, in evaluation mode.

    Raises UserError if that fails, and where the model cannot be measured in this way.
    """
    from transformers import AutoModelForCausalLM

    # it would warn of what is refused below
    logging.getLogger("transformers").setLevel(logging.ERROR)
    loaded = load_pretrained(
        AutoModelForCausalLM,
        config.source,
        config=scaled_config(config, options),
        dtype=options.torch_dtype,
        trust_remote_code=False,
    )
    model = CausalLM(loaded.to(device).eval(), beginning_of_text(config.source))
    check_logits(model, config)
    if config.has_control or options.window is not None:
        check_window(model, config)
    model.tiles.window = options.window
    return model


def scaled_config(config: ModelConfig, options: Options) -> Any:
    """The config of transformers, with the RoPE scaling of the options if there is one.

    Raises UserError if the model has no RoPE, and where transformers has no such scaling or has
    to know its factor.
    """
    options.check_rope(config)
    settings = copy.deepcopy(load_hf_config(config.source))
    text_settings = settings.get_text_config()
    scaling = options.rope or "none"
    if scaling == "none" and options.rope_theta is None:
        return settings
    rope = dict(text_settings.rope_parameters)
    if "rope_theta" not in rope:
        raise UserError(f"{config.label} has several kinds of RoPE: --rope cannot scale them")
    if scaling != "none":
        if scaling not in ROPE_TYPES:
            known = ", ".join(ROPE_TYPES)
            raise UserError(f"--rope {scaling}: for {config.label} it must be one of {known}")
        if scaling != "dynamic_ntk" and options.rope_factor is None:
            raise UserError(f"--rope {scaling} for {config.label} needs --rope_factor N")
        trained_length = config.block_size  # max_position_embeddings, or --window
        text_settings.max_position_embeddings = trained_length  # what Dynamic NTK reads
        rope = {
            "rope_type": ROPE_TYPES[scaling],
            "factor": options.rope_factor or 1.0,
            "original_max_position_embeddings": trained_length,
        } | {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    if options.rope_theta is not None:
        rope["rope_theta"] = options.rope_theta
    text_settings.rope_parameters = rope
    return settings


# ---- checks, with a few random tokens ----


def probe_ids(config: ModelConfig, device: torch.device) -> Tensor:
    """Return random ids [3, n_layer + 2] of three nearly equal rows.

    The second row differs from the first in its first id alone, the third in its last id but one.
    """
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(config.text_ids, (config.n_layer + 2,), generator=generator)
    idx = row.repeat(3, 1)
    idx[1, 0] += 1
    idx[2, -2] += 1
    return (idx % config.text_ids).to(device)


def check_logits(model: CausalLM, config: ModelConfig) -> None:
    """Raise UserError unless the logits are those of the model's forward pass in transformers."""
    idx = probe_ids(config, model.model.device)
    if model.first_token is not None:
        idx[:, 0] = model.first_token
    try:
        logits = model.logits(model.hidden(idx))
        model.model.set_attn_implementation("eager")
        expected = model.model(input_ids=idx, use_cache=False).logits
        model.model.set_attn_implementation(NAME)
    except Exception as error:  # what a model makes of a mask that it does not know
        raise UserError(
            f"{config.label} cannot be measured: its forward pass fails: {first_line(error)}"
        ) from error
    if not (logits - expected).norm() <= TOLERANCE * expected.norm():
        raise UserError(
            f"{config.label} cannot be measured: computed in tiles, its attention gives other "
            "logits, for example because it is not causal"
        )


def check_window(model: CausalLM, config: ModelConfig) -> None:
    """Raise UserError if the model's layers see more than a window shows them.

    With a window of 2 the last position of n layers depends on the last n + 1 inputs.
    """
    model.tiles.window = 2
    idx = probe_ids(config, model.model.device)
    x = model.trunk(input_ids=idx, use_cache=False).last_hidden_state
    if depends_on_hidden(x[:, -1], TOLERANCE):
        raise UserError(
            f"{config.label} sees more than the keys of a window: some of its layers are not "
            "attention, or their attention ignores the mask (--no_control measures it without the "
            "window)"
        )
