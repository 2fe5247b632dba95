"""What the commands on finished runs share: opening a run, and measuring it once."""

import argparse
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from config import Config, choices
from data.shards import read_meta
from errors import UserError
from model import GPT, Rope
from runtime import checkpoint
from runtime.device import environment, pick_device, pick_dtype
from runtime.files import check_writable, read_json, write_json

# Tokens of an evaluation batch, unless one sequence is longer.
BATCH_TOKENS = 16384


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a finished run is opened: the options of these names."""

    rope: str
    rope_factor: float | None = None
    rope_theta: float | None = None
    checkpoint: str = "latest"
    attention_impl: str = "auto"
    device: str = "auto"
    dtype: str = "auto"

    @classmethod
    def parse(cls, arguments: argparse.Namespace) -> Self:
        return cls(**{field.name: getattr(arguments, field.name) for field in fields(cls)})

    @property
    def torch_dtype(self) -> torch.dtype:
        return pick_dtype(self.dtype, pick_device(self.device))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `RunOptions`."""
    parser.add_argument("--checkpoint", default="latest", choices=("latest", "best"))
    names = ", ".join(Rope.SCALINGS)
    parser.add_argument("--rope", default="dynamic_ntk", help=f"scaling: {names} (%(default)s)")
    parser.add_argument("--rope_factor", type=float, help="see model.Rope; default: its own")
    parser.add_argument("--rope_theta", type=float, help="another base (SSMax: 500000)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=choices("dtype"))
    impls = choices("attention_impl")
    parser.add_argument("--attention_impl", default="auto", choices=impls, help="path of attention")


@dataclass(frozen=True, kw_only=True)
class Request(RunOptions, ABC):
    """What an evaluation script is to measure of a run: its options.

    The script makes one of its command line, and scripts.reproduce makes one for each table, so
    that both identify a measurement by the same facts.
    """

    script: ClassVar[str]
    unit: ClassVar[str] = "tokens"  # of `amount`

    def arguments(self) -> list[str]:
        """The command line that asks for this, without the runs."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        machine = {name: values.pop(name) for name in ("device", "dtype")}
        defaults = {field.name: field.default for field in fields(self)}
        return [
            option(name, value)
            for name, value in (values | machine).items()
            if value != defaults[name]
        ]

    def file(self, folder: Path) -> Path:
        """The results of the run in `folder`."""
        return folder / f"{self.script}.json"

    @abstractmethod
    def facts(self, config: Config) -> dict:
        """What identifies the measurement of a run with this config, beside `run_facts`."""

    @abstractmethod
    def select(self, measurement: dict, config: Config) -> dict | None:
        """The measurement with only those of its parts that are asked for; None if one is missing.

        Short lists stay whole."""

    @abstractmethod
    def amount(self, config: Config) -> int:
        """How many of `unit` measuring one run takes, to estimate the cost."""

    @abstractmethod
    def check(self, config: Config) -> None:
        """Raise UserError where a run with this config cannot be measured."""


def option(name: str, value: Any) -> str:
    if value is True:
        return f"--{name}"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"--{name}={value:g}" if isinstance(value, float) else f"--{name}={value}"


def select_parts(measurement: dict, key: str, names: Sequence[str]) -> dict | None:
    """The measurement with only these entries of measurement[key]; None if one is missing."""
    if not set(names) <= measurement[key].keys():
        return None
    return measurement | {key: {name: measurement[key][name] for name in names}}


@dataclass(frozen=True)
class LoadedRun:
    """A finished run, its model on its device, in evaluation mode, RoPE scaled as asked."""

    path: Path
    config: Config
    model: GPT
    device: torch.device
    dtype: torch.dtype  # of matrix products: see runtime.device.autocast
    facts: dict  # `run_facts`


def run_facts(config: Config, step: int, options: RunOptions) -> dict:
    """What every measurement of a run records of it."""
    return {
        "variant": config.variant_name,
        "seed": config.seed,
        "checkpoint": options.checkpoint,
        "step": step,
        "trained_length": config.block_size,
        "rope": options.rope,
        "rope_factor": options.rope_factor,
        "rope_theta": options.rope_theta,
        "dtype": str(options.torch_dtype).removeprefix("torch."),
        "attention_impl": options.attention_impl,
    }


def open_run(path: str | Path, options: RunOptions) -> LoadedRun:
    """Load a run for evaluation. Raises UserError where it or the device is not there."""
    device = pick_device(options.device)
    dtype = options.torch_dtype
    config = checkpoint.read_config(path)
    # the path that trained it was a matter of that machine
    config = config.replace(attention_impl=options.attention_impl)
    model = GPT(config).scale_rope(options.rope, options.rope_factor, options.rope_theta)
    step = checkpoint.load_weights(model, path, options.checkpoint)
    facts = run_facts(config, step, options)
    return LoadedRun(Path(path), config, model.to(device).eval(), device, dtype, facts)


def run_names(paths: Sequence[str | Path]) -> list[str]:
    """Labels for tables and pictures: the variants, or the folders where those are not distinct."""
    names = [checkpoint.read_config(path).variant_name for path in paths]
    if len(set(names)) == len(names):
        return names
    folders = [Path(path).resolve() for path in paths]
    return [os.path.relpath(folder, os.path.commonpath(folders)) for folder in folders]


def holding_folder(paths: Sequence[str | Path]) -> Path:
    """Where a picture of these runs goes: the run's folder, or the one that holds them all."""
    folders = [Path(path).resolve() for path in paths]
    if len(folders) == 1:
        return folders[0]
    return Path(os.path.commonpath([folder.parent for folder in folders]))


def check_places(paths: Sequence[str | Path]) -> None:
    """Raise UserError where results of these runs, or a picture of them all, cannot be written."""
    for folder in (*paths, holding_folder(paths)):
        check_writable(folder)


def check_tokenizer(data_dir: str, config: Config, largest: int = 0) -> None:
    """Raise UserError where the shards of data_dir, which hold token ids up to `largest`, are of
    another tokenizer than a run with this config."""
    meta = read_meta(data_dir) or {"tokenizer": config.tokenizer}  # published shards have none
    if meta["tokenizer"] != config.tokenizer or largest >= config.n_vocab:
        raise UserError(
            f"{data_dir}: its tokens are of another tokenizer than the run's tokenizer, "
            f"{config.tokenizer!r}"
        )


def read_results(path: Path) -> list[dict]:
    """The measurements in a run's file of results; UserError if it holds something else."""
    results = read_json(path)
    if results is not None and not isinstance(results, list):
        raise UserError(f"{path}: it holds no list of measurements; move it out of the way")
    return results or []


def matches(measurement: dict, facts: dict) -> bool:
    return all(measurement.get(key) == value for key, value in facts.items())


class Results:
    """One measurement in a run's file of results, a list with the newest measurement last.

    `facts` identify it; `values` are what has been measured so far, empty at first. It is saved
    after each of its parts, so that a stopped command goes on from there.
    """

    def __init__(self, path: Path, facts: dict):
        self.path, self.facts = path, facts
        self.values: dict = next((r for r in read_results(path) if matches(r, facts)), {})

    def save(self, **values: Any) -> None:
        self.values = self.facts | values | {"environment": environment()}
        write_json(self.path, [*self.others(), self.values])

    def discard(self, key: str) -> None:
        """Remove the measurement, and `key`, which only it may have, from all others."""
        kept = [{k: v for k, v in one.items() if k != key} for one in self.others()]
        write_json(self.path, kept)

    def others(self) -> list[dict]:
        # read again: what other processes measure at the same time stays
        return [one for one in read_results(self.path) if not matches(one, self.facts)]

    @property
    def parts(self) -> dict[str, dict]:
        """Of a measurement that is saved by named parts."""
        return self.values.get("parts", {})

    def add(self, part: str, value: dict) -> None:
        self.save(parts=self.parts | {part: value})


def print_table(
    rows: Sequence[Sequence[str]], left: int = 1, width: int = 0, remarks: Sequence[str] = ()
) -> None:
    """Print cells in columns, the first `left` of them flush left, the others at least `width`
    wide and flush right, with `remarks` after the first rows."""
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    for i, row in enumerate(rows):
        cells = [cell.ljust(w) for cell, w in zip(row[:left], widths[:left], strict=True)]
        cells += [
            cell.rjust(max(w, width)) for cell, w in zip(row[left:], widths[left:], strict=True)
        ]
        print("".join(cells) + (f"   {remarks[i]}" if i < len(remarks) else ""))
