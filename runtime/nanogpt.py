"""Converts nanoGPT's ckpt.pt to a checkpoint of train.py: as a run, or as initial weights."""

from pathlib import Path
from typing import Any

from data.vocabulary import BUILT_IN, TOKENIZER, identify
from errors import UserError

# Precedes the path of a ckpt.pt in init_from.
NANOGPT = "nanogpt:"
# nanoGPT's vocab_size for GPT-2's tokenizer: exact, and padded to a multiple of 64.
GPT2_SIZES = (BUILT_IN["gpt2"], 50304)
# The settings of a model that have the same names in nanoGPT.
SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")
# torch.compile's prefix, which nanoGPT leaves in some checkpoints.
COMPILED = "_orig_mod."


def is_nanogpt_checkpoint(content: Any) -> bool:
    """Tell whether the content of a .pt file was written by nanoGPT's train.py."""
    return isinstance(content, dict) and "model_args" in content


def convert_checkpoint(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a ckpt.pt in this repository's checkpoint format: model, step, config.

    Raises UserError if an entry is missing, and for ids that are not GPT-2's without their
    tokenizer.json beside the file.
    """
    try:
        args = content["model_args"]
        training = content["config"]
        sequences = training["gradient_accumulation_steps"] * training["batch_size"]
        settings = {key: args[key] for key in SIZES} | {
            "attention": "softmax",
            "positions": "learned",
            "mlp": "gelu_erf",
            "total_batch_size": sequences * args["block_size"],
            "data_dir": f"data/{training['dataset']}",
            "name": f"nanogpt_{training['dataset']}",
            "tokenizer": tokenizer_of(args["vocab_size"], path),
        }
        model = {}
        for key, x in content["model"].items():
            if not key.endswith(".attn.bias"):  # the mask of a torch without fused attention
                name = rename_weight(key.removeprefix(COMPILED))
                model[name] = pad_vocabulary(x) if name in ("wte.weight", "lm_head.weight") else x
        return {"model": model, "step": content["iter_num"], "config": settings}
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: no checkpoint of nanoGPT's train.py: {error!r}") from error


def tokenizer_of(vocab_size: int, path: Path) -> str:
    """Return what a checkpoint records of a tokenizer with `vocab_size` ids.

    Raises UserError if they are not GPT-2's, and tokenizer.json is not beside the checkpoint.
    """
    if vocab_size in GPT2_SIZES:
        return "gpt2"
    file = path.with_name(TOKENIZER)
    if not file.is_file():
        raise UserError(
            f"{path}: its {vocab_size} ids are not GPT-2's: their tokenizer.json must be beside "
            "it; `python -m data.text train.bin --val val.bin` makes it from meta.pkl "
            "(docs/elsewhere.md)"
        )
    return identify(str(file))


def rename_weight(key: str) -> str:
    """Return our name of a weight of GPT-2 in nanoGPT and transformers."""
    name = key.removeprefix("transformer.").replace("h.", "trunk.blocks.", 1)
    if name.startswith(("trunk.", "wte.", "lm_head.")):
        return name
    return f"trunk.{name}"


def pad_vocabulary(weight: Any) -> Any:
    """Return weights [vocabulary, n_embd] with rows of 0 up to a multiple of 128, as GPT has."""
    import torch.nn.functional as F

    return F.pad(weight, (0, 0, 0, -len(weight) % 128))
