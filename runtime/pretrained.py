"""OpenAI's GPT-2 as the initial weights of a run: --init_from=hf:gpt2, or hf:FOLDER."""

import hashlib
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from config import Config
from errors import UserError, first_line
from model import GPT
from runtime.checkpoint import Found, State, copy_weights, load_weights, settings_of

PREFIX = "hf:"


def load_initial(model: GPT, source: str) -> Found:
    """Copy the weights of a run, or of a Hugging Face GPT-2, into the model.

    Raises UserError where they cannot be loaded or do not fit.
    """
    if source.startswith(PREFIX):
        return load_gpt2(model, source.removeprefix(PREFIX))
    return load_weights(model, source)


def load_gpt2(model: GPT, name: str) -> Found:
    """Copy GPT2LMHeadModel.from_pretrained(name) into the model, whatever its attention variant.

    A model of fewer positions takes the first. The attention's own scalars, such as SSMax's s, keep
    their initial values. Raises UserError where transformers or the weights are missing, or a
    setting differs.
    """
    weights, own, renamed = read_gpt2(model.config, name), model.state_dict(), {}
    for key, x in weights.items():
        key = key.removeprefix("transformer.").replace("h.", "trunk.blocks.", 1)
        key = key if key.startswith(("trunk.", "wte.", "lm_head.")) else f"trunk.{key}"
        if key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            x = x.T  # transformers has them as [in, out]
        elif key in ("wte.weight", "lm_head.weight"):
            x = F.pad(x, (0, 0, 0, len(own["wte.weight"]) - len(x)))  # [vocabulary, n_embd]
        elif key == "trunk.wpe.weight":
            x = x[: model.config.block_size]
        renamed[key] = x
    settings = {key: settings_of(model.config)[key] for key in ("tokenizer", "n_head")}
    copy_weights(model, State(model=renamed, step=0, config=settings), f"{PREFIX}{name}")
    digest = hashlib.sha256(b"".join(weights[key].numpy().tobytes() for key in sorted(weights)))
    return Found(Path(f"{PREFIX}{name}"), 0, digest.hexdigest())


def read_gpt2(config: Config, name: str) -> dict[str, Tensor]:
    """The weights of a GPT2LMHeadModel; its settings that the weights do not show are checked."""
    wanted = {
        "model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True, "n_head": config.n_head, "vocab_size": config.n_vocab,
    }  # fmt: skip
    try:
        from transformers import AutoConfig, GPT2LMHeadModel

        settings = AutoConfig.from_pretrained(name)
        for key, value in wanted.items():
            if getattr(settings, key, None) != value:
                raise UserError(
                    f"hf:{name} has {key} = {getattr(settings, key, None)!r}, not {value!r}; "
                    "configs/scales/gpt2.py has the settings of OpenAI's smallest"
                )
        return GPT2LMHeadModel.from_pretrained(name).state_dict()
    except UserError:
        raise
    except (ImportError, OSError, ValueError) as error:
        raise UserError(f"hf:{name} cannot be loaded: {first_line(error)}") from error
