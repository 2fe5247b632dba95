"""OpenAI's GPT-2 as the initial weights of a run: --init_from=hf:gpt2, or hf:FOLDER."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from config import Config
from errors import UserError, first_line
from model import GPT
from runtime.checkpoint import Found, load_weights

PREFIX = "hf:"


def load_initial(model: GPT, source: str) -> Found:
    """Copy the weights of a run, or of a Hugging Face GPT-2, into the model.

    Raises UserError where they cannot be loaded or do not fit.
    """
    if source.startswith(PREFIX):
        return load_gpt2(model, source.removeprefix(PREFIX))
    return load_weights(model, source)


@torch.no_grad()
def load_gpt2(model: GPT, name: str) -> Found:
    """Copy GPT2LMHeadModel.from_pretrained(name) into the model, whatever its attention variant.

    A model of fewer positions takes the first. The attention's own scalars, such as SSMax's s, keep
    their initial values. Raises UserError where transformers or the weights are missing, or a
    setting differs.
    """
    own, found = model.state_dict(), {}
    for key, x in read_gpt2(model.config, name).items():
        key = key.removeprefix("transformer.").replace("h.", "trunk.blocks.", 1)
        key = key if key.startswith(("trunk.", "wte.", "lm_head.")) else f"trunk.{key}"
        if key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            x = x.T  # transformers has them as [in, out]
        found[key] = x
    scalars = {key for key in own if ".attention." in key}
    if unknown := own.keys() - found.keys() - scalars:
        raise UserError(
            f"attention = {model.config.attention!r} has weights that hf:{name} lacks, such as "
            f"{min(unknown)}; every other variant can start from it"
        )
    for key, x in found.items():
        length = min(len(x), len(own[key]))  # wte is padded here, and wpe may be shorter
        own[key][:length] = x[:length]
    return Found(Path(f"{PREFIX}{name}"), 0, checksum(found))


def read_gpt2(config: Config, name: str) -> dict[str, Tensor]:
    """The weights of a GPT2LMHeadModel, after a check that its settings are the config's."""
    try:
        from transformers import AutoConfig, GPT2LMHeadModel
    except ImportError as error:
        raise UserError(f"hf:{name} needs transformers: pip install transformers") from error
    try:
        check_settings(config, name, AutoConfig.from_pretrained(name))
        return GPT2LMHeadModel.from_pretrained(name).state_dict()
    except (OSError, ValueError) as error:
        raise UserError(f"hf:{name} cannot be loaded: {first_line(error)}") from error


def check_settings(config: Config, name: str, theirs: Any) -> None:
    """Raise UserError with the first setting that is not GPT-2's."""
    if theirs.model_type != "gpt2":
        raise UserError(f"hf:{name} is a {theirs.model_type} model; only GPT-2's weights fit here")
    if theirs.activation_function != "gelu_new" or theirs.layer_norm_epsilon != 1e-5:
        raise UserError(f"hf:{name} is not OpenAI's: its activation or LayerNorm differs")
    if config.block_size > theirs.n_positions:
        raise UserError(
            f"block_size = {config.block_size}, but hf:{name} has {theirs.n_positions} positions"
        )
    wanted = {
        "positions": "learned", "projections": "linear", "norm": "layernorm", "mlp": "gelu",
        "bias": True, "tie_embeddings": True, "n_layer": theirs.n_layer, "n_head": theirs.n_head,
        "n_embd": theirs.n_embd, "n_vocab": theirs.vocab_size,
        "d_head": theirs.n_embd // theirs.n_head, "kv_heads": theirs.n_head, "qk_norm": False,
        "gate": "none", "forget": False,
    }  # fmt: skip
    for key, value in wanted.items():
        if getattr(config, key) != value:
            raise UserError(
                f"{key} = {getattr(config, key)!r}, but hf:{name} has {value!r}; "
                "configs/scales/gpt2.py has the settings of OpenAI's smallest"
            )


def checksum(weights: dict[str, Tensor]) -> str:
    """SHA-256 of the tensors, which identifies them as a checkpoint's does."""
    digest = hashlib.sha256()
    for key in sorted(weights):
        digest.update(key.encode() + weights[key].contiguous().numpy().tobytes())
    return digest.hexdigest()
