"""Parses a command line into a dataclass, each field of which is an option.

Imports no torch, so that --help and error messages appear at once.
"""

import argparse
import math
import re
import typing
from collections.abc import Collection, Sequence
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from errors import UserError, did_you_mean
from runtime.files import check_writable

PICTURES = (".png", ".pdf", ".svg")

AnyOptions = TypeVar("AnyOptions")


def option(
    default: Any,
    help: str,
    *,
    at_least: int | None = None,
    choices: Collection[str] | None = None,
) -> Any:
    """A field of a dataclass that is an option of the command, `--FIELD VALUE`."""
    return field(default=default, metadata={"help": help, "at_least": at_least, "choices": choices})


class Parser(argparse.ArgumentParser):
    """Reports a mistake as one sentence, an unknown option with the nearest known one."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: --(\w+)", message)
        if unknown:
            known = re.findall(r"--(\w+)", self.format_usage())
            message += f"; {did_you_mean(unknown[1], known)}--help lists the options"
        raise UserError(re.sub(r"^argument (\S+):", r"\1", message))


class StoreTuple(argparse.Action):
    """Stores the values of an option that takes several."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, tuple(values))


def picture_file(text: str) -> Path:
    """The file of --out."""
    path = Path(text)
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text} must end in {', '.join(PICTURES)}")
    check_writable(path.parent)
    return path


def lengths_of(text: str) -> tuple[int, ...]:
    """Lengths in tokens, such as 1024,2048, in ascending order."""
    lengths = text.split(",")
    if not all(length.isdecimal() and int(length) for length in lengths):
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers above 0, as 1024,2048")
    return tuple(sorted(set(map(int, lengths))))


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

    Raises UserError where a number is too small or not finite.
    """
    parser = Parser(description=(kind.__doc__ or "").split("\n\n")[0])
    for name, settings in arguments.items():
        parser.add_argument(name, **settings)
    options: tuple[Field, ...] = fields(kind)  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    for each in options:
        parser.add_argument(f"--{each.name}", **argument_of(each, hints[each.name]))
    parsed = parser.parse_args(argv)
    values = {}
    for each in options:
        value, least = getattr(parsed, each.name), each.metadata["at_least"]
        if value is not None and least is not None and not value >= least:
            raise UserError(f"--{each.name} {value} must be at least {least}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{each.name} {value} must be a finite number")
        values[each.name] = value
    return kind(**values), parsed


def argument_of(option: Field, hint: Any) -> dict[str, Any]:
    """What argparse must know of an option with this type hint, such as `int | None`."""
    help = option.metadata["help"]
    if option.default not in (None, False):
        help += " (%(default)s)"
    settings: dict[str, Any] = {"default": option.default, "help": help}
    if hint is bool:
        return settings | {"action": "store_true"}
    kind = next(iter(typing.get_args(hint)), hint)
    if typing.get_origin(kind) is list:  # of texts, each after its own --OPTION
        return settings | {"action": "append"}
    if typing.get_origin(kind) is tuple:
        if str in typing.get_args(kind):
            return settings | {"nargs": "+", "metavar": "FILE", "action": StoreTuple}
        kind = lengths_of
    return settings | {"type": kind, "choices": option.metadata["choices"]}
