"""Causal language models of transformers, for evaluations: `hf:NAME` or `hf:FOLDER`.

A ModelConfig describes such a model as a Config describes a run, and names the text that it is
measured on. transformers is imported only when a model is requested.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn as nn
from numpy.typing import NDArray

from attention_paths.elsewhere import ATTACHED
from config import Config
from data.loader import validation_tokens
from data.shards import check_ids, hash_hashes, hash_shards, read_meta
from data.tokenizer import Tokenizer, get_tokenizer
from data.vocabulary import BUILT_IN, TOKENIZER
from errors import UserError, first_line
from runtime import checkpoint, run_folder
from runtime.checkpoint import Checkpoint
from runtime.config_files import find_data
from runtime.files import sha256_of
from runtime.hf_config import PRETRAINED, load_hf_config

# How many tokens of shards are decoded by both tokenizers, to compare their texts.
COMPARED = 1 << 16


@dataclass(frozen=True)
class ModelConfig(Config):
    """A model of transformers in the words of a Config, and the text that it is measured on.

    `block_size` is what evaluations call the training length, and `out_dir` the folder of results.
    Settings of training have no meaning, and are not checked.
    """

    source: str = ""  # a name on huggingface.co, or a folder
    sha256: str = ""  # of config and weights; of a name the commit on huggingface.co
    longest: int | None = None  # the last of learned positions
    tokenizer_id: str = "of the model"  # the text is identified by its ids
    has_control: bool = False  # a control with a window will be measured too
    text: tuple[str, ...] = ()  # files; () for the shards of data_dir

    def __post_init__(self) -> None:
        pass

    @cached_property
    def end_of_text(self) -> int:  # type: ignore[override]
        shards = None if self.text else tokenizer_of_shards(self.data_dir)
        if shards is not None:
            return shards.eot
        tokenizer = open_tokenizer(self.source)
        if tokenizer is None or tokenizer.eos_token_id is None:
            raise UserError(f"{self.label}: its tokenizer has no end-of-text token")
        return tokenizer.eos_token_id

    def with_text(self, files: Sequence[str], data_dir: str | None) -> "ModelConfig":
        """The same model on text files or on shards. Raises UserError if it is both."""
        if files and data_dir:
            raise UserError(f"{files[0]} or --data_dir {data_dir}: a model is measured on one text")
        data_dir = find_data(data_dir) if data_dir else ", ".join(files)
        return self.replace(text=tuple(files), data_dir=data_dir)  # type: ignore[return-value]


# A run's folder, the file of a checkpoint, the checkpoint itself, or a model of transformers.
AnyRun = str | Path | Checkpoint | ModelConfig


def find_weights(run: AnyRun) -> Checkpoint | ModelConfig:
    """The newest checkpoint of a run, to use from now on, also when the run saves newer ones.

    Raises UserError if there is none.
    """
    return run if isinstance(run, Checkpoint | ModelConfig) else checkpoint.find(run)


def read_config(run: AnyRun) -> Config:
    """The Config that a run was trained with, or a model of transformers itself."""
    return run if isinstance(run, ModelConfig) else run_folder.read_config(path_of(run))


def folder_of(run: AnyRun) -> Path:
    """The folder of a run or of the results of a model of transformers."""
    return run_folder.folder_of(path_of(run))


def path_of(run: AnyRun) -> str | Path:
    """The path of a run as it was given, or the folder of a model of transformers."""
    if isinstance(run, ModelConfig):
        return run.out_dir
    return run.run if isinstance(run, Checkpoint) else run


# ---- what there is to know without the weights ----


def read_model(name: str, trained_length: int | None) -> ModelConfig:
    """Read the config of hf:NAME or hf:FOLDER.

    The training length is by default max_position_embeddings. Raises UserError if there is none,
    where the model cannot be loaded, and for a model that `attach` changed before it was saved.
    """
    source = name.removeprefix(PRETRAINED).rstrip("/")
    whole_config = load_hf_config(source)
    attached = getattr(whole_config, ATTACHED, None)
    if attached is not None:
        raise UserError(
            f"{name} was saved after attach(model, {attached['name']!r}), but transformers would "
            "compute the model's own attention with its weights (docs/elsewhere.md)"
        )
    config = whole_config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    trained_length = trained_length or longest
    if trained_length is None:
        raise UserError(
            f"{name} has no max_position_embeddings: --window N says at how many tokens a long "
            "context begins"
        )
    positions: Literal["none", "rope", "learned"] = "none"
    if getattr(config, "rope_parameters", None):
        positions = "rope"
    elif longest is not None and has_embedded_positions(source, longest):
        positions = "learned"
    is_folder = Path(source).is_dir()
    return ModelConfig(
        source=source,
        name=PRETRAINED + source,
        out_dir=source if is_folder else f"out/{source}",
        sha256=hash_model(Path(source)) if is_folder else commit_of(source),
        block_size=trained_length,
        longest=longest if positions == "learned" else None,
        positions=positions,
        n_layer=config.num_hidden_layers,
        n_head=getattr(config, "num_attention_heads", 1),
        n_embd=config.hidden_size,
        vocab_size=config.vocab_size,
    )


def has_embedded_positions(source: str, longest: int) -> bool:
    """Tell whether the positions of a model are an embedding, which ends."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        config = load_hf_config(source)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module is not model.get_input_embeddings():
            if 0 <= module.num_embeddings - longest <= 2:  # OPT has two more
                return True
    return False


def hash_model(folder: Path) -> str:
    """A hash of the config and the weights in a folder."""
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not weights:
        raise UserError(f"{folder}: no weights in it, *.safetensors or pytorch_model*.bin")
    return hash_hashes([sha256_of(path) for path in (folder / "config.json", *weights)])


def commit_of(source: str) -> str:
    """The commit on huggingface.co of a model that has been downloaded."""
    from transformers.utils import cached_file

    config: Any = cached_file(source, "config.json")
    return Path(config).parent.name


# ---- the text ----


def tokens_of(config: ModelConfig, wanted: int) -> NDArray[np.integer]:
    """The first `wanted` tokens of the text, and a last target, if they are tokens of the model."""
    if not config.data_dir:
        raise UserError(f"{config.label} has no text: give it text files, or --data_dir SHARDS")
    if config.text:
        return text_tokens(config)[: wanted + 1]
    tokens = validation_tokens(config.data_dir, wanted, config.text_ids)
    check_vocabulary(config, tokens[:COMPARED])
    return tokens


def hash_text(config: Config) -> str:
    """A hash of the validation shards, or of the tokens of text files."""
    if isinstance(config, ModelConfig) and config.text:
        return hashlib.sha256(text_tokens(config).tobytes()).hexdigest()
    return hash_shards(config.data_dir, "val")


@functools.lru_cache(1)  # an evaluation asks several times
def text_tokens(config: ModelConfig) -> NDArray[np.integer]:
    """The tokens of text files, each with end-of-text before it if the tokenizer has one."""
    tokenizer = require_tokenizer(config, "--data_dir SHARDS needs none")
    ids: list[int] = []
    for file in config.text:
        try:
            # as data.text reads it: line breaks as they are, no byte-order mark
            text = Path(file).read_bytes().decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} cannot be read as text: {first_line(error)}") from error
        if tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        ids += encode(tokenizer, text)
    if not ids:
        raise UserError(f"{' '.join(config.text)}: no text")
    tokens = np.array(ids, dtype=np.uint32)
    check_ids(config.data_dir, tokens, config.text_ids)
    return tokens


@functools.cache
def open_tokenizer(source: str) -> Any:
    """The tokenizer of a model; None if it has none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (ImportError, OSError, ValueError, KeyError):
        return None
    # where there are no files transformers makes an empty one
    is_empty = set(encode(tokenizer, "a text")) <= set(tokenizer.all_special_ids)
    return None if is_empty else tokenizer


def require_tokenizer(config: ModelConfig, hint: str) -> Any:
    """The tokenizer of a model. Raises UserError with a hint where it has none."""
    tokenizer = open_tokenizer(config.source)
    if tokenizer is None:
        raise UserError(f"{config.label} has no tokenizer: {hint}")
    return tokenizer


def encode(tokenizer: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    """The ids of a text, in which the name of a special token is ordinary text."""
    encoding = tokenizer(
        text,
        add_special_tokens=add_special_tokens,
        split_special_tokens=True,
        verbose=False,  # about the length
    )
    return encoding["input_ids"]


def beginning_of_text(source: str) -> int | None:
    """The id that a model's tokenizer puts before every text, as Llama's and Gemma's do."""
    tokenizer = open_tokenizer(source)
    if tokenizer is None:
        return None
    first = encode(tokenizer, "a text", add_special_tokens=True)[0]
    return first if first == tokenizer.bos_token_id else None


def check_vocabulary(config: ModelConfig, tokens: NDArray[np.integer]) -> None:
    """Raise UserError if the model's tokenizer decodes a token of the shards to another text.

    Shards without meta.json, and models without a tokenizer, cannot be checked.
    """
    shards = tokenizer_of_shards(config.data_dir)
    tokenizer = open_tokenizer(config.source)
    if shards is None or tokenizer is None:
        return
    for token in set(tokens.tolist()) - {shards.eot}:
        text = shards.decode([token])
        text_to_model = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if text != text_to_model:
            raise UserError(
                f"{config.data_dir} was made with another tokenizer than {config.label} has: token "
                f"{token} is {text!r} there and {text_to_model!r} here"
            )


def tokenizer_of_shards(data_dir: str) -> Tokenizer | None:
    """The tokenizer that made shards; None where no meta.json says it."""
    meta = read_meta(data_dir)
    if meta is None:
        return None
    name = meta["tokenizer"]
    return get_tokenizer(name if name in BUILT_IN else str(Path(data_dir, TOKENIZER)))
