"""Options of commands on finished runs: dataclasses whose fields are the options."""

import argparse
import math
import re
import typing
from collections.abc import Collection, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import torch

from attention import VARIANTS
from config import Config, choices
from errors import UserError, did_you_mean
from layers.rope import Rope
from runtime.device import pick_device, pick_dtype
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


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to open a finished run."""

    task: ClassVar[str] = "language"  # only runs of this task can be opened

    checkpoint: str = option("latest", "of the run", choices=("latest", "best"))
    rope: str = option("dynamic_ntk", f"RoPE scaling: {', '.join(Rope.SCALINGS)}")
    rope_factor: float | None = option(None, "of the scaling: see layers.rope.Rope")
    rope_theta: float | None = option(None, "another base (SSMax: 500000)")
    window: int | None = option(None, "each query sees so many last keys only", at_least=1)
    attention: str | None = option(None, "another variant; it re-weights only with --p")
    p: float | None = option(None, "another power of the re-weighting")
    device: str = option("auto", "'auto', 'cuda', 'cuda:1', 'mps' or 'cpu'")
    dtype: str = option("auto", "of matrix products", choices=choices("dtype"))
    attention_impl: str = option("auto", "path of attention", choices=choices("attention_impl"))

    @property
    def torch_dtype(self) -> torch.dtype:
        return pick_dtype(self.dtype, pick_device(self.device))

    def applied(self, config: Config) -> Config:
        """A run's config with the attention path, the variant, the window and the p of the options.

        The path is always the options': the run's own was chosen for the machine that trained it.
        Another variant re-weights with --p, or with the run's p if it needs p. Raises UserError for
        a run of another task.
        """
        if self.task not in config.tasks:
            raise UserError(
                f"{config.out_dir} has task = {config.task!r}, but this command is for "
                f"task = {self.task!r}"
            )
        changes: dict[str, Any] = {"attention_impl": self.attention_impl}
        if self.attention is not None:
            changes["attention"] = self.attention
            variant = VARIANTS.get(self.attention)
            if variant is not None and not variant.needs_p:
                changes["p"] = None
            if self.attention != config.attention:
                # the run's values were for its own variant
                changes |= {key: getattr(Config, key) for key in ("s_init", "b_init", "gamma")}
        if self.p is not None:
            changes["p"] = self.p
        if self.window is not None:
            changes["window"] = self.window
        return config.replace(**changes)

    def rope_for(self, config: Config) -> str:
        """The RoPE scaling of a run with this config: "none" for a run without RoPE.

        Raises UserError where a scaling other than the default, a factor or a base is asked of a
        run without RoPE, and for an unknown scaling or an invalid factor or base.
        """
        theta = {} if self.rope_theta is None else {"theta": self.rope_theta}
        Rope(2, 1, scaling=self.rope, factor=self.rope_factor, **theta)
        if config.positions == "rope":
            return self.rope
        if self.rope_factor or self.rope_theta or self.rope not in ("none", Options.rope):
            raise UserError(
                f"--rope: {config.out_dir} has positions = {config.positions!r}: no RoPE"
            )
        return "none"


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(Options):
    """How to open the runs that an evaluation measures; each evaluation adds options of its own."""

    again: bool = option(False, "measure again what has been measured")


# ---- the command line ----


class Parser(argparse.ArgumentParser):
    """Reports a mistake as one sentence, an unknown option with the nearest known one."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: --(\w+)", message)
        if unknown:
            known = re.findall(r"--(\w+)", self.format_usage())
            message += f"; {did_you_mean(unknown[1], known)}--help lists the options"
        raise UserError(re.sub(r"^argument (\S+):", r"\1", message))


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


RUN = {"metavar": "RUN", "help": "a run's folder, or a .pt in it"}
RUNS: dict[str, dict[str, Any]] = {
    "runs": {"nargs": "+"} | RUN,
    "--out": {"metavar": "FILE", "type": picture_file, "help": "of the picture: .png, .pdf, .svg"},
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
    if typing.get_origin(kind) is tuple:
        kind = lengths_of
    return settings | {"type": kind, "choices": option.metadata["choices"]}
