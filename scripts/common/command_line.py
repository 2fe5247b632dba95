"""Parses a command line into a dataclass, each field of which is an option.

Imports no torch, so that --help and error messages appear at once.
"""

import argparse
import importlib.util
import typing
from collections.abc import Sequence
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any, TypeVar

from config import check_limits, types_of
from errors import Parser, UserError
from runtime.files import check_writable

PICTURES = (".png", ".pdf", ".svg")

AnyOptions = TypeVar("AnyOptions")


def option(default: Any, help: str, **settings: Any) -> Any:
    """A field of a dataclass that is an option of the command, `--FIELD VALUE`.

    `settings` go to argparse's add_argument. The type, if it is not among them, is the annotation's
    first: int for `PositiveInt | None`, whose limits are checked.
    """
    if default is not None and default is not False:  # 0 == False
        help += " (%(default)s)"
    return field(default=default, metadata=settings | {"default": default, "help": help})


def picture_file(text: str) -> Path:
    """The file of --out."""
    path = Path(text)
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text} must end in {', '.join(PICTURES)}")
    try:
        check_writable(path.parent)
    except UserError as error:  # argparse prints its own message for a ValueError
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths in tokens, such as 1024,2048, in ascending order."""
    lengths = text.split(",")
    if not all(length.isdecimal() and int(length) for length in lengths):
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers above 0, as 1024,2048")
    return tuple(sorted(set(map(int, lengths))))


# The settings of an option that takes text files.
FILES: dict[str, Any] = {"type": str, "nargs": "+", "metavar": "FILE"}
RUN = {"metavar": "RUN", "help": "a run's folder, or a checkpoint (.pt) in it"}
RUNS: dict[str, dict[str, Any]] = {
    "runs": {"nargs": "+"} | RUN,
    "--out": {
        "metavar": "FILE",
        "type": picture_file,
        "help": "picture to write: .png, .pdf, .svg",
    },
}


def parse(
    kind: type[AnyOptions],
    argv: Sequence[str] | None = None,
    arguments: dict[str, dict[str, Any]] = RUNS,
) -> tuple[AnyOptions, Any]:
    """A dataclass of options from the command line, and the `arguments`, which are not its fields.

    Raises UserError if a number is beyond its limits.
    """
    parser = Parser(description=(kind.__doc__ or "").split("\n\n")[0])
    for name, settings in arguments.items():
        parser.add_argument(name, **settings)
    options: tuple[Field, ...] = fields(kind)  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    for each in options:
        as_type: dict[str, Any] = {"type": types_of(hints[each.name])[0]}
        if hints[each.name] is bool:
            as_type = {"action": "store_true"}
        parser.add_argument(f"--{each.name}", **(as_type | each.metadata))
    parsed = parser.parse_args(argv)
    limits = typing.get_type_hints(kind, include_extras=True)
    values = {}
    for each in options:
        values[each.name] = getattr(parsed, each.name)
        check_limits(f"--{each.name}", values[each.name], limits[each.name])
    return kind(**values), parsed


def require(extra: str, *modules: str) -> None:
    """Raise UserError unless these modules of an extra of pyproject.toml are installed."""
    if not all(map(importlib.util.find_spec, modules)):
        raise UserError(f'this needs {" and ".join(modules)}: pip install -e ".[{extra}]"')
