"""Train a model: python train.py configs/lssar_p15.py, or the same under torchrun.

Read top to bottom: config -> data -> model -> optimizers -> loop. The loss curve depends on the
global batch and the seed, not on the number of processes or micro-batches, nor on how often the run
is stopped and resumed. docs/resuming.md lists the exit codes.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from config import Config, accumulation_steps, command_line
from errors import UserError, command

if __name__ == "__main__":
    command(command_line)()  # help and mistakes come at once: the imports below take seconds

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from data.tasks import open_loader
from evaluation import mean_loss
from layers.heads import build_parts
from layers.selfcheck import check_kernels
from model import GPT, compile_model
from optim import learning_rate
from runtime import checkpoint
from runtime.checkpoint import Training
from runtime.device import autocast, open_device, pick_compile, pick_dtype, usage
from runtime.distributed import EXIT_STOPPED, all_reduce_max, process_group, stop_signals
from runtime.divergence import finite_step, stop_diverged
from runtime.files import lock_folder, write_json
from runtime.log import Log, say
from runtime.pretrained import load_initial
from runtime.preview import describe

Pair = tuple[Tensor, Tensor]  # inputs and targets
Loss = Callable[[Tensor, Tensor], Tensor]  # of inputs and targets, in nats


@command
def main() -> None:
    config = command_line()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    build_parts(config)  # raises for settings that contradict the attention
    accumulation_steps(config, world_size)  # raises if the batch does not divide evenly
    run, device = Path(config.out_dir), open_device(config.device)
    lock = lock_folder(run, "training this run") if rank == 0 else nullcontext()
    with process_group(rank, world_size, device, config.timeout), lock:
        resume = checkpoint.resumes(run, config.resume)
        config = config.replace(resume=resume, init_from="" if resume else config.init_from)
        stopped = train(config, rank, world_size, device)
    if stopped:
        sys.exit(EXIT_STOPPED)


def train(config: Config, rank: int, world_size: int, device: torch.device) -> bool:
    """Train until the last step or a signal; returns whether a signal stopped it."""
    run, is_main, state = Path(config.out_dir), rank == 0, None

    # ---- data ----
    loader = open_loader(config, rank, world_size, device)
    dtype = pick_dtype(config.dtype, device)
    if config.resume:
        state = checkpoint.load_to_resume(run, config, quiet=not is_main)
    if loader is not None:
        if state is not None and state.tokens not in (0, loader.tokens):
            raise UserError(
                f"{loader.source} has {loader.tokens:,} tokens, but the run was trained on "
                f"{state.tokens:,}, in other batches: give the same data, or start a new run"
            )
        loader.validation_batches(config.val_tokens, config.batch_size)  # raises for too few tokens

    # ---- model ----
    torch.manual_seed(config.seed)
    model = GPT(config).to(device)
    kernels = check_kernels(
        model, config, dtype, lambda failed: all_reduce_max(failed, device) > 0,
        say=say if is_main else None,
    )  # fmt: skip
    began_with = load_initial(model, config.init_from) if config.init_from else None

    # ---- optimizers ----
    training, module = Training.begin(model, config, dtype, state), cast(nn.Module, model)
    del state  # and with it the optimizer's tensors in host memory
    if all_reduce_max(training.step, device) > training.step:  # DDP would hide it
        raise UserError(f"{run}: rank {rank} sees an older checkpoint than another rank does")
    # on the blocked path each length of recall would compile a graph of its own
    slow = "recall" in config.task and "blocked" in kernels["attention_path"]
    if pick_compile(config.compile, device, slow):
        module = compile_model(model)
    if world_size > 1:  # after the weights are final: DDP copies rank 0's to all ranks
        module = ddp = DDP(module, gradient_as_bucket_view=True)
        ddp.broadcast_buffers = False  # RoPE's tables only; the argument is deprecated

    # ---- loop ----
    if is_main:
        say(describe(config, training, loader, world_size))
    if config.dry_run or loader is None:
        return False
    training.tokens = loader.tokens
    if is_main:
        checkpoint.write_header(run, config, kernels, training.resumed_at)
        if began_with:  # never on resume: the file stays as it is
            write_json(run / "began_with.json", began_with.id)

    def batch(step: int) -> Batch:
        x, y = loader.batch(config.first_batch + step)
        pairs = list(zip(x.split(config.batch_size), y.split(config.batch_size), strict=True))
        return Batch(pairs, divisor=len(pairs), tokens=world_size * len(x) * x.shape[1])

    val_windows = loader.validation_windows(config.val_tokens)
    objective = Objective(
        loss=module,
        batch=batch,
        flops_per_token=model.flops_per_token(),
        validation=lambda: loader.validation_batches(config.val_tokens, config.batch_size),
        validation_batches=math.ceil(val_windows / (world_size * config.batch_size)),
    )
    return fit(config, training, objective)


# ---- the loop, of pretraining here and of scripts.finetune_squad ----


class Batch(NamedTuple):
    """One rank's part of a step. The loss of a step is the sum over micro-batches / divisor."""

    micro_batches: Sequence[Pair]
    divisor: int
    tokens: int  # of all ranks


@dataclass(frozen=True)
class Objective:
    """What `fit` trains a model on: its loss and its batches, by the number of updates before."""

    loss: Loss  # of a micro-batch
    batch: Callable[[int], Batch]
    flops_per_token: float = 0.0  # 0: not known
    validation: Callable[[], Iterator[Pair]] | None = None
    validation_batches: int = 0  # of a rank, at most


def fit(config: Config, t: Training, objective: Objective) -> bool:
    """Train until the last step or a signal; returns whether a signal stopped it."""
    run, device = Path(config.out_dir), t.device
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with (
        stop_signals() as received,
        checkpoint.Saver(run, config, t.resumed_at, quiet=rank > 0) as saver,
    ):
        log = Log(run, config, t.resumed_at, quiet=rank > 0)
        while True:
            last, new = t.step >= config.max_iters, t.step != t.resumed_at
            # validated before it is saved: a resumed run need not validate its first step
            if new and objective.validation and (last or t.step % config.eval_interval == 0):
                name, count = f"validation of step {t.step}", objective.validation_batches
                batches = log.progress(objective.validation(), name, count)
                val_loss = mean_loss(t.model.eval(), batches, device, t.dtype)
                t.model.train()
                log.validation(t.step, val_loss)
                if val_loss < t.best_val_loss:
                    t.best_val_loss = val_loss
                    saver.save("best", t.state(config, best=True))
            started = time.perf_counter()
            stop = all_reduce_max(len(received), device) > 0  # waits for the last step's update
            if new and (last or stop or t.step % config.checkpoint_interval == 0):
                if not all(p.isfinite().all() for p in t.model.parameters()):
                    stop_diverged(run, t.step, "its update left non-finite weights")
                log.sync()
                saver.save("step", t.state(config))
                if t.step == 0:
                    saver.wait()  # so any run with a step can be resumed; a full disk shows at once
                started = time.perf_counter()
            if last or stop:
                break

            batch = objective.batch(t.step)
            # a variant that draws random numbers draws the same ones in a resumed run
            torch.manual_seed(hash((config.seed, t.step, rank)))
            lr = learning_rate(t.step, config)
            for group in (group for optimizer in t.optimizers for group in optimizer.param_groups):
                group["lr"] = lr
            loss, grad_norm = train_step(t, objective.loss, batch, config.grad_clip)
            if not finite_step(loss, grad_norm, t.scaler):
                error = f"loss = {loss}, gradient norm = {grad_norm} is not finite"
                stop_diverged(run, t.step + 1, error)
            t.step, seconds = t.step + 1, time.perf_counter() - started
            flops_per_s = objective.flops_per_token * batch.tokens / (seconds * ranks)
            log.step(
                t.step, loss=loss, lr=lr, grad_norm=grad_norm, ms=1000 * seconds,
                tokens_per_s=batch.tokens / seconds, **usage(device, flops_per_s),
            )  # fmt: skip
        saver.wait()
        done = "finished" if last else "stopped by a signal; continue with --resume"
        log.print(f"step {t.step} of {config.max_iters} is saved: {done}")
        log.finish()
        return not last


def train_step(t: Training, loss_fn: Loss, batch: Batch, grad_clip: float) -> tuple[float, float]:
    """Update the model once, by the gradient of the batch's loss.

    Returns the loss, averaged over ranks, and the gradient norm before clipping (grad_clip = 0: no
    clipping). Both are the same on all ranks; if one is not finite, the weights do not change.
    """
    total = torch.zeros((), device=t.device)
    for i, (x, y) in enumerate(batch.micro_batches, 1):
        # DDP decides in the forward pass whether this backward will synchronise gradients
        more = i < len(batch.micro_batches)
        with loss_fn.no_sync() if isinstance(loss_fn, DDP) and more else nullcontext():
            with autocast(t.device, t.dtype):
                micro_loss = loss_fn(x, y) / batch.divisor
            t.scaler.scale(micro_loss).backward()
        total += micro_loss.detach()
    for optimizer in t.optimizers:
        t.scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(t.model.parameters(), grad_clip or math.inf)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks > 1:
        dist.all_reduce(total, dist.ReduceOp.SUM)
    loss, grad_norm = total.item() / ranks, norm.item()
    for optimizer in t.optimizers:
        if math.isfinite(loss) and math.isfinite(grad_norm):
            t.scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    t.scaler.update()
    return loss, grad_norm


if __name__ == "__main__":
    main()
