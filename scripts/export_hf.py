"""Export a trained model as a folder that Hugging Face's transformers loads by itself.

python -m scripts.export_hf RUN DIR

    AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)
    AutoTokenizer.from_pretrained(DIR, trust_remote_code=True)
    lm_eval --model hf --model_args pretrained=DIR,trust_remote_code=True --tasks arc_easy

DIR gets the weights in float32, the settings, the tokenizer, and this repository's model code, so
that every variant of attention.VARIANTS and every RoPE scaling works. It appears whole or not at
all. The export needs requirements-eval.txt; loading needs transformers 5.
"""

import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# for a script that is run as a file: the repository's modules are not beside it
sys.path.insert(0, str(Path(__file__).parents[1]))

from config import MAY_CHANGE, ROOT, Config
from data.tokenizer import END_OF_TEXT, MERGES_FILE, byte_symbols, copy_tokenizer, get_tokenizer
from data.vocabulary import BUILT_IN
from errors import UserError, command
from runtime.checkpoint import settings_of
from runtime.device import environment
from scripts.common.options import RUN, Options, option, parse
from scripts.common.runner import Run, load_run, require

# Where transformers finds its classes in the exported folder.
CODE = "hf_modeling.SharpAttention"
# The arguments of GPT.scale_rope, as the facts of a run name them.
ROPE = {"scaling": "rope", "factor": "rope_factor", "theta": "rope_theta"}
IMPORT = re.compile(r"^( *)from ([\w.]+) import (.+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Export(Options):
    """Export a trained model as a folder that Hugging Face's transformers loads by itself."""

    device: str = option("cpu", "that the run is loaded on")


@command
def main() -> None:
    new = {"metavar": "DIR", "type": Path, "help": "new folder to write"}
    options, arguments = parse(Export, arguments={"run": RUN, "dir": new})
    folder = arguments.dir.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; name another one")
    run = load_run(arguments.run, options)
    model, tokenizer = transformers_model(run), transformers_tokenizer(run.config)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export", dir=folder.parent) as temporary:
            whole = Path(temporary, folder.name)
            model.save_pretrained(whole)
            tokenizer.save_pretrained(whole)
            copy_tokenizer(run.config.tokenizer, whole)
            for name, text in sources().items():
                (whole / name).write_text(text, encoding="utf-8")
            shutil.copy(ROOT / "LICENSE", whole)
            os.replace(whole, folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}") from error
    print(f"{arguments.dir}: {run.config.variant_name}, step {run.facts['step']}")


def transformers_model(run: Run) -> Any:
    """The run's model as a transformers model, of hf_modeling.SharpAttentionForCausalLM."""
    require("eval", "transformers")
    from scripts.common.hf_modeling import SharpAttentionConfig, SharpAttentionForCausalLM

    c, eot = run.config, get_tokenizer(run.config.tokenizer).eot
    settings = settings_of(c) | {"vocab_size": c.text_ids}
    for key in MAY_CHANGE - {"batch_size"}:  # with which total_batch_size must agree
        del settings[key]
    values: dict[str, Any] = {
        "settings": settings,  # on which results depend
        "rope": {key: run.facts[name] for key, name in ROPE.items()},
        "run": run.facts | {"environment": environment(str(run.device))},
        "auto_map": {"AutoConfig": f"{CODE}Config", "AutoModelForCausalLM": f"{CODE}ForCausalLM"},
        "vocab_size": c.n_vocab,
        "hidden_size": c.n_embd,
        "max_position_embeddings": c.block_size,
        "tie_word_embeddings": c.tie_embeddings,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), eot),
    }
    with torch.device("meta"):  # the weights are the run's
        model = SharpAttentionForCausalLM(SharpAttentionConfig(**values))
    model.gpt = run.model
    return model


def transformers_tokenizer(config: Config) -> Any:
    """The run's tokenizer for transformers: the same ids for the same text.

    A special token's mark within a text is ordinary text, as in data/tokenizer.py.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    mark = get_tokenizer(config.tokenizer).mark
    if config.tokenizer in BUILT_IN:
        tokenizer = byte_level_bpe(config.tokenizer)
    else:
        tokenizer = Tokenizer.from_file(config.tokenizer)
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), mark)
    options = {"split_special_tokens": True, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends, **options)


def byte_level_bpe(name: str) -> Any:
    """A built-in tokenizer in the tokenizers library; `bytes` has no merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    symbols, is_gpt2 = byte_symbols(), name == "gpt2"
    lines = MERGES_FILE.read_text(encoding="utf-8").splitlines()[1:] if is_gpt2 else []
    merges = [(left, right) for left, right in map(str.split, lines)]
    # GPT-2 has the bytes in an order of its own
    tokens = symbols.values() if is_gpt2 else (symbols[b] for b in range(256))
    every = [*tokens, *map("".join, merges), END_OF_TEXT]
    vocabulary = {token: i for i, token in enumerate(every)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    # GPT-2's merges never cross the words that the regular expression finds
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_gpt2)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


def sources() -> dict[str, str]:
    """File name -> text of hf_modeling.py and of all files of this repository that it imports.

    transformers takes a single folder of files, and copies only those that lines such as
    `from .module import name` mention: a/b.py becomes a_b.py, and imports become relative.
    """
    files: dict[str, str] = {}
    todo = ["scripts.common.hf_modeling"]

    def relative(match: re.Match) -> str:
        space, source, imported = match.groups()
        path, flat = ROOT / source.replace(".", "/"), source.replace(".", "_")
        if path.with_suffix(".py").exists():
            todo.append(source)
            return f"{space}from .{flat} import {imported}"
        if not path.is_dir():  # another library's
            return match[0]
        todo.append(f"{source}.{imported}")  # a module of a package
        named = f"{space}from .{flat}_{imported} import __name__ as _"
        return f"{named}\n{space}from . import {flat}_{imported} as {imported}"

    while todo:
        module = todo.pop()
        name = module.removeprefix("scripts.common.").replace(".", "_") + ".py"
        if name not in files:
            text = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
            files[name] = IMPORT.sub(relative, text)
    return files


if __name__ == "__main__":
    main()
