"""Train a model: python train.py configs/lssar_p15.py, or the same under torchrun.

Read top to bottom: config -> data -> model -> optimizers -> loop. The loss curve depends on the
global batch and the seed, not on the number of processes or micro-batches, nor on how often the run
is stopped and resumed. runtime/distributed.py lists the exit codes.
"""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from config import Config, accumulation_steps, help_text, load_config
from data.loader import TrainLoader, validation_batches
from data.shards import check_shards, check_tokenizer, list_shards
from errors import EXIT_MISTAKE, command
from evaluation import mean_loss
from model import GPT
from optim import build_optimizers, learning_rate
from runtime import checkpoint
from runtime.device import autocast, memory_mb, peak_flops, pick_compile, pick_device, pick_dtype
from runtime.distributed import (
    EXIT_FAILED,
    EXIT_STOPPED,
    Stop,
    all_reduce_max,
    job,
    process_group,
    restarted,
)
from runtime.files import lock_folder, write_json
from runtime.log import Log, best_effort_output

# Each rank's request before a step; the largest applies to all ranks.
CONTINUE, SAVE_AND_STOP, ABORT = 0, 1, 2
# With on_nonfinite = "skip": so many steps in a row are no accident, the run has diverged.
MOST_SKIPPED = 100


@command
def main() -> None:
    if "--help" in sys.argv or "-h" in sys.argv:
        print(help_text())
        return
    config = load_config(sys.argv[1:])
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
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
        if all_reduce_max(int(restarted()), device):
            # all ranks decide alike, even if not all see the same files
            can_resume = checkpoint.exists(run) and checkpoint.made_by(run, job())
            if all_reduce_max(int(can_resume), device):
                config = config.replace(resume=True, init_from="")
        lock = lock_folder(run, "training this run") if rank == 0 else contextlib.nullcontext()
        with lock:
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
    elif is_main:
        checkpoint.require_unused_folder(run)

    # ---- data ----
    check_tokenizer(config.data_dir, config.tokenizer)
    shards = list_shards(config.data_dir, "train") + list_shards(config.data_dir, "val")
    check_shards(shards[rank::world_size], config.n_vocab)
    sequences = config.total_batch_size // config.block_size
    loader = TrainLoader(
        config.data_dir, config.block_size, sequences, config.seed, rank, world_size, device
    )

    def validation() -> Iterator[tuple[Tensor, Tensor]]:
        return validation_batches(
            config.data_dir, config.block_size, config.val_tokens, config.batch_size,
            rank, world_size, device,
        )  # fmt: skip

    validation()  # raises for too few tokens now, not after the first steps

    # ---- model ----
    torch.manual_seed(config.seed)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    model = GPT(config)
    if config.init_from:
        checkpoint.load_weights(model, config.init_from)
    model.to(device)

    # ---- optimizers ----
    optimizers = build_optimizers(model, config)
    # small gradients underflow in float16: the loss is scaled up, the gradients back down
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run_id, step, best, skipped, resumed_at = checkpoint.new_run_id(), 0, math.inf, 0, None
    if state is not None:
        checkpoint.restore(state, model, optimizers, scaler)
        run_id, step, best, skipped = state.run_id, state.step, state.best_val_loss, state.skipped
        resumed_at = step
        del state  # and with it the optimizer's tensors in host memory
    wrapped: nn.Module = model
    if pick_compile(config.compile, device):
        wrapped = cast(nn.Module, torch.compile(model))  # of a module it makes a module
    if world_size > 1:  # after the weights are final: DDP makes those of rank 0 everybody's
        ids = [device.index] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(wrapped, device_ids=ids)

    # ---- logs and checkpoints ----
    if is_main:
        checkpoint.delete_stale(run)
        checkpoint.write_header(run, config, job())
        if config.init_from:  # never set on resume: the file stays as it is
            write_json(run / "began_with.json", checkpoint.checkpoint_id(config.init_from))

    def batch_location(step: int) -> str:
        """Where the batch of a step (1-based) begins in the shards."""
        path, offset = loader.batch_location(config.first_batch + step - 1)[0]
        return f"in {path} at token {offset}"

    with (
        Stop(quiet=not is_main) as stop,
        Log(run, run_id, config, resumed_at, batch_location, quiet=not is_main) as log,
        checkpoint.Saver(run, config.keep_last, config.keep_every) as saver,
    ):
        log.print(
            f"{config.variant_name}: {model.count_parameters():,} parameters, "
            f"{loader.tokens:,} training tokens in {config.data_dir}, {loader.n_windows:,} "
            f"windows; {world_size} x {accumulation} x {config.batch_size} x {config.block_size} "
            f"tokens a step on {device.type} in {str(dtype).removeprefix('torch.')}; run folder "
            f"{run}" + ("" if resumed_at is None else f", from step {step} of {config.max_iters}")
        )
        peak, save_ms, skipped_in_a_row = peak_flops(device), None, 0

        # ---- loop ----
        while True:
            last = step >= config.max_iters
            new = step != resumed_at  # a resumed step was validated and saved before
            own = ABORT if saver.failed() else SAVE_AND_STOP if stop.received else CONTINUE
            request = all_reduce_max(own, device)
            if request == ABORT:
                saver.wait()  # raises the error, on the rank whose write failed
                sys.exit(EXIT_MISTAKE)
            if new and (last or step % config.eval_interval == 0):
                val_loss = mean_loss(model.eval(), validation(), device, dtype)
                model.train()
                log.validation(step, val_loss)
                if val_loss < best:
                    best = val_loss
                    if is_main:
                        saver.save(checkpoint.best_weights(run_id, model, step, config, val_loss))
            if new and (last or request or step % config.checkpoint_interval == 0):
                check_weights(model, config, step, batch_location)
                if is_main:
                    started = time.perf_counter()
                    log.sync()
                    saver.save(
                        checkpoint.training_state(
                            run_id, model, optimizers, scaler, step, config, best, skipped
                        )
                    )
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
            loss, grad_norm = train_step(
                lambda x, y: wrapped(x, y) / accumulation,
                list(zip(x.split(config.batch_size), y.split(config.batch_size), strict=True)),
                wrapped, optimizers, scaler, lr, config.grad_clip, dtype,
            )  # fmt: skip
            step += 1
            # with float16 a gradient that overflows only skips the step: the scale is lowered
            overflow = scaler.is_enabled() and math.isfinite(loss)
            if (math.isfinite(loss) and math.isfinite(grad_norm)) or overflow:
                skipped_in_a_row = 0
            else:
                error = f"loss = {loss}, gradient norm = {grad_norm} is not finite"
                skipped, skipped_in_a_row = skipped + 1, skipped_in_a_row + 1
                if config.on_nonfinite == "stop" or skipped_in_a_row == MOST_SKIPPED:
                    stop_diverged(config, step, error, batch_location(step))
                log.print(f"step {step}: {error}: skipped; the batch begins {batch_location(step)}")
            seconds = time.perf_counter() - started
            flops = config.total_batch_size * model.flops_per_token()
            log.step(
                step=step, loss=loss, lr=lr, grad_norm=grad_norm, seconds=seconds,
                tokens=config.total_batch_size,
                mfu=flops / (seconds * world_size * peak) if peak else None,
                memory_mb=memory_mb(device), skipped=skipped or None, save_ms=save_ms,
            )  # fmt: skip
            save_ms = None
        saver.wait()
        if request and not last:
            log.print(f"stopped after step {step}, which is saved; continue with --resume")
        return bool(request) and not last


def train_step(
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    lr: float,
    grad_clip: float,
    dtype: torch.dtype,
) -> tuple[float, float]:
    """Update the model once, by the gradient of the sum of `loss_fn(x, y)` over micro-batches.

    Returns that sum, averaged over ranks, and the gradient norm before clipping (grad_clip = 0: no
    clipping). Both are the same on all ranks; if one is not finite, the weights do not change.
    """
    device = micro_batches[0][0].device
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
    total = torch.zeros((), device=device)
    for i, (x, y) in enumerate(micro_batches):
        # DDP decides in the forward pass whether this backward will synchronise gradients
        sync_context: contextlib.AbstractContextManager = contextlib.nullcontext()
        if isinstance(model, DistributedDataParallel) and i < len(micro_batches) - 1:
            sync_context = model.no_sync()
        with sync_context:
            with autocast(device, dtype):
                micro_loss = loss_fn(x, y)
            scaler.scale(micro_loss).backward()
        total += micro_loss.detach()
    for optimizer in optimizers:
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


def seed_randomness(seed: int, step: int, rank: int) -> None:
    """Seed torch from (seed, step, rank), for any variant that draws random numbers.

    A resumed run then draws the same ones, without generator state in the checkpoint.
    """
    state = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))


def check_weights(
    model: nn.Module, config: Config, step: int, batch_location: Callable[[int], str]
) -> None:
    """End the run if the update of a step, counted from 1, has left weights that are not finite."""
    if step and not all(p.isfinite().all() for p in model.parameters()):
        stop_diverged(config, step, "its update left non-finite weights", batch_location(step))


def stop_diverged(config: Config, step: int, error: str, location: str) -> None:
    """End the run without saving, so that the newest checkpoint is a good one."""
    print(
        f"error: step {step}: {error}; the batch begins {location}. The run's last checkpoint in "
        f"{config.out_dir} is good. Try a lower learning_rate (now "
        f"{learning_rate(step - 1, config):.2e}), a longer warmup_iters, a lower grad_clip, "
        "dtype = float32 or on_nonfinite = skip.",
        file=sys.stderr,
        flush=True,
    )
    sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
