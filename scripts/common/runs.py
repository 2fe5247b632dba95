"""Opens finished runs and models of transformers for evaluation.

A stored measurement is identified by the facts of its run: its checkpoint, and how it was opened.
"""

import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar, cast

import torch
from tqdm import tqdm

from config import Config
from layers.build import build_model
from layers.formulas import formulas_hash
from layers.selfcheck import check_kernels
from layers.windows import largest_window, limit_windows
from model import GPT
from runtime import checkpoint, metadata
from runtime.checkpoint import Checkpoint
from runtime.device import autocast, pick_device
from scripts.common.hf_loading import load_model
from scripts.common.hf_models import AnyRun, ModelConfig, find_weights, folder_of, read_config
from scripts.common.options import Options
from scripts.common.windows import check_windows, rope_sees_beyond

# Tokens of an evaluation batch, unless one sequence is longer.
BATCH_TOKENS = 16384

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A finished run, its model on its device, in evaluation mode, with scaled RoPE."""

    path: Path  # its folder
    config: Config
    model: GPT
    device: torch.device
    dtype: torch.dtype  # of matrix products
    facts: dict  # `run_facts`

    def autocast(self) -> torch.autocast:
        return autocast(self.device, self.dtype)


def load_run(run: AnyRun, options: Options | None = None) -> Run:
    """Load a run, or the .pt file of a checkpoint, or a model of transformers, for evaluation.

    Raises UserError if the run or the device is missing.
    """
    options = options or Options()
    device = pick_device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    trained = read_config(run)
    config = options.apply_to(trained)
    weights = find_weights(run)
    if isinstance(weights, ModelConfig):
        with autocast(device, options.torch_dtype):
            # evaluations of text call nothing else of a GPT
            model = cast(GPT, load_model(weights, options, device))
        facts = model_facts(weights, options)
    else:
        model = load_trained(weights, trained, options, device)
        facts = run_facts(trained, weights, options, model)
    return Run(folder_of(weights), config, model, device, options.torch_dtype, facts)


def load_trained(
    weights: Checkpoint, trained: Config, options: Options, device: torch.device
) -> GPT:
    """Load the weights of a run that was trained with this config, opened with the options."""
    config = options.apply_to(trained)
    model = open_model(config, options.window).to(device).eval()
    check_kernels(model, config, options.torch_dtype)
    options.check_rope(config)
    scaling = rope_scaling(config, options, model)
    model.scale_rope(scaling, options.rope_factor, options.rope_theta)
    model.scale_scores(options.log_base)
    checkpoint.load_weights(model, weights)
    if options.window is not None:
        check_windows(model, device, options.torch_dtype)
    folder = folder_of(weights)
    edited = metadata.formulas_difference(folder, trained)
    if edited:
        print(f"warning: {weights.run} was trained with {edited}", file=sys.stderr)
    changed = metadata.data_difference_of(folder, trained)
    if changed:
        print(f"warning: {weights.run} was trained on {changed}", file=sys.stderr)
    return model


def open_model(config: Config, limit: int | None) -> GPT:
    """A model with this config, and with windows of at most `limit` keys."""
    model = build_model(config)
    if limit is not None:
        limit_windows(model, limit)
    return model


@functools.cache  # the runs of a table are looked up several times
def model_on_meta(config: Config, limit: int | None) -> GPT:
    """The model of `open_model` without weights, which takes a second to build."""
    with torch.device("meta"):
        return open_model(config, limit)


def rope_scaling(config: Config, options: Options, model: GPT) -> str:
    """The RoPE scaling of a run with this config and model: "none" also for a run without RoPE.

    The default is Dynamic NTK if a head with RoPE sees farther than in training. If windows hide
    what is farther, as in hybrids, scaling would only change what was learned.
    """
    if options.rope is not None:
        return options.rope
    if rope_sees_beyond(model, config.block_size):
        return "dynamic_ntk"
    return "none"


def run_facts(
    trained: Config,
    weights: Checkpoint,
    options: Options,
    model: GPT,
) -> dict:
    """What every measurement records about its run, its checkpoint and how the run was opened.

    `model` may be without weights: only its windows and its RoPE are read.
    """
    config = options.apply_to(trained)
    variant = trained.variant_name
    if options.attention is not None:
        variant += f" as {options.attention}"
    return {
        "variant": variant,
        "attention": options.attention,
        "seed": config.seed,
        **weights.id,
        "trained_length": config.block_size,
        "rope": rope_scaling(config, options, model),
        "rope_factor": options.rope_factor,
        "rope_theta": options.rope_theta,
        "log_base": options.log_base,
        "window": largest_window(model),
        "p": config.p,
        "dtype": str(options.torch_dtype).removeprefix("torch."),
        "attention_impl": options.attention_impl,
        "formulas": formulas_hash(config),
    }


def model_facts(config: ModelConfig, options: Options) -> dict:
    """What every measurement records about its model of transformers and how that was opened."""
    return {
        "variant": config.label,
        "seed": None,
        "sha256": config.sha256,
        "rope": None if options.rope == "none" else options.rope,  # None: the model's own
        "rope_factor": options.rope_factor,
        "rope_theta": options.rope_theta,
        # the training length from which a scaling starts; None: the model's own
        "rope_from": None if options.rope in (None, "none") else config.block_size,
        "window": options.window,
        "p": None,
        "dtype": str(options.torch_dtype).removeprefix("torch."),
    }


def batches(items: Iterable[T], length: int) -> Iterator[list[T]]:
    """Items of one length in batches of up to BATCH_TOKENS tokens, drawn lazily."""
    remaining = iter(tqdm(items, leave=False, disable=None))
    while batch := list(islice(remaining, max(1, BATCH_TOKENS // length))):
        yield batch
