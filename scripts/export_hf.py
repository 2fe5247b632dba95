"""Export a trained model as a folder that Hugging Face's transformers loads on its own.

python -m scripts.export_hf RUN DIR

    AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)
    AutoTokenizer.from_pretrained(DIR, trust_remote_code=True)
    lm_eval --model hf --model_args pretrained=DIR,trust_remote_code=True --tasks arc_easy

DIR gets the weights in float32, the settings, the tokenizer, and this repository's model code, so
that every variant of attention.VARIANTS and every RoPE scaling works. It appears whole or not at
all. Exporting needs pip install safetensors tokenizers; loading needs transformers 5.
"""

import argparse
import os
import re
import shutil
import sys
from pathlib import Path

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from config import Config
from data.tokenizer import (
    END_OF_TEXT,
    MERGES_FILE,
    TOKENIZER,
    FileTokenizer,
    byte_symbols,
    copy_file,
    get_tokenizer,
    read_ranks,
)
from errors import UserError, command
from runtime import checkpoint
from runtime.device import environment
from runtime.files import write_json
from scripts.common.runs import LoadedRun, RunOptions, add_options, open_run

ROOT = Path(__file__).parent.parent
MODELING = ROOT / "scripts/common/hf_modeling.py"
IMPORT = re.compile(r"^( *)(?:from ([\w.]+) (import .+)|import ([\w.]+)( as \w+)?)$", re.MULTILINE)
# Paths of the training run, on which its model does not depend.
PATHS = {"data_dir", "out_dir", "init_from"}


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", metavar="RUN", help="a run's folder, or a checkpoint's .pt")
    parser.add_argument("dir", metavar="DIR", type=Path, help="new folder to write")
    add_options(parser)
    parser.set_defaults(device="cpu")
    arguments = parser.parse_args()
    folder = arguments.dir.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; name another one")
    try:
        import safetensors.torch
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise UserError(f"an export needs pip install safetensors tokenizers ({error})") from error
    run = open_run(arguments.run, RunOptions.parse(arguments))
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        # parameters shared by layers are written once, under their first name
        weights = {f"gpt.{name}": tensor.detach() for name, tensor in run.model.named_parameters()}
        data = safetensors.torch.save(weights, {"format": "pt"})
        (temporary / "model.safetensors").write_bytes(data)
        write_config(temporary, run, arguments)
        write_tokenizer(temporary, run.config)
        for name, text in sources().items():
            (temporary / name).write_text(text, encoding="utf-8")
        shutil.copy(ROOT / "LICENSE", temporary)
        os.replace(temporary, folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{arguments.dir}: {run.config.variant_name}, step {run.facts['step']}")


def write_config(folder: Path, run: LoadedRun, arguments: argparse.Namespace) -> None:
    """Write config.json, which SharpAttentionConfig reads, and generation_config.json."""
    config, eot = run.config, get_tokenizer(run.config.tokenizer).eot
    ids = {"bos_token_id": eot, "eos_token_id": eot, "pad_token_id": eot}
    settings = checkpoint.settings_of(config) | {"vocab_size": config.n_vocab}
    rope = {
        "scaling": run.facts["rope"],
        "factor": arguments.rope_factor,
        "theta": arguments.rope_theta,
    }
    values = {
        "model_type": "sharp_attention",
        "architectures": ["SharpAttentionForCausalLM"],
        "auto_map": {
            "AutoConfig": "hf_modeling.SharpAttentionConfig",
            "AutoModelForCausalLM": "hf_modeling.SharpAttentionForCausalLM",
        },
        "dtype": "float32",
        "vocab_size": config.n_vocab,
        "hidden_size": config.n_embd,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.d_head,
        "max_position_embeddings": config.block_size,
        "tie_word_embeddings": config.tie_embeddings,
        "settings": {key: value for key, value in settings.items() if key not in PATHS},
        "rope": rope,
        "run": run.facts | {"environment": environment()},
    }
    write_json(folder / "config.json", values | ids)
    write_json(folder / "generation_config.json", ids)


def write_tokenizer(folder: Path, config: Config) -> None:
    """Write the tokenizers library's files: the run's tokenizer.json, or one with the same ids.

    A special token's mark within a text is ordinary text, as in data/tokenizer.py.
    """
    own = get_tokenizer(config.tokenizer)
    mark = own.mark if isinstance(own, FileTokenizer) else END_OF_TEXT
    if isinstance(own, FileTokenizer):
        copy_file(config.tokenizer, folder)
    else:
        write_byte_level_bpe(folder / TOKENIZER, config.tokenizer)
    special = {f"{kind}_token": mark for kind in ("bos", "eos", "pad")}
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", values | special)


def write_byte_level_bpe(path: Path, name: str) -> None:
    """Write the tokenizer.json of a built-in tokenizer; that of bytes has no merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    ranks, merges = {bytes([b]): b for b in range(256)}, []
    symbols = byte_symbols()
    if name == "gpt2":
        ranks = read_ranks(MERGES_FILE)
        lines = MERGES_FILE.read_text(encoding="utf-8").splitlines()[1:]
        merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
    vocabulary = {"".join(symbols[b] for b in token): rank for token, rank in ranks.items()}
    eot = get_tokenizer(name).eot
    tokenizer = Tokenizer(models.BPE(vocabulary | {END_OF_TEXT: eot}, merges))
    split = name == "gpt2"  # into words, which merges never cross
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    assert tokenizer.token_to_id(END_OF_TEXT) == eot
    tokenizer.save(str(path))


def sources() -> dict[str, str]:
    """File name -> text of hf_modeling.py and of all files of this repository that it depends on.

    Imports among them are made relative, as transformers requires.
    """
    files: dict[str, str] = {}
    todo = [MODELING]

    def relative(match: re.Match) -> str:
        space, package, names, module, alias = match.groups()
        name = package or module
        path = ROOT / f"{name.replace('.', '/')}.py"
        if not path.exists():
            return match[0]
        todo.append(path)
        name = name.replace(".", "_")  # transformers copies no folders
        if package:
            return f"{space}from .{name} {names}"
        # transformers copies only the files that `from .module import` lines name
        line = f"from .{name} import __name__ as _; from . import {name}{alias or ''}"
        return f"{space}{line}"

    while todo:
        path = todo.pop()
        name = "_".join(path.relative_to(ROOT).parts) if path != MODELING else path.name
        if name not in files:
            files[name] = IMPORT.sub(relative, path.read_text(encoding="utf-8"))
    return files


if __name__ == "__main__":
    main()
