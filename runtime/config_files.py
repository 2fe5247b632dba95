"""Configs from files and the command line: config files, --key=value, and what a run has saved.

Nothing here imports torch, so that --help and error messages appear at once.
"""

import ast
import hashlib
import os
import runpy
import sys
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from config import (
    FREE_ON_RESUME,
    GROUPS,
    LEARNED,
    ROOT,
    SETTINGS,
    TYPES,
    Config,
    choices,
    settings_in,
)
from data.vocabulary import BUILT_IN, TOKENIZER
from errors import UserError, did_you_mean, nearest
from runtime.files import convert, read_json
from runtime.hf_config import PRETRAINED, pretrained_settings

SCALES = (ROOT / "configs/scales").resolve()  # compared with resolved paths
# A file in a run's folder: the absolute path of the run's data_dir.
DATA_DIR = "data_dir.txt"

# The settings that a run's files hold.
Settings = dict[str, None | bool | int | float | str]


def command_line() -> Config:
    """The Config of this process's command line; --help prints the settings and ends it."""
    if "--help" in sys.argv or "-h" in sys.argv:
        print(help_text(), flush=True)
        sys.exit()
    return load_config(sys.argv[1:])


def load_config(arguments: list[str]) -> Config:
    """The Config of a command line: config files from left to right, then --key=value.

    An example is `["configs/scales/tiny.py", "configs/lssar_p15.py", "--p=3"]`; a bool may be
    `--key` alone. A run's folder stands for the run's settings, and `--resume` with an out_dir
    needs no file at all. With --init_from=hf:NAME or nanogpt:FILE the sizes that are not set come
    from there. Raises UserError for a missing file, an unknown setting (naming the nearest one), a
    wrong type, and values that contradict each other.
    """
    values: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    files: list[Path] = []
    names_given: list[str] = []
    for argument in arguments:
        if argument.startswith("--"):
            key, equals, text = argument[2:].partition("=")
            require_known_setting(key, "the command line")
            if not equals and bool not in TYPES[key]:
                raise UserError(f"--{key} needs a value: --{key}=VALUE")
            if key == "resume" and os.path.exists(text):
                raise UserError(f"--resume={text}: a run's folder follows a space: --resume {text}")
            if text.startswith("~"):  # which a shell expands only at the start of a word
                text = os.path.expanduser(text)
            overrides[key] = parse(key, text if equals else "True")
        else:
            file = Path(argument)
            settings = read_file(argument)
            # scales say how large a run is, not what it is of
            is_variant = file.suffix == ".py" and not file.resolve().is_relative_to(SCALES)
            name = settings.pop("name", "")
            if not isinstance(name, str):
                raise UserError(f"{file}: name = {name!r} is {type(name).__name__}; it must be str")
            names_given.append(name or (file.stem if is_variant else ""))
            values |= settings
            files.append(file)
    if overrides.get("resume") is True:
        run = overrides.get("out_dir", "")
        if not files and os.path.isfile(os.path.join(run, "config.json")):
            values = read_run(run)
        if not any(file.suffix == ".py" for file in files):
            values.pop("init_from", None)  # a run's settings have the sizes of its model
    values |= overrides
    config = Config(**values | pretrained_settings(values))
    return config.replace(
        name=config.name
        or run_name(dict.fromkeys(filter(None, names_given)), overrides, ["attention", "p"]),
        out_dir=config.out_dir or default_out_dir(files, overrides, config),
        data_dir=find_data(config.data_dir),
    )


def run_name(files: Iterable[str], settings: dict[str, Any], keys: Iterable[str]) -> str:
    """The names of config files, and the settings with these keys; "" without a file."""
    name = "_".join(files)
    if not name:
        return ""
    assignments = [f"{key}={format_value(settings[key])}" for key in keys if key in settings]
    return ",".join([name, *assignments])


def default_out_dir(files: Sequence[Path], settings: dict[str, Any], config: Config) -> str:
    """The folder of a run: its config files, and settings with which it would be another run."""
    keys = [key for key in LEARNED if key not in FREE_ON_RESUME]
    if not files:
        keys = [key for key in keys if key not in ("attention", "p")]  # they name the variant
    stems = [stem_of(file) for file in files] or [config.variant_name]
    name = run_name(stems, settings, keys).replace(os.sep, "-")
    return f"out/{shorten(name, longest=100)}"


def stem_of(file: Path) -> str:
    """A config file's name: of configs/scales/recall/tiny.py, recall_tiny."""
    path = file.resolve()
    if not path.is_relative_to(SCALES):
        return file.stem
    return "_".join(path.relative_to(SCALES).with_suffix("").parts)


def shorten(name: str, longest: int = 55) -> str:
    """A name that fits file systems: a longer one ends in a hash of all of it."""
    if len(name) <= longest:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: longest - 9]}_{digest}"


def format_value(value: Any) -> str:
    """A setting's value in a name: 7 for 7.0, none for an empty one."""
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def read_file(path: str) -> dict[str, Any]:
    """The settings that a config file assigns, or the settings of a run.

    A config file may also import modules, define functions, and compute values whose names begin
    with an underscore. Raises UserError for a value with any other name that is no setting.
    """
    if os.path.isdir(path):
        return read_run(path)
    if not os.path.isfile(path):
        files = [*(ROOT / "configs").rglob("*.py"), *Path(path).parent.glob("*.py")]
        hint = did_you_mean_run(path)
        if not hint or path.endswith(".py"):
            names = [os.path.relpath(file) for file in files]
            namesakes = [name for name in names if Path(name).stem == Path(path).stem]
            if namesakes:
                hint = f"did you mean {min(namesakes, key=len)}? "
            else:
                hint = did_you_mean(path, names)
        raise UserError(
            f"config file or run {path} does not exist; {hint}settings are written --key=value"
        )
    if not path.endswith(".py"):  # runpy would run code in a zip file, which a checkpoint is
        raise UserError(f"{path} is not a config file (.py); to use a run, pass its folder")
    try:
        assigned = runpy.run_path(path)
    except (Exception, SystemExit) as error:
        raise UserError(f"config file {path} fails: {type(error).__name__}: {error}") from error
    for key in assigned.get("__annotations__", ()):
        if key not in assigned:
            raise UserError(f"config file {path} has `{key}: ..`, which sets nothing: {key} = ..")
    values = {}
    for key, value in assigned.items():
        is_helper = key.startswith("_") or isinstance(value, types.ModuleType) or callable(value)
        if key in SETTINGS or not is_helper:
            require_known_setting(key, path, "; names of your own begin with _")
            values[key] = value
    return values


def did_you_mean_run(path: str | Path) -> str:
    """Return a question with the nearest run or checkpoint in or beside a path; "" if none is near.

    A longer name that begins with the path's is near: it may have a setting more.
    """
    path = Path(path)
    within = sorted([*(file.parent for file in path.glob("*/config.json")), *path.glob("*.pt")])
    if within:
        return f"did you mean {within[0]}? "
    runs = [file.parent.name for file in path.parent.glob("*/config.json")]
    names = [*runs, *(file.name for file in path.parent.glob("*.pt"))]
    others = [name for name in names if name != path.name]
    longer = [name for name in others if name.startswith(path.name)]
    near = nearest(path.name, longer, cutoff=0.0) or nearest(path.name, others)
    return "" if near is None else f"did you mean {path.parent / near}? "


def read_run(folder: str | Path) -> dict[str, Any]:
    """The settings in the config.json of a run; out_dir is the folder where it is found."""
    path = Path(folder, "config.json")
    content = read_json(path, dict[str, Any])
    if content is None:
        hint = did_you_mean_run(folder)
        lack = "has no config.json" if path.parent.exists() else "does not exist"
        raise UserError(f"{path.parent} {lack}; {hint}a run is a folder that train.py made")
    if "model_type" in content:
        raise UserError(
            f"{folder} is a model of transformers, not a run: write it {PRETRAINED}{folder}"
        )
    return saved_settings(content, path) | {"resume": False, "out_dir": str(path.parent)}


def saved_settings(content: Any, source: str | Path) -> dict[str, Any]:
    """The settings in a file of a run, with the copy of the tokenizer in the run's folder.

    If data_dir is another folder here than the run's, the absolute path that it recorded is used.
    """
    values = convert(content, Settings, source)
    if "attention" not in values:
        raise UserError(f"{source}: it does not hold the settings of a run")
    advice = "; the run's environment.json names the commit that wrote it"
    for key in values:
        require_known_setting(key, str(source), advice)
    folder = Path(source).parent
    copy = folder / TOKENIZER
    tokenizer = values.get("tokenizer", "gpt2")
    if tokenizer not in BUILT_IN and copy.is_file():
        values = values | {"tokenizer": str(copy)}
    elif str(tokenizer).startswith("sha256:"):
        raise UserError(
            f"{source} needs the {TOKENIZER} of its run in the same folder: {folder} has no such "
            "file"
        )
    data_dir = values.get("data_dir")
    record = folder / DATA_DIR
    if isinstance(data_dir, str) and record.is_file():
        recorded = Path(record.read_text(encoding="utf-8", errors="replace").strip())
        if os.path.exists(recorded) and recorded.resolve() != Path(find_data(data_dir)).resolve():
            values = values | {"data_dir": str(recorded)}
    return values


def find_data(data_dir: str) -> str:
    """The folder of shards: the repository's, where the current folder has none of this name."""
    in_repository = os.path.join(ROOT, data_dir)
    is_package = os.path.exists(os.path.join(in_repository, "__init__.py"))  # such as data
    if os.path.isdir(in_repository) and not is_package and not os.path.exists(data_dir):
        return in_repository
    return data_dir


def require_known_setting(key: str, where: str, advice: str = "") -> None:
    if key not in SETTINGS:
        hint = did_you_mean(key, SETTINGS)
        raise UserError(
            f"{where} sets {key!r}, which is not a setting; {hint}python train.py --help lists "
            f"them{advice}"
        )


def parse(key: str, text: str) -> Any:
    """The value of an argument's text; text that cannot be parsed is left to the type check."""
    if bool in TYPES[key] and text.capitalize() in ("True", "False", "None"):
        text = text.capitalize()
    elif str in TYPES[key]:
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def help_text() -> str:
    """The text that `python train.py --help` prints."""
    lines = [
        "usage: train.py [CONFIG.py ...] [--key=value ...]",
        "       train.py --resume RUN [--key=value ...]",
        "",
        "Config files apply left to right, then the command line, over these defaults:",
    ]
    for group in GROUPS.values():
        lines += ["", f"{group}:"]
        for name in settings_in(group):
            option = f"  --{name}={getattr(Config, name)!r}"
            line = f"{option:36} {SETTINGS[name]['help']}"
            if choices(name):
                line += f" ({', '.join(map(str, choices(name)))})"
            lines.append(line)
    return "\n".join(lines)
