"""A GPT-2 as the initial weights of a run: --init_from=hf:gpt2, hf:FOLDER or nanogpt:ckpt.pt."""

from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from errors import UserError
from model import GPT
from runtime.checkpoint import State, copy_weights, find, load_weights, settings_of
from runtime.files import read_pt
from runtime.hf_config import PRETRAINED, load_pretrained
from runtime.nanogpt import NANOGPT, is_nanogpt_checkpoint, rename_weight
from runtime.run_folder import is_checkpoint, read_config

# nanoGPT's values of init_from, and what to write instead.
VALUES_OF_NANOGPT = {
    "scratch": "leave init_from out",
    "resume": "python train.py --resume RUN",
}
GPT2_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


def check_initial(source: str) -> None:
    """Raise UserError if there is no run or checkpoint at the path of init_from.

    hf: and nanogpt: were read when the config was built.
    """
    if not source or source.startswith((PRETRAINED, NANOGPT)):
        return
    if not Path(source).exists():
        advice = VALUES_OF_NANOGPT.get(source)
        if source in GPT2_NAMES:
            advice = f"--init_from={PRETRAINED}{source}"
        if advice is not None:
            raise UserError(f"init_from = {source!r} is nanoGPT's value: here, {advice}")
    elif is_checkpoint(source) and is_nanogpt_checkpoint(read_pt(Path(source))):
        raise UserError(f"{source} is a checkpoint of nanoGPT: --init_from={NANOGPT}{source}")
    read_config(source)


def load_initial(model: GPT, source: str) -> dict[str, Any] | None:
    """Copy the weights of a run, or of a Hugging Face or nanoGPT GPT-2, into the model.

    Returns what identifies a checkpoint: a step and a sha256; None for Hugging Face. Raises
    UserError if the weights cannot be loaded or do not fit.
    """
    if source.startswith(PRETRAINED):
        load_gpt2(model, source)
        return None
    resize = resize_to_model if source.startswith(NANOGPT) else None
    return load_weights(model, find(source.removeprefix(NANOGPT)), resize)


def load_gpt2(model: GPT, source: str) -> None:
    """Copy the weights of a GPT2LMHeadModel into the model, whatever its attention variant.

    A model of fewer positions takes the first. The attention's scalars, such as SSMax's s, keep
    their initial values. Raises UserError if weights cannot be loaded or are missing, and if a
    setting differs.
    """
    from transformers import GPT2LMHeadModel

    gpt2 = load_pretrained(GPT2LMHeadModel, source.removeprefix(PRETRAINED))
    renamed = {}
    for key, x in gpt2.state_dict().items():
        name = rename_weight(key)
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            x = x.T  # transformers has them as [in, out]
        renamed[name] = x
    settings = settings_of(model.config)
    required = {key: settings[key] for key in ("tokenizer", "n_head")}
    state = State(model=resize_to_model(renamed, model), step=0, config=required)
    copy_weights(model, state, source)


def resize_to_model(weights: dict[str, Tensor], model: GPT) -> dict[str, Tensor]:
    """Return weights with as many rows of the vocabulary, and as many positions, as the model."""
    rows = len(model.wte.weight)
    sized = {}
    for name, x in weights.items():
        if name in ("wte.weight", "lm_head.weight"):
            x = F.pad(x, (0, 0, 0, rows - len(x)))  # [vocabulary, n_embd]
        elif name == "trunk.wpe.weight":
            x = x[: model.config.block_size]
        sized[name] = x
    return sized
