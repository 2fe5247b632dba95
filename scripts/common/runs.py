"""Shared by the commands on finished runs: their options, opening a run, naming its pictures."""

import argparse
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from attention import VARIANTS
from config import Config, choices
from errors import UserError
from layers.heads import check_attention
from layers.rope import Rope
from model import GPT
from runtime import checkpoint
from runtime.device import pick_device, pick_dtype
from runtime.files import check_writable
from scripts.common.arguments import AtLeast
from scripts.common.results import read_results

# Tokens of an evaluation batch, unless one sequence is longer.
BATCH_TOKENS = 16384
# The longest list of runs in a picture's file name, in characters; a longer one is cut.
LONGEST_LABEL = 100


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to open a finished run; `add_options` explains the fields."""

    task: ClassVar[str] = "language"  # of the runs that can be opened

    rope: str = "dynamic_ntk"
    rope_factor: float | None = None
    rope_theta: float | None = None
    checkpoint: str = "latest"
    attention: str | None = None
    window: int | None = None
    p: float | None = None
    attention_impl: str = "auto"
    device: str = "auto"
    dtype: str = "auto"

    @classmethod
    def parse(cls, arguments: argparse.Namespace) -> Self:
        return cls(**{field.name: getattr(arguments, field.name) for field in fields(cls)})

    @property
    def torch_dtype(self) -> torch.dtype:
        return pick_dtype(self.dtype, pick_device(self.device))

    def applied(self, config: Config) -> Config:
        """A run's config with the attention path, the row, the window and the p of these options.

        The path it was trained with was chosen for that machine. Another row does not re-weight
        unless it needs p, which is then the run's, or p is given. Raises UserError for a run of
        another task.
        """
        self.require_task(config)
        given = {"attention": self.attention, "window": self.window, "p": self.p}
        changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        row = VARIANTS.get(self.attention or "")
        if row is not None and self.p is None and not row.needs_p:
            changes["p"] = None
        return config.replace(attention_impl=self.attention_impl, **changes)

    def require_task(self, config: Config) -> None:
        """Raise UserError for a run of another task than this command's."""
        if config.task != self.task:
            raise UserError(
                f"{config.out_dir} has task = {config.task!r}, but this command is for runs with "
                f"task = {self.task!r}"
            )

    def rope_for(self, config: Config) -> str:
        """The RoPE scaling of a run with this config: that of a run without RoPE is "none".

        Raises UserError where such a run was to have another than the default.
        """
        if config.positions == "rope":
            return self.rope
        if self.rope not in ("none", RunOptions.rope) or self.rope_theta is not None:
            raise UserError(
                f"--rope {self.rope}: this run has positions = {config.positions!r}, and no RoPE"
            )
        return "none"

    def check_rope(self) -> None:
        """Raise UserError for an unknown RoPE scaling, or an invalid factor or base."""
        theta = {} if self.rope_theta is None else {"theta": self.rope_theta}
        Rope(2, 1, scaling=self.rope, factor=self.rope_factor, **theta)


def add_options(parser: argparse.ArgumentParser, options: type[RunOptions] = RunOptions) -> None:
    """Add the options of `RunOptions`, and set the defaults of all fields of `options`."""
    parser.add_argument("--checkpoint", choices=("latest", "best"))
    names = ", ".join(Rope.SCALINGS)
    parser.add_argument("--rope", help=f"scaling: {names} (%(default)s)")
    parser.add_argument("--rope_factor", type=float, help="see layers.rope.Rope")
    parser.add_argument("--rope_theta", type=float, help="another base (SSMax: 500000)")
    parser.add_argument(
        "--window", action=AtLeast, at_least=1, help="each row sees its last keys only: how many"
    )
    other = "variant of attention.VARIANTS in place of the run's; it re-weights only with --p"
    parser.add_argument("--attention", help=other)
    parser.add_argument("--p", type=float, help="power of re-weighting in place of the run's own")
    parser.add_argument("--device")
    parser.add_argument("--dtype", choices=choices("dtype"))
    impls = choices("attention_impl")
    parser.add_argument("--attention_impl", choices=impls, help="path of attention")
    parser.set_defaults(**{field.name: field.default for field in fields(options)})


@dataclass(frozen=True, kw_only=True)
class Request(RunOptions, ABC):
    """What an evaluation script is asked to measure: its command-line options as fields.

    The script parses its command line into a request, and scripts.reproduce builds one for each
    table, so both identify a measurement in the same way.
    """

    script: ClassVar[str]
    unit: ClassVar[str] = "tokens"  # of `amount`

    def arguments(self) -> list[str]:
        """The command-line options of this request: the fields that are not at their defaults."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        machine = {name: values.pop(name) for name in ("device", "dtype")}
        defaults = {field.name: field.default for field in fields(self)}
        return [
            option(name, value)
            for name, value in (values | machine).items()
            if value != defaults[name]
        ]

    def file(self, folder: Path) -> Path:
        """The results file of the run in `folder`."""
        return folder / f"{self.script}.json"

    @abstractmethod
    def facts(self, config: Config) -> dict:
        """What identifies the measurement of a run with this config, along with `run_facts`."""

    @abstractmethod
    def select(self, measurement: dict, config: Config) -> dict | None:
        """The measurement, reduced to the requested parts; None if one of them is missing."""

    @abstractmethod
    def amount(self, config: Config) -> int:
        """The cost of measuring one run, in `unit`."""

    @abstractmethod
    def check(self, config: Config) -> None:
        """Raise UserError where a run with this config cannot be measured."""


def option(name: str, value: Any) -> str:
    if value is True:
        return f"--{name}"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"--{name}={value}"


@dataclass(frozen=True)
class LoadedRun:
    """A finished run, its model on its device, in evaluation mode, with scaled RoPE."""

    path: Path  # its folder
    config: Config
    model: GPT
    device: torch.device
    dtype: torch.dtype  # of matrix products: see runtime.device.autocast
    facts: dict  # `run_facts`


def run_facts(trained: Config, weights: checkpoint.Found, options: RunOptions) -> dict:
    """What every measurement records about its run, its checkpoint and how the run was opened."""
    config = options.applied(trained)
    other = "" if options.attention is None else f" as {options.attention}"
    return {
        "variant": trained.variant_name + other,
        "seed": config.seed,
        "checkpoint": options.checkpoint,
        **weights.id,
        "trained_length": config.block_size,
        "rope": options.rope_for(config),
        "rope_factor": options.rope_factor,
        "rope_theta": options.rope_theta,
        "window": config.window,
        "p": config.p,
        "dtype": str(options.torch_dtype).removeprefix("torch."),
        "attention_impl": options.attention_impl,
    }


def open_run(path: str | Path, options: RunOptions) -> LoadedRun:
    """Load a run for evaluation. Raises UserError where the run or the device is missing."""
    device = pick_device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dtype = options.torch_dtype
    trained = checkpoint.read_config(path)
    config = options.applied(trained)
    rope = options.rope_for(config)
    model = GPT(config).scale_rope(rope, options.rope_factor, options.rope_theta)
    weights = checkpoint.load_weights(model, path, options.checkpoint)
    facts = run_facts(trained, weights, options)
    folder = checkpoint.folder_of(path)
    return LoadedRun(folder, config, model.to(device).eval(), device, dtype, facts)


def refuse_early(paths: Sequence[str | Path], request: Request) -> None:
    """Raise UserError, before any work, where a run cannot be measured or its results saved."""
    request.check_rope()
    pick_dtype(request.dtype, pick_device(request.device))
    configs = [request.applied(checkpoint.read_config(path)) for path in paths]
    for path in paths:
        checkpoint.find(path, request.checkpoint, quiet=True)  # open_run reports damaged ones
        read_results(request.file(checkpoint.folder_of(path)))
    check_output_folders(paths)
    for config in configs:
        check_attention(config)
        request.rope_for(config)
    for config in configs:  # last, as it may take a download
        request.check(config)


def run_names(paths: Sequence[str | Path]) -> list[str]:
    """Labels for tables and pictures: the variants, or the paths if variants repeat."""
    names = [checkpoint.read_config(path).variant_name for path in paths]
    if len(set(names)) == len(names):
        return names
    folders = [Path(path).resolve() for path in paths]
    return [os.path.relpath(folder, os.path.commonpath(folders)) for folder in folders]


def common_folder(paths: Sequence[str | Path]) -> Path:
    """Where a picture of these runs goes: the run's folder, or the common parent of several."""
    if len(paths) == 1:
        return checkpoint.folder_of(Path(paths[0]).resolve())
    return Path(os.path.commonpath([Path(path).resolve().parent for path in paths]))


def picture_path(paths: Sequence[str | Path], name: str) -> Path:
    """The file of a picture of these runs, in `common_folder`.

    That of several runs, or of a checkpoint's file, has their paths in its name: other runs have
    other pictures.
    """
    folder = common_folder(paths)
    if len(paths) == 1 and not checkpoint.is_checkpoint(paths[0]):
        return folder / f"{name}.png"
    found = [Path(path).resolve().relative_to(folder) for path in paths]
    label = "_".join("-".join(one.parts).removesuffix(".pt") for one in found)
    if len(label) > LONGEST_LABEL:
        label = f"{label[:LONGEST_LABEL]}_{hashlib.sha256(label.encode()).hexdigest()[:8]}"
    return folder / f"{name}_{label}.png"


def check_output_folders(paths: Sequence[str | Path]) -> None:
    """Raise UserError where results of these runs, or a picture of them all, cannot be written."""
    for folder in (*map(checkpoint.folder_of, paths), common_folder(paths)):
        check_writable(folder)
