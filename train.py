"""Train a model: python train.py configs/lssar_p15.py, or the same under torchrun.

Read top to bottom: config -> data -> model -> optimizers -> loop. The loss curve depends on the
settings of the global batch and the seed, not on the number of processes or micro-batches, nor on
how often the run is stopped and resumed. runtime/distributed.py lists the exit codes.
"""

import contextlib
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from config import MAY_CHANGE_ON_RESUME, Config, accumulation_steps, help_text, load_config
from data.loader import TrainLoader, validation_batches
from data.shards import check_shards, list_shards, read_meta
from errors import UserError, command
from evaluation import mean_loss
from model import GPT
from optim import build_optimizers, learning_rate
from runtime import checkpoint
from runtime.device import autocast, memory_mb, peak_flops, pick_compile, pick_device, pick_dtype
from runtime.distributed import EXIT_STOPPED, Stop, all_reduce_max, job, process_group, restarted
from runtime.files import check_writable, lock_folder, write_json
from runtime.log import Log


@command
def main() -> None:
    if "--help" in sys.argv or "-h" in sys.argv:
        print(help_text())
        return
    config = load_config(sys.argv[1:])
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    accumulation_steps(config, world_size)  # refuses a batch that does not divide
    device = pick_device(config.device)
    if world_size > 1 and device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(process_group(rank, world_size, device, config.timeout))
        if all_reduce_max(int(restarted()), device):
            mine = checkpoint.exists(config.out_dir) and checkpoint.made_by(config.out_dir, job())
            if all_reduce_max(int(mine), device):
                config = config.replace(resume=True, init_from="")
        stopped = train(config, rank, world_size, device, watchdog, stack)
    if stopped:
        sys.exit(EXIT_STOPPED)


def train(config: Config, rank: int, world_size: int, device, watchdog, stack) -> bool:
    """Train until the last step or a signal, and say whether it was a signal.

    What has to be closed in the end, whatever that is, is left to the caller's `stack`.
    """
    dtype = pick_dtype(config.dtype, device)
    micro_batches = accumulation_steps(config, world_size)
    run, first = Path(config.out_dir), rank == 0
    if first:
        check_writable(run)
    state = resumed_state(run, config, quiet=not first) if config.resume else None
    if state is None and first:
        checkpoint.require_unused_folder(run, job())

    # ---- data ----
    sequences = config.total_batch_size // config.block_size
    meta = read_meta(config.data_dir)
    if meta is not None and meta.get("tokenizer") != config.tokenizer:
        raise UserError(
            f"{config.data_dir} was made with tokenizer {meta.get('tokenizer')!r}, "
            f"but tokenizer = {config.tokenizer!r}"
        )
    shards = list_shards(config.data_dir, "train") + list_shards(config.data_dir, "val")
    check_shards(shards[rank::world_size], config.n_vocab)
    loader = TrainLoader(
        config.data_dir, config.block_size, sequences, config.seed, rank, world_size, device
    )

    def validation():
        return validation_batches(
            config.data_dir, config.block_size, config.val_tokens, config.batch_size,
            rank, world_size, device,
        )  # fmt: skip

    validation()  # refuses too few tokens now, not after the first steps

    # ---- model ----
    torch.manual_seed(config.seed)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    model = GPT(config)
    if config.init_from:
        checkpoint.load_weights(model, config.init_from)
    model.to(device)
    if state is not None:
        model.load_state_dict(state["model"])
    trained = torch.compile(model) if pick_compile(config.compile, device) else model
    if world_size > 1:
        ids = [device.index] if device.type == "cuda" else None
        trained = DistributedDataParallel(trained, device_ids=ids)

    # ---- optimizers ----
    optimizers = build_optimizers(model, config)
    # float16 has no room for small gradients: the loss is scaled up, the gradients back down
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    step, best, skipped, resumed_at = 0, math.inf, 0, None
    if state is not None:
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        scaler.load_state_dict(state["scaler"])
        step, best, skipped = state["step"], state["best_val_loss"], state["skipped"]
        resumed_at = step
        del state

    # ---- signals, logs, checkpoints ----
    stop = stack.enter_context(Stop(quiet=not first))
    if first:
        stack.enter_context(lock_folder(run, "training this run"))
        checkpoint.delete_stale(run)
        checkpoint.write_header(run, config, job())
        if config.init_from:  # a resumed run has none: it keeps what it began with
            write_json(run / "began_with.json", checkpoint.checkpoint_id(config.init_from))

    def batch_location(step: int) -> str:
        """Where the batch of a step, counted from 1, begins."""
        path, offset = loader.batch_location(step - 1)[0]
        return f"in {path} at token {offset}"

    log = stack.enter_context(Log(run, config, resumed_at, batch_location, quiet=not first))
    saver = stack.enter_context(checkpoint.Saver(run, config.keep_last, config.keep_every))
    log.say(
        f"{config.variant_name}: {model.count_parameters():,} parameters, "
        f"{loader.tokens:,} training tokens in {config.data_dir}, {loader.n_windows:,} windows; "
        f"{world_size} x {micro_batches} x {config.batch_size} x {config.block_size} tokens a step "
        f"on {device.type} in {str(dtype).removeprefix('torch.')}; run folder {run}"
        + (f", from step {step} of {config.max_iters}" if resumed_at is not None else "")
    )
    peak = peak_flops(device)

    def save(kind: str, **more) -> None:
        weights = {"model": model.state_dict(), "step": step, "config": config.as_dict()}
        saver.save(kind, weights | more)

    def save_all() -> float:
        """Milliseconds that the checkpoint takes from the training; it is written beside it."""
        started = time.perf_counter()
        log.sync()
        save(
            "step",
            optimizers=[optimizer.state_dict() for optimizer in optimizers],
            scaler=scaler.state_dict(),
            best_val_loss=best,
            skipped=skipped,
        )
        return 1000 * (time.perf_counter() - started)

    # ---- loop ----
    report_progress = watchdog.report_progress if watchdog else lambda doing: None
    seconds_a_step, save_ms = 0.0, None
    while True:
        last = step >= config.max_iters
        resumed = step == resumed_at  # validated and saved before
        # what one process has heard or failed to write, all act on
        halt = all_reduce_max(2 if saver.failed() else 1 if stop.asked else 0, device)
        if halt == 2:
            saver.wait()  # raises the error
            sys.exit(2)
        if (step % config.eval_interval == 0 or last) and not resumed:
            val_loss = mean_loss(model.eval(), validation(), device, dtype)
            model.train()
            log.validation(step, val_loss)
            if val_loss < best:
                best = val_loss
                if first:
                    save("best", val_loss=val_loss)
        if (last or halt or step % config.checkpoint_interval == 0) and not resumed:
            if step and not all(p.isfinite().all() for p in model.parameters()):
                stop_diverged(
                    config, step, "its update left weights that are not finite", batch_location
                )
            if first:
                save_ms = save_all()
                log.say(f"step {step}/{config.max_iters}: saving, {save_ms:.0f} ms of the loop")
        if last or halt:
            break

        started = time.perf_counter()
        lr = learning_rate(step, config)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        report_progress(f"reading the batch of step {step + 1}")
        x, y = loader.batch(step)
        report_progress(f"computing step {step + 1}")
        seed_randomness(config.seed, step, rank)
        loss = torch.zeros((), device=device)
        micro = zip(x.split(config.batch_size), y.split(config.batch_size), strict=True)
        for i, (xs, ys) in enumerate(micro):
            # DDP decides in the forward pass whether this backward will synchronise gradients
            final = i == micro_batches - 1
            sync_context = (
                trained.no_sync() if world_size > 1 and not final else contextlib.nullcontext()
            )
            with sync_context:
                with autocast(device, dtype):
                    micro_loss = trained(xs, ys) / micro_batches
                scaler.scale(micro_loss).backward()
            loss += micro_loss.detach()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        clip = config.grad_clip if config.grad_clip > 0 else math.inf
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item()
        if world_size > 1:
            dist.all_reduce(loss, dist.ReduceOp.SUM)
        loss = loss.item() / world_size
        # both numbers are those of all processes, so all do the same
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        # with float16 a gradient that overflows only costs the step: the scaler lowers its scale
        if not finite and not (scaler.is_enabled() and math.isfinite(loss)):
            what = f"loss = {loss}, gradient norm = {grad_norm} is not finite"
            if config.on_nonfinite == "stop":
                stop_diverged(config, step + 1, what, batch_location)
            skipped += 1
            log.say(
                f"step {step + 1}: {what}: skipped; the batch begins {batch_location(step + 1)}"
            )
        for optimizer in optimizers:
            if finite:
                scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        scaler.update()
        step += 1

        seconds = time.perf_counter() - started
        # the first step compiles and allocates: it says nothing about the rest
        if step <= (resumed_at or 0) + 2:
            seconds_a_step = seconds
        seconds_a_step += 0.1 * (seconds - seconds_a_step)
        tokens_per_s = config.total_batch_size / seconds
        log.step(
            step=step,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            ms=1000 * seconds,
            tokens_per_s=tokens_per_s,
            mfu=tokens_per_s * model.flops_per_token() / (world_size * peak) if peak else None,
            memory_mb=memory_mb(device),
            skipped=skipped or None,
            save_ms=save_ms,
            left_s=seconds_a_step * (config.max_iters - step),
        )
        save_ms = None
    saver.wait()
    if halt and not last:
        log.say(f"stopped after step {step}, which is saved; --resume goes on from it")
        return True
    return False


def resumed_state(run: Path, config: Config, quiet: bool) -> dict:
    """The latest checkpoint of a run that this config continues."""
    state = checkpoint.load(checkpoint.find(run, quiet=quiet))
    for key, saved in state["config"].items():
        if key not in MAY_CHANGE_ON_RESUME and getattr(config, key, None) != saved:
            raise UserError(
                f"{run} was trained with {key} = {saved!r}, so it cannot be resumed with "
                f"{getattr(config, key)!r}; give the settings that it began with (its config.json "
                f"has them), or start a new run from its weights: --init_from={run}"
            )
    if state["step"] > config.max_iters:
        raise UserError(f"{run} has {state['step']} steps, max_iters = {config.max_iters} is less")
    return state


def seed_randomness(seed: int, step: int, rank: int) -> None:
    """Make what is random in a step, should a variant be, a function of (seed, step, process).

    So it is the same after a resume, as the batches are, and there is no state of it to save.
    """
    state = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))


def stop_diverged(config: Config, step: int, what: str, batch_location) -> None:
    """End the run without a save, so that the newest checkpoint is a good one."""
    print(
        f"error: step {step}: {what}; the batch begins {batch_location(step)}. The run's last "
        f"checkpoint in {config.out_dir} is good. Try a lower learning_rate (now "
        f"{learning_rate(step - 1, config):.2e}), a longer warmup_iters, a lower grad_clip, "
        "dtype = float32 or on_nonfinite = skip.",
        file=sys.stderr,
        flush=True,
    )
    sys.exit(1)


if __name__ == "__main__":
    main()
