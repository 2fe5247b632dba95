"""Train a model: python train.py configs/lssar_p15.py, or the same under torchrun.

Read top to bottom: config -> data -> model -> optimizers -> loop. The loss curve depends on the
global batch and the seed, not on the number of processes or micro-batches, nor on how often the run
is stopped and resumed. docs/resuming.md lists the exit codes.
"""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from config import Config, accumulation_steps, command_line
from errors import EXIT_MISTAKE, UserError, command

if __name__ == "__main__":
    command(command_line)()  # help and mistakes come at once: the imports below take seconds

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from evaluation import mean_loss
from layers.heads import check_attention
from model import GPT, compile_model
from optim import build_optimizers, learning_rate
from runtime import checkpoint, preview
from runtime.device import (
    autocast,
    memory_mb,
    peak_flops,
    pick_compile,
    pick_device,
    pick_dtype,
    seed_randomness,
)
from runtime.distributed import (
    EXIT_STOPPED,
    Stop,
    Stopped,
    all_reduce_max,
    process_group,
)
from runtime.divergence import check_weights, finite_step, stop_diverged
from runtime.files import check_writable, lock_folder, write_json
from runtime.log import Log, best_effort_output
from runtime.pretrained import load_initial
from tasks.loaders import open_loader

T = TypeVar("T")
Batch = tuple[Tensor, Tensor]  # inputs and targets

# Each rank's request before a step; the largest applies to all ranks.
CONTINUE, SAVE_AND_STOP, ABORT = 0, 1, 2


@command
def main() -> None:
    config = command_line()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    check_attention(config)
    accumulation_steps(config, world_size)  # raises if the batch does not divide evenly
    device = pick_device(config.device)
    if world_size > 1 and device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with (
        best_effort_output(),
        process_group(rank, world_size, device, config.timeout) as report_progress,
    ):
        run = Path(config.out_dir)
        if config.resume == "auto":  # all ranks decide alike, even if not all see the same files
            resume = bool(all_reduce_max(int(checkpoint.exists(run)), device))
            config = config.replace(resume=resume, init_from="" if resume else config.init_from)
        if config.resume:
            checkpoint.require_resumable(run)  # before the lock creates a mistyped folder
        with contextlib.ExitStack() as lock:
            if rank == 0 and config.dry_run:
                check_writable(run)
            elif rank == 0:
                lock.enter_context(lock_folder(run, "training this run"))
            stopped = train(config, rank, world_size, device, report_progress)
    if stopped:
        sys.exit(EXIT_STOPPED)


def train(
    config: Config,
    rank: int,
    world_size: int,
    device: torch.device,
    report_progress: Callable[[str], None],
) -> bool:
    """Train until the last step or a signal; returns whether a signal stopped it."""
    run, is_main = Path(config.out_dir), rank == 0
    dtype = pick_dtype(config.dtype, device)
    accumulation = accumulation_steps(config, world_size)
    state = None
    if config.resume:
        state = checkpoint.load_to_resume(run, config, quiet=not is_main)
        preview.check_schedule(config, state.step, state.config, quiet=not is_main)
    elif is_main:
        checkpoint.require_unused_folder(run)

    # ---- data ----
    loader = open_loader(config, rank, world_size, device)
    if state is not None and state.tokens not in (0, loader.tokens):
        raise UserError(
            f"{loader.source} has {loader.tokens:,} training tokens, but the run was trained on "
            f"{state.tokens:,}: its batches would differ. Start a new run with --init_from="
            f"{config.out_dir}, or give the same data"
        )
    loader.validation_batches(config.val_tokens, config.batch_size)  # raises now for too few tokens
    val_windows = loader.validation_windows(config.val_tokens)
    val_batches = math.ceil(val_windows / (world_size * config.batch_size))  # of any one rank

    # ---- model ----
    torch.manual_seed(config.seed)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    model = GPT(config)
    began_with = load_initial(model, config.init_from) if config.init_from else None
    model.to(device)

    # ---- optimizers ----
    optimizers = build_optimizers(model, config)
    # small gradients underflow in float16: the loss is scaled up, the gradients back down
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run_id, step, best, resumed_at = checkpoint.new_run_id(), 0, math.inf, None
    if state is not None:
        checkpoint.restore(state, model, optimizers, scaler)
        run_id, step, best = state.run_id, state.step, state.best_val_loss
        resumed_at = step
        del state  # and with it the optimizer's tensors in host memory
    compiled: nn.Module = model
    if pick_compile(config.compile, device):
        compiled = compile_model(model)
    wrapped = compiled
    if world_size > 1:  # after the weights are final: DDP makes those of rank 0 everybody's
        ids = [device.index] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(compiled, device_ids=ids)

    # ---- what it will take ----
    preview.show(
        config, model, compiled, optimizers, loader, val_windows, device, dtype, world_size,
        resumed_at, quiet=not is_main,
    )  # fmt: skip
    if config.dry_run:
        return False

    # ---- logs and checkpoints ----
    if is_main:
        checkpoint.delete_stale(run)
        checkpoint.write_header(run, config)
        if began_with:  # never on resume: the file stays as it is
            write_json(run / "began_with.json", began_with.id)

    def batch_location(step: int) -> str:
        """Where the batch of a step (1-based) begins in the data."""
        return loader.batch_location(config.first_batch + step - 1)

    with (
        Stop(quiet=not is_main) as stop,
        Log(run, run_id, config, resumed_at, batch_location, quiet=not is_main) as log,
        checkpoint.Saver(run, config.keep_last, config.keep_every) as saver,
    ):
        peak, save_ms = peak_flops(device), None
        # a stop may have cut short the validation of the step that is resumed
        val_loss = log.resumed_val_loss
        validated = resumed_at if all_reduce_max(int(val_loss is not None), device) else None
        saved, best = resumed_at, min(best, math.inf if val_loss is None else val_loss)

        def watched(batches: Iterable[T], count: int, name: str) -> Iterator[T]:
            """The batches, with their progress; raises Stopped between two, on all ranks alike."""
            return log.progress(stop.between(batches, count, device), count, name)

        # ---- loop ----
        while True:
            last = step >= config.max_iters
            own = ABORT if saver.failed() else SAVE_AND_STOP if stop.received else CONTINUE
            request = all_reduce_max(own, device)
            if request == ABORT:
                saver.wait()  # raises the error, on the rank whose write failed
                sys.exit(EXIT_MISTAKE)
            validate = not request and (last or step % config.eval_interval == 0)
            if validate and step != validated:
                batches = loader.validation_batches(config.val_tokens, config.batch_size)
                batches = watched(batches, val_batches, f"validation of step {step}")
                try:
                    val_loss = mean_loss(model.eval(), batches, device, dtype)
                except Stopped:
                    continue  # with the request
                model.train()
                validated = step
                log.validation(step, val_loss)
                if val_loss < best:
                    best = val_loss
                    if is_main:
                        saver.save(checkpoint.best_weights(run_id, model, step, config, val_loss))
            save = last or request or step % config.checkpoint_interval == 0
            if save and step != saved:
                saved = step
                check_weights(model, config, step, batch_location)
                if is_main:
                    started = time.perf_counter()
                    log.sync()
                    saver.save(
                        checkpoint.training_state(
                            run_id, model, optimizers, scaler, step, config, best,
                            loader.tokens,
                        )
                    )  # fmt: skip
                    # what the loop waits for; the file is written while training continues
                    save_ms = 1000 * (time.perf_counter() - started)
                    log.print(
                        f"step {step}/{config.max_iters}: saving, the loop waited {save_ms:.0f} ms"
                    )
            if last or request:
                break

            started, lr = time.perf_counter(), learning_rate(step, config)
            report_progress(f"reading the batch of step {step + 1}")
            x, y = loader.batch(config.first_batch + step)
            report_progress(f"computing step {step + 1}")
            seed_randomness(config.seed, step, rank)
            pairs = zip(x.split(config.batch_size), y.split(config.batch_size), strict=True)
            try:
                loss, grad_norm = train_step(
                    lambda x, y: wrapped(x, y) / accumulation,
                    watched(pairs, accumulation, f"step {step + 1}"), accumulation,
                    wrapped, optimizers, scaler, lr, config.grad_clip, dtype,
                )  # fmt: skip
            except Stopped:
                continue  # with the request: the model and its optimizers are as before the step
            step += 1
            if not finite_step(loss, grad_norm, scaler):
                error = f"loss = {loss}, gradient norm = {grad_norm} is not finite"
                stop_diverged(config, step, error, batch_location(step))
            seconds = time.perf_counter() - started
            flops = config.total_batch_size * model.flops_per_token()
            log.step(
                step=step, loss=loss, lr=lr, grad_norm=grad_norm, seconds=seconds,
                tokens=config.total_batch_size,
                mfu=flops / (seconds * world_size * peak) if peak else None,
                memory_mb=memory_mb(device), save_ms=save_ms,
            )  # fmt: skip
            save_ms = None
        saver.wait()
        if not last or step != validated:
            log.print(f"stopped after step {step}, which is saved; continue with --resume")
            return True
        log.print(f"finished: step {step} of {config.max_iters} is saved")
        return False


def train_step(
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    micro_batches: Iterable[Batch],
    accumulation: int,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    lr: float,
    grad_clip: float,
    dtype: torch.dtype,
) -> tuple[float, float]:
    """Update the model once, by the gradient of the sum of `loss_fn(x, y)` over micro-batches.

    There are `accumulation` of them. Returns that sum, averaged over ranks, and the gradient norm
    before clipping (grad_clip = 0: no clipping). Both are the same on all ranks; if one is not
    finite, the weights do not change. Nothing does if the micro-batches end in an exception.
    """
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    for i, (x, y) in enumerate(micro_batches):
        # DDP decides in the forward pass whether this backward will synchronise gradients
        sync_context: contextlib.AbstractContextManager = contextlib.nullcontext()
        if isinstance(model, DistributedDataParallel) and i < accumulation - 1:
            sync_context = model.no_sync()
        with sync_context:
            with autocast(device, dtype):
                micro_loss = loss_fn(x, y)
            scaler.scale(micro_loss).backward()
        total += micro_loss.detach()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    ranks = 1
    if dist.is_initialized():
        dist.all_reduce(total, dist.ReduceOp.SUM)
        ranks = dist.get_world_size()
    loss, grad_norm = total.item() / ranks, norm.item()
    for optimizer in optimizers:
        if math.isfinite(loss) and math.isfinite(grad_norm):
            scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    return loss, grad_norm


if __name__ == "__main__":
    main()
