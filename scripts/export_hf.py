"""Export a trained model as a folder that Hugging Face's transformers loads by itself.

python -m scripts.export_hf RUN DIR
lm_eval --model hf --model_args pretrained=DIR,trust_remote_code=True --tasks arc_easy

DIR gets the weights in float32, the settings, the tokenizer, a README.md that says what the model
is and how to load it, and this repository's model code, so that every variant of attention.VARIANTS
and every RoPE scaling works. It appears whole or not at all. The export needs
requirements-eval.txt; loading needs transformers 5.
"""

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from config import FREE_ON_RESUME, ROOT, Config, settings_in
from data.tokenizer import MERGES_FILE, byte_symbols, get_tokenizer
from data.vocabulary import BUILT_IN, END_OF_TEXT
from errors import UserError, command
from runtime.checkpoint import settings_of
from runtime.device import environment
from runtime.files import check_writable
from runtime.log import read_metrics
from scripts.common.command_line import RUN, option, parse, require
from scripts.common.options import Options
from scripts.common.runs import Run, load_run

# Where transformers finds its classes in the exported folder.
CODE = "exported_model.SharpAttention"
IMPORT = re.compile(r"^( *)from ([\w.]+) import (.+)$", re.MULTILINE)
WHOLE_MODULE = re.compile(r"^ *import (\w+).*$", re.MULTILINE)
# The lines that load an exported folder: they are printed, and in its README.md, CARD.
LOAD = """
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{folder}", trust_remote_code=True)
"""
# The facts of a run that a model card names: what was trained, and how this export opened it.
CARD_FACTS = ("variant", "rope", "rope_factor", "rope_theta", "log_base", "window")
CARD = """---
library_name: transformers
pipeline_tag: text-generation
---
# {name}

{table}

Settings of attention and model that are not above are the defaults: GPT-2 124M with RoPE, and 1,024
tokens in training. `variant` is the variant as trained. `config.json` has all settings and the
commit of the code; attention stays within documents if `document_start`, the id of their first
token, is not null. The model's code is in this folder, so loading needs `trust_remote_code=True`,
for the tokenizer too: without it transformers asks.

```python
import torch{load}
prompt = [tokenizer.bos_token_id]  # every document began with it
prompt += tokenizer.encode("The meaning of life is")
text = model.generate(torch.tensor([prompt]), max_new_tokens=50, do_sample=True, top_k=50)
print(tokenizer.decode(text[0]))
```

The prompts of a batch may have different lengths: `tokenizer(texts, padding=True)` pads them on the
left, and each is continued as it is alone. Documents packed into a row, where `position_ids`
restart from 0, do not see each other. The code is under the MIT licence (LICENSE).
"""


@dataclass(frozen=True, kw_only=True)
class Export(Options):
    """Export a trained model as a folder that Hugging Face's transformers loads by itself."""

    device: str = option("cpu", "device that the run is loaded on")


@command
def main() -> None:
    new_folder = {"metavar": "DIR", "type": Path, "help": "new folder to write"}
    options, arguments = parse(Export, arguments={"run": RUN, "dir": new_folder})
    folder = arguments.dir.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; name another one")
    check_writable(folder)
    run = load_run(arguments.run, options)
    model = transformers_model(run)
    tokenizer = transformers_tokenizer(run.config)
    from safetensors import SafetensorError  # transformers needs it

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export", dir=folder.parent) as temporary:
            whole = Path(temporary, folder.name)
            model.save_pretrained(whole)
            tokenizer.save_pretrained(whole)
            for name, text in sources().items():
                (whole / name).write_text(text, encoding="utf-8")
            shutil.copy(ROOT / "LICENSE", whole)
            (whole / "README.md").write_text(model_card(run, folder.name), encoding="utf-8")
            os.replace(whole, folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be written: {error}") from error
    print(f"{arguments.dir}: {run.config.label}, step {run.facts['step']}; to load it:")
    print(LOAD.format(folder=arguments.dir))


def transformers_model(run: Run) -> Any:
    """Return the run's model as a transformers model: exported_model.SharpAttentionForCausalLM."""
    require("eval", "transformers")
    from scripts.common.exported_model import SharpAttentionConfig, SharpAttentionForCausalLM

    config = run.config
    if config.end_of_text >= config.text_ids:
        raise UserError(
            f"{run.path}: transformers needs end-of-text, id {config.end_of_text} of tokenizer = "
            f"{config.tokenizer!r}, but vocab_size = {config.vocab_size} leaves it out"
        )
    # the settings on which results depend
    settings = settings_of(config) | {"vocab_size": config.text_ids}
    del settings["document_mask"]  # document_start says it
    del settings["align_documents"]  # of training
    # the settings of the schedule must agree with each other
    for key in FREE_ON_RESUME - {"max_iters", "cooldown_iters"}:
        del settings[key]
    values: dict[str, Any] = {
        "settings": settings,
        "rope": {  # the arguments of GPT.scale_rope
            "scaling": run.facts["rope"],
            "factor": run.facts["rope_factor"],
            "theta": run.facts["rope_theta"],
        },
        "window": run.facts["window"],
        "log_base": run.facts["log_base"],
        "document_start": run.model.document_start,  # for which the tokenizer's file is not needed
        "run": run.facts | {"environment": environment(run.device)},
        "auto_map": {
            "AutoConfig": f"{CODE}Config",
            "AutoModelForCausalLM": f"{CODE}ForCausalLM",
        },
        "vocab_size": config.n_vocab,
        "hidden_size": config.n_embd,
        "max_position_embeddings": config.block_size,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.end_of_text,
        "eos_token_id": config.end_of_text,
        "pad_token_id": config.end_of_text,
    }
    with torch.device("meta"):  # the weights are the run's
        model = SharpAttentionForCausalLM(SharpAttentionConfig(**values))
    model.gpt = run.model
    return model


def model_card(run: Run, folder: str) -> str:
    """Return the README.md of an exported run: what it is, and how to load it from `folder`."""
    config = run.config
    step = run.facts["step"]
    rows: dict[str, Any] = {
        "parameters": f"{run.model.count_parameters():,}",
        "steps": f"{step:,}",
    }
    # a run with init_from had seen other data before, and a fine-tuned run has shorter steps
    if config.task == "language" and not config.init_from:
        rows["tokens per step"] = f"{config.total_batch_size:,}"
        rows["data"] = Path(config.data_dir).name
    for line in read_metrics(run.path):
        if "val_loss" in line and line["step"] <= step:
            loss = f"{line['val_loss']:.4f} nats per token at step {line['step']:,}"
            rows["validation loss in training"] = loss
    for key in (*settings_in("attention", "model"), "document_mask"):
        if getattr(config, key) != getattr(Config, key):
            rows[key] = getattr(config, key)
    for key in CARD_FACTS:
        if run.facts[key] is not None:
            rows[key] = run.facts[key]
    table = "| | |\n|---|---|"
    for key, value in rows.items():
        table += f"\n| {key} | {value} |"
    load = LOAD.format(folder=folder)
    return CARD.format(name=config.label, table=table, load=load)


def transformers_tokenizer(config: Config) -> Any:
    """Return the run's tokenizer for transformers, with the same ids for the same text.

    A special token's mark within a text is ordinary text, as in data/tokenizer.py.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    if config.tokenizer in BUILT_IN:
        tokenizer = byte_level_bpe(config.tokenizer)
    else:
        tokenizer = Tokenizer.from_file(config.tokenizer)
    mark = get_tokenizer(config.tokenizer).eot_text
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=mark,
        eos_token=mark,
        pad_token=mark,
        split_special_tokens=True,
        add_bos_token=False,  # replaces the file's post-processor, which may add tokens
        clean_up_tokenization_spaces=False,
        model_max_length=config.block_size,
        padding_side="left",  # for generation
    )


def byte_level_bpe(name: str) -> Any:
    """Build a built-in tokenizer in the tokenizers library; `bytes` has no merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    symbols = byte_symbols()
    merges: list[tuple[str, str]] = []
    if name == "gpt2":
        tokens = list(symbols.values())  # GPT-2 has the bytes in an order of its own
        _, *lines = MERGES_FILE.read_text(encoding="utf-8").splitlines()
        for line in lines:
            left, right = line.split()
            merges.append((left, right))
            tokens.append(left + right)
    else:
        tokens = [symbols[byte] for byte in range(256)]
    tokens.append(END_OF_TEXT)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False,
        use_regex=name == "gpt2",  # its merges never cross the words that the expression finds
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


def sources() -> dict[str, str]:
    """Return exported_model.py and all files of this repository that it imports: name -> text.

    transformers takes a single folder of files, and copies only those that lines such as
    `from .module import name` mention: a/b.py becomes a_b.py, and imports become relative.
    """
    files: dict[str, str] = {}
    modules = ["scripts.common.exported_model"]  # to read

    def relative(match: re.Match) -> str:
        indent, source, imported = match.groups()
        path = ROOT / source.replace(".", "/")
        if path.with_suffix(".py").exists():
            modules.append(source)
            return f"{indent}from .{flat(source)} import {imported}"
        if path.is_dir():  # a module of a package
            module = f"{source}.{imported}"
            modules.append(module)
            # the first line is for transformers, which does not see what the second one imports
            return (
                f"{indent}from .{flat(module)} import __name__ as _\n"
                f"{indent}from . import {flat(module)} as {imported}"
            )
        return match[0]  # another library's

    while modules:
        module = modules.pop()
        name = f"{flat(module)}.py"
        if name not in files:
            path = ROOT / f"{module.replace('.', '/')}.py"
            text = path.read_text(encoding="utf-8")
            require_from_imports(path, text)
            files[name] = IMPORT.sub(relative, text)
    return files


def require_from_imports(path: Path, text: str) -> None:
    """Raise UserError if a file imports a module of this repository by `import module`.

    `sources` does not rewrite such a line, and transformers would ask for a package of that name.
    """
    for match in WHOLE_MODULE.finditer(text):
        if (ROOT / match[1]).is_dir() or (ROOT / f"{match[1]}.py").exists():
            raise UserError(
                f"{path}: an export cannot contain {match[0].strip()!r}; write it as `from MODULE "
                "import NAME`"
            )


def flat(module: str) -> str:
    """Return the name of a module in the exported folder."""
    return module.removeprefix("scripts.common.").replace(".", "_")


if __name__ == "__main__":
    main()
