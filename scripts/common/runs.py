"""What the scripts on finished runs share: their options, opening a run, its results."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure

from config import Config, choices
from errors import UserError
from model import GPT, Rope
from runtime import checkpoint
from runtime.device import environment, pick_device, pick_dtype
from runtime.files import atomic_write, check_writable, read_json, write_json

# Of curves in one picture.
MARKERS = "osD^v<>pPX*hd8H"


@dataclass(frozen=True)
class Run:
    """A finished run, its model on its device, in evaluation mode, RoPE scaled as asked."""

    path: Path
    config: Config
    model: GPT
    device: torch.device
    dtype: torch.dtype  # of matrix products: see evaluate.autocast
    facts: dict  # what every result of this run records beside its numbers


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that `open_run` reads."""
    parser.add_argument("--checkpoint", default="latest", choices=("latest", "best"))
    names = ", ".join(Rope.SCALINGS)
    parser.add_argument("--rope", default="dynamic_ntk", help=f"scaling: {names} (%(default)s)")
    parser.add_argument("--rope_factor", type=float, help="see model.Rope; default: its own")
    parser.add_argument("--rope_theta", type=float, help="another base (SSMax: 500000)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=choices("dtype"))
    impls = choices("attention_impl")
    parser.add_argument("--attention_impl", default="auto", choices=impls, help="path of attention")


def open_run(path, arguments: argparse.Namespace) -> Run:
    """Load a run for evaluation. Raises UserError where it or the device is not there."""
    device = pick_device(arguments.device)
    dtype = pick_dtype(arguments.dtype, device)
    config = checkpoint.read_config(path)
    # the path that trained it was a matter of that machine
    config = config.replace(attention_impl=arguments.attention_impl)
    model = GPT(config).scale_rope(arguments.rope, arguments.rope_factor, arguments.rope_theta)
    step = checkpoint.load_weights(model, path, arguments.checkpoint)
    facts = {
        "variant": config.variant_name,
        "seed": config.seed,
        "checkpoint": arguments.checkpoint,
        "step": step,
        "trained_length": config.block_size,
        "rope": arguments.rope,
        "rope_factor": arguments.rope_factor,
        "rope_theta": arguments.rope_theta,
        "dtype": str(dtype).removeprefix("torch."),
        "attention_impl": arguments.attention_impl,
    }
    return Run(Path(path), config, model.to(device).eval(), device, dtype, facts)


def run_names(paths) -> list[str]:
    """What tables and pictures call these runs: the variant, or the folder where that is not enough
    to tell them apart."""
    names = [checkpoint.read_config(path).variant_name for path in paths]
    if len(set(names)) == len(names):
        return names
    folders = [Path(path).resolve() for path in paths]
    return [os.path.relpath(folder, os.path.commonpath(folders)) for folder in folders]


def holding_folder(paths) -> Path:
    """Where a picture of these runs goes: the run's folder, or the one that holds them all."""
    folders = [Path(path).resolve() for path in paths]
    if len(folders) == 1:
        return folders[0]
    return Path(os.path.commonpath([folder.parent for folder in folders]))


def check_places(paths) -> None:
    """Raise UserError where results of these runs, or a picture of them all, cannot be written."""
    for folder in (*paths, holding_folder(paths)):
        check_writable(folder)


def read_results(path: Path) -> list[dict]:
    """The measurements that a run's file of results holds; UserError if it is something else."""
    results = read_json(path)
    if results is not None and not isinstance(results, list):
        raise UserError(f"{path}: it holds no list of measurements; move it out of the way")
    return results or []


def find_result(results: list[dict], question: dict) -> dict | None:
    """The measurement with these values, if it is there."""
    same = (r for r in results if all(r.get(key) == value for key, value in question.items()))
    return next(same, None)


class Results:
    """One measurement of a run's file of results, saved after each of its parts, so that a stopped
    one goes on.

    The file is a list of measurements. `facts` say which one this is: of the same weights, measured
    in the same way. The parts that it holds already need not be measured again.
    """

    def __init__(self, path: Path, facts: dict):
        self.path, self.facts = path, facts
        self.parts = (find_result(read_results(path), facts) or {"parts": {}})["parts"]

    def add(self, part: str, value: dict) -> None:
        self.parts[part] = value
        # read again: what others measure at the same time stays
        others = [one for one in read_results(self.path) if not find_result([one], self.facts)]
        mine = self.facts | {"parts": self.parts, "environment": environment()}
        write_json(self.path, [*others, mine])


def save_picture(figure: Figure, path: Path) -> None:
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=150)
    print(f"picture: {os.path.relpath(path)}")
