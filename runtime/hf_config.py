"""The sizes of a Hugging Face or nanoGPT GPT-2, for runs that start from its weights."""

import functools
from pathlib import Path
from typing import Any

from errors import UserError, first_line
from runtime.files import read_pt
from runtime.nanogpt import NANOGPT, SIZES, convert_checkpoint, is_nanogpt_checkpoint

# Precedes the name or the folder of a Hugging Face GPT-2 in init_from.
PRETRAINED = "hf:"
# Required values in the config of a Hugging Face GPT-2.
GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}


def pretrained_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes and positions of the GPT-2 in values["init_from"], if any.

    Raises UserError if it cannot be read, has another architecture than OpenAI's or nanoGPT's, or
    contradicts `values`.
    """
    source = str(values.get("init_from"))  # not validated yet: it may have any type
    if source.startswith(PRETRAINED):
        sizes = sizes_of_hf(source)
    elif source.startswith(NANOGPT):
        sizes = sizes_of_nanogpt(source)
    else:
        return {}
    if values.get("block_size") in range(1, sizes["block_size"]):
        sizes["block_size"] = values["block_size"]  # the first positions suffice
    wrong = []
    for key, size in sizes.items():
        if values.get(key) not in (None, size):
            wrong.append(f"{key} = {size!r}")
    if wrong:
        raise UserError(f"{source} has {', '.join(wrong)}: leave these settings out")
    return sizes


@functools.cache
def load_hf_config(source: str) -> Any:
    """Load the config of a model by its name on the hub or its folder, without the prefix hf:.

    Raises UserError if it cannot be loaded.
    """
    try:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # of many types, some of them of huggingface_hub
        reason = first_line(error)
        if not Path(source).is_dir():
            reason = f"there is no folder {source} here, and as a name on the hub: {reason}"
        raise UserError(f"{PRETRAINED}{source} cannot be loaded: {reason}") from error


def load_pretrained(model_class: Any, source: str, **options: Any) -> Any:
    """Load a model of transformers with its weights, by its name on the hub or its folder.

    Raises UserError if it cannot be loaded, and if its files lack weights, which transformers would
    draw at random.
    """
    try:
        loaded: Any = model_class.from_pretrained(source, output_loading_info=True, **options)
    except Exception as error:  # of many types, some of them of safetensors and huggingface_hub
        raise UserError(f"{PRETRAINED}{source} cannot be loaded: {first_line(error)}") from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(f"{PRETRAINED}{source} lacks {len(missing)} weights, such as {missing[0]}")
    return model


def sizes_of_hf(source: str) -> dict[str, Any]:
    """Return the sizes of a Hugging Face GPT-2."""
    gpt2 = load_hf_config(source.removeprefix(PRETRAINED))
    for key, required in GPT2.items():
        value = getattr(gpt2, key, required)
        if value != required:
            raise UserError(f"{source} has {key} = {value!r}, which this model cannot compute")
    return {
        "n_layer": gpt2.n_layer,
        "n_head": gpt2.n_head,
        "n_embd": gpt2.n_embd,
        "mlp_hidden": gpt2.n_inner,
        "vocab_size": gpt2.vocab_size,
        "block_size": gpt2.n_positions,
        "positions": "learned",
    }


def sizes_of_nanogpt(source: str) -> dict[str, Any]:
    """Return the sizes of nanoGPT's ckpt.pt; its vocabulary where the ids are GPT-2's."""
    path = Path(source.removeprefix(NANOGPT))
    content = read_pt(path)
    if not is_nanogpt_checkpoint(content):
        raise UserError(f"{path} is no checkpoint of nanoGPT's train.py")
    settings = convert_checkpoint(content, path)["config"]
    sizes = {key: settings[key] for key in (*SIZES, "positions", "mlp")}
    if settings["tokenizer"] != "gpt2":
        del sizes["vocab_size"]  # a run has end-of-text too
    return sizes
