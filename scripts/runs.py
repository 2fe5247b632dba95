"""What the scripts on finished runs share: their options, opening a run, what a result records."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
from config import CHOICES, Config
from evaluate import pick_device, pick_dtype
from model import GPT, Rope


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
    parser.add_argument("--rope", default="dynamic_ntk", choices=Rope.SCALINGS)
    parser.add_argument("--rope_factor", type=float, help="see model.Rope; default: its own")
    parser.add_argument("--rope_theta", type=float, help="another base (SSMax: 500000)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=CHOICES["dtype"])


def open_run(path, arguments: argparse.Namespace) -> Run:
    """Load a run for evaluation. Raises UserError where it or the device is not there."""
    device = pick_device(arguments.device)
    dtype = pick_dtype(arguments.dtype, device)
    config = checkpoint.read_config(path)
    model = GPT(config)
    step = checkpoint.load_weights(model, path, arguments.checkpoint)
    model.scale_rope(arguments.rope, arguments.rope_factor, arguments.rope_theta)
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
    }
    return Run(Path(path), config, model.to(device).eval(), device, dtype, facts)
