"""What is said of a run before its first step: its data, its time and memory, its learning rate."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from config import Config, accumulation_steps
from data.loader import Loader
from errors import UserError
from model import GPT
from optim import learning_rate
from runtime.device import autocast, pick_compile

# A first pass also loads and compiles code; one that takes longer is not repeated to time it.
LONG_PASS_S = 2


def check_schedule(config: Config, step: int, before: dict[str, Any], quiet: bool) -> None:
    """Say how other settings than those `before` change the learning rate of a run resumed at step.

    Raises UserError where they would more than double it: the schedule has lowered it for good.
    """
    old = config.replace(**{key: before.get(key, 0) for key in ("max_iters", "cooldown_iters")})
    was, now = learning_rate(step - 1, old), learning_rate(step - 1, config)
    if not step or was == now:
        return
    change = (
        f"max_iters = {config.max_iters} instead of {old.max_iters} makes the learning rate at "
        f"step {step} {now:.1e} instead of {was:.1e}"
    )
    if now > 2 * was:
        raise UserError(
            f"{config.out_dir}: {change}, after its schedule has lowered it. For a warm restart, "
            f"start a new run from its weights: --init_from={config.out_dir} --out_dir=NEW. A run "
            "that is to be continued is trained with --schedule=trapezoidal, and takes its "
            "cooldown_iters with the last --resume"
        )
    if not quiet:
        print(f"note: {change}", flush=True)


def show(
    config: Config,
    model: GPT,
    compiled: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loader: Loader,
    val_windows: int,
    device: torch.device,
    dtype: torch.dtype,
    world_size: int,
    resumed_at: int | None,
    quiet: bool,
) -> None:
    """Print what the run is and what its remaining steps will take."""
    step, val_tokens = resumed_at or 0, val_windows * config.block_size

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    accumulated = accumulation_steps(config, world_size)
    say(
        f"{config.variant_name}: {model.count_parameters():,} parameters, {loader.tokens:,} "
        f"training tokens in {loader.source}, {loader.n_windows:,} windows; "
        f"{config.total_batch_size:,} tokens a step (processes x micro-batches x batch_size x "
        f"block_size = {world_size} x {accumulated} x {config.batch_size} x {config.block_size}) "
        f"on {device.type} in {str(dtype).removeprefix('torch.')}; run folder "
        f"{config.out_dir}" + (f", from step {step} of {config.max_iters}" if step else "")
    )
    ramps = config.warmup_iters + config.cooldown_iters
    if step < config.max_iters < ramps:
        say(
            f"note: warm-up and cooldown take {ramps} steps, but max_iters = {config.max_iters}: "
            f"the learning rate does not reach {config.learning_rate:g}"
        )
    if val_tokens < config.val_tokens // config.block_size * config.block_size:
        say(
            f"note: val_tokens = {config.val_tokens:,}, but {loader.source} has only "
            f"{val_tokens:,} in whole windows of {config.block_size}"
        )
    if step < config.max_iters:
        timing: AbstractContextManager = nullcontext()
        if device.type != "cuda" and pick_compile(config.compile, device):
            # of a single sequence, for which the blocks would be compiled once more
            timing = torch.compiler.set_stance("force_eager")
        with timing:
            say(estimate(compiled, optimizers, config, device, dtype, world_size, step, val_tokens))
    if config.dry_run:
        say("dry run: all checks passed; nothing was written")


def estimate(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: Config,
    device: torch.device,
    dtype: torch.dtype,
    world_size: int,
    step: int,
    validation_tokens: int,
) -> str:
    """Tokens, time and memory of the steps after `step`, in a sentence.

    They follow from a forward and a backward pass: on a GPU of a micro-batch, elsewhere of a single
    sequence, because a slow machine may take minutes for more. The passes leave no trace in the
    model or in torch's random numbers.
    """
    sequences = config.batch_size if device.type == "cuda" else 1
    shape = (sequences, config.block_size, *config.position_shape)
    x = torch.zeros(shape, dtype=torch.long, device=device)
    seconds, activations = time_pass(model, x, dtype)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    averages = sum(  # AdamW keeps two of each parameter, Muon one
        p.numel() * p.element_size() * (2 if "betas" in group else 1)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    )
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(device) + averages
    else:
        memory = 2 * parameters + averages + config.batch_size * activations
    per_token = seconds / (sequences * config.block_size) / world_size
    a_step = per_token * config.total_batch_size
    # by the usual count, a backward pass takes twice as long as a forward pass
    a_validation = per_token / 3 * validation_tokens
    left = config.max_iters - step
    validations = config.max_iters // config.eval_interval - step // config.eval_interval + 1
    return (
        f"{left * config.total_batch_size:,} tokens to train on: about {duration(a_step)} a step, "
        f"{duration(a_validation)} a validation and "
        f"{duration(left * a_step + validations * a_validation)} in all; at least "
        f"{memory / 1e6:,.0f} MB of memory"
    )


def time_pass(model: nn.Module, x: Tensor, dtype: torch.dtype) -> tuple[float, int]:
    """Seconds of a forward and a backward pass on x, and the bytes kept between the two.

    On a GPU the bytes are 0: they are not counted, because hooks would recompile the model.
    """
    parameters = {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    on_gpu, seconds = x.device.type == "cuda", 0.0
    with torch.random.fork_rng(devices=[x.device] if on_gpu else []):
        for _ in range(2):
            if seconds < LONG_PASS_S or on_gpu:
                kept = dict(parameters)  # anew: the second pass may reuse addresses of the first
                started = time.perf_counter()
                with nullcontext() if on_gpu else saved_tensors_hooks(keep, lambda tensor: tensor):
                    with autocast(x.device, dtype):
                        loss = model(x, x)
                loss.backward()
                next(p.grad for p in model.parameters() if p.grad is not None).sum().item()
                seconds = time.perf_counter() - started
                model.zero_grad(set_to_none=True)
    return seconds, sum(kept.values())


def duration(seconds: float) -> str:
    """A time in the unit that suits it: 30 ms, 12 s, 1:05:00."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.0f} s" if seconds < 100 else str(timedelta(seconds=round(seconds)))
