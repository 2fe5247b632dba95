"""Train a model: python train.py configs/lssar_p15.py, or the same under torchrun.

Read top to bottom: config -> data -> model -> optimizers -> loop. The loss curve depends on the
global batch and the seed, not on how often the run is stopped and resumed, nor on the number of
processes or micro-batches, unless a variant draws random numbers. docs/resuming.md lists the exit
codes.
"""

import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from config import LARGEST_BATCH, LEARNED, Config
from errors import UserError, command
from runtime.config_files import command_line

if __name__ == "__main__":
    CONFIG = command(command_line)()  # before the slow imports: help and mistakes show at once
    # Expandable segments reduce fragmentation of GPU memory. A user's own setting wins.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from attention_paths.varlen import documents_at_most
from data.loader import Loader
from data.shards import SIMULATED, Fingerprint, data_difference
from data.tasks import fingerprint_of, open_loader
from evaluation import mean_loss
from layers.build import build_model
from layers.heads import check_attention
from layers.selfcheck import check_kernels
from layers.windows import with_window
from model import GPT, compile_model
from optim import build_optimizers, build_scaler, learning_rate, set_learning_rate, step_if_finite
from runtime import checkpoint, metadata, resuming
from runtime.checkpoint import State, Training
from runtime.describe import describe
from runtime.device import (
    Event,
    autocast,
    keep_freed_memory,
    mfu_and_memory,
    open_device,
    pick_compile,
    pick_dtype,
)
from runtime.distributed import (
    EXIT_STOPPED,
    all_gather,
    all_reduce_max,
    process_group,
    raise_on_all_ranks,
    rank,
    stop_signals,
    world_size,
)
from runtime.files import check_writable, lock_folder
from runtime.log import Log, say, wandb_settings
from runtime.memory import fitting_batch_size
from runtime.pretrained import check_initial, load_initial

# GradScaler starts at 2^16 and halves the scale when float16 gradients overflow. If they overflow
# at this scale too, the run has diverged (min_loss_scale of fairseq).
SMALLEST_SCALE = 1e-4

# Settings that change how often ranks communicate, besides LEARNED.
SETTINGS_OF_COLLECTIVES = ("eval_interval", "checkpoint_interval", "dry_run")

LossFn = Callable[[Tensor, Tensor], Tensor]  # from inputs and targets to nats


@command
def main(config: Config) -> None:
    check_attention(config)
    if rank() == 0:
        wandb_settings(config)  # raises UserError before the run's folder is made
    run = Path(config.out_dir)
    device = open_device(config.device)
    if device.type == "cpu":
        keep_freed_memory()
    batch_size = fitting_batch_size(config, world_size(), device)
    lock: AbstractContextManager = nullcontext()
    if config.dry_run:  # takes no lock: it writes nothing, so the run may be training meanwhile
        check_writable(run)
    elif rank() == 0:
        lock = lock_folder(run, "training this run")
    with process_group(device, config.timeout, config.dry_run), ExitStack() as stack:
        raise_on_all_ranks(partial(stack.enter_context, lock))  # rank 0 alone has a lock
        batch_size = min(all_gather(batch_size))  # the ranks' GPUs may differ in memory
        if batch_size != config.batch_size and rank() == 0:
            sequences = config.total_batch_size // (world_size() * config.block_size)
            limit = f"is at most {config.batch_size or LARGEST_BATCH}"
            if not config.batch_size:
                limit += ", fits"
            reason = f"the largest that {limit} and divides the {sequences} sequences of a step"
            say(f"batch_size = {batch_size}: {reason} on each process")
        config = config.replace(batch_size=batch_size)
        if resuming.should_resume(run, config.resume):
            resuming.check_init_from(run, config.init_from)
            config = config.replace(resume=True, init_from="")
        else:
            check_initial(config.init_from)
            config = config.replace(resume=False)
        training, loader, loss_fn = set_up(config, device)
        stopped = False
        if loader is not None and not config.dry_run:
            fetch = partial(fetch_batch, loader, config)
            stopped = train(config, training, fetch, loss_fn, loader)
    if stopped:
        sys.exit(EXIT_STOPPED)


def set_up(config: Config, device: torch.device) -> tuple[Training, Loader | None, LossFn]:
    """Build the data, the model and the optimizers, and say what will be trained.

    The loader is None in a dry run if the data do not exist yet.
    """
    # ---- data ----
    loader = raise_on_all_ranks(partial(open_loader, config, rank(), world_size(), device))
    fingerprint = fingerprint_of(config) if loader else {}  # a dry run may have no data
    dtype = pick_dtype(config.dtype, device)
    # on all ranks, also if one has nothing to resume: check_agreement names the difference
    state = raise_on_all_ranks(lambda: resuming.load_to_resume(config) if config.resume else None)
    check_agreement(config, fingerprint, dtype, state)
    if loader is not None:
        check_data(loader, fingerprint, config, state)

    # ---- model ----
    torch.manual_seed(config.seed)
    model = build_model(config).to(device)
    facts = check_kernels(model, config, dtype, say=say if rank() == 0 else None)
    if config.init_from:
        facts["began_with"] = load_initial(model, config.init_from)

    # ---- optimizers ----
    optimizers = build_optimizers(model, config)
    scaler = build_scaler(device, dtype)
    training = Training(model, dtype, optimizers, scaler, data=fingerprint)
    if state is not None:
        training.restore(state, config)

    # after the weights are final: DDP copies rank 0's to all ranks
    loss_fn = compile_and_distribute(model, config, facts["attention_path"])
    if loader is not None and loader.documents and "varlen" in facts["attention_path"]:
        check_capacity(config, loader.documents.per_sequence)
    if rank() == 0:
        say(describe(config, training, loader))
        if loader is not None and not config.dry_run:
            metadata.write_run_metadata(config, facts | {"data": fingerprint}, training)
    return training, loader, loss_fn


def train(
    config: Config,
    training: Training,
    fetch: "Callable[[int], StepBatch]",
    loss_fn: LossFn,
    loader: Loader | None = None,
) -> bool:
    """Train until the last step or a signal; returns whether a signal stopped it.

    `fetch` returns this rank's share of a step. Without a loader there is neither validation nor
    MFU.
    """
    rank_flops_per_token = 0.0
    if loader is not None:
        rank_flops_per_token = training.model.flops_per_token() / world_size()
    with (
        stop_signals() as signals,
        closing(checkpoint.Saver(config, training.resumed_at)) as saver,
    ):
        log = Log(config, training.resumed_at, quiet=rank() > 0)
        monitor = Monitor(config, training, log, saver, rank_flops_per_token)
        while True:
            finished = training.step >= config.max_iters
            # The step that a run resumes at was saved (and, if due, validated) before. This is done
            # again only if a new max_iters has made it the last step.
            just_resumed = training.step == training.resumed_at
            became_last = finished and "max_iters" in training.changes
            is_new = not just_resumed or became_last
            validates = finished or training.step % config.eval_interval == 0
            if loader is not None and is_new and validates:
                monitor.validate(loader)
            stopped = all_reduce_max(len(signals)) > 0  # on the CPU: no wait for the GPU
            is_last = finished or stopped
            if is_new and (is_last or training.step % config.checkpoint_interval == 0):
                monitor.save()
            if is_last:
                break

            began = monitor.begin()
            batch = fetch(training.step)
            # for a variant that draws random numbers: a resumed run draws the same
            torch.manual_seed(hash((config.seed, training.step, rank())))
            lr = learning_rate(training.step, config)
            set_learning_rate(training.optimizers, lr)
            loss, grad_norm = train_step(training, loss_fn, batch, config.grad_clip)
            training.step += 1
            # copied before the next step is launched: a later copy would wait for that step
            on_host = torch.stack((loss, grad_norm)).to("cpu", non_blocking=monitor.logs_late)
            ended = Event(training.device)
            monitor.add(LaunchedStep(training.step, lr, batch.tokens, on_host, began, ended))
        raise_on_all_ranks(saver.wait)
        outcome = "finished" if finished else "stopped by a signal; continue with --resume"
        log.print(f"step {training.step} of {config.max_iters} is saved: {outcome}")
        log.finish()
    return not finished


# ---- before the loop ----


def check_agreement(
    config: Config,
    fingerprint: Fingerprint,
    dtype: torch.dtype,
    state: State | None,
) -> None:
    """Raise the same UserError on every rank if ranks would train or communicate differently."""
    settings = checkpoint.settings_of(config)
    facts = {}
    for key in (*LEARNED, *SETTINGS_OF_COLLECTIVES):
        if key != "data_dir":  # each node may have its own copy
            facts[key] = settings[key]
    facts["dtype"] = str(dtype).removeprefix("torch.")  # "auto" depends on the GPU
    # DDP would copy rank 0's weights over a difference
    facts["step of the checkpoint in out_dir"] = state.step if state else None
    (first_fingerprint, first), *others = all_gather((fingerprint, facts))
    for number, (other_fingerprint, other) in enumerate(others, start=1):
        differing = data_difference(first_fingerprint, other_fingerprint)
        if differing is not None:
            message = f"rank {number}'s {differing} differ from rank 0's: "
            if differing in SIMULATED:
                raise UserError(f"{message}every node needs the same code and numpy")
            raise UserError(f"{config.data_dir}: {message}copy the same data to every node")
        for key, value in first.items():
            if other[key] != value:
                remedy = "every rank needs the same settings and checkpoints"
                if key == "dtype" and config.dtype == "auto":
                    remedy = "give --dtype=float16, or GPUs of one kind"
                raise UserError(
                    f"{key} is {other[key]!r} on rank {number}, {value!r} on rank 0: {remedy}"
                )


def check_data(
    loader: Loader,
    fingerprint: Fingerprint,
    config: Config,
    state: State | None,
) -> None:
    """Raise UserError if the run was trained on other data, or there is too little to validate."""
    if state is not None:
        changed = data_difference(state.data, fingerprint)
        if changed is not None:
            raise UserError(
                f"{loader.source}: its {changed} differ from the data that the run was trained on: "
                "use the same data, or start a new run"
            )
    loader.validation_batches(config.val_tokens, config.batch_size)  # raises if it is too small


def check_capacity(config: Config, documents_per_sequence: float) -> None:
    """Raise UserError if micro-batches have more documents, on average, than varlen_attn takes."""
    capacity = documents_at_most(config.batch_size, config.block_size)
    mean = documents_per_sequence * config.batch_size
    if mean > capacity:
        raise UserError(
            f"document_mask: a micro-batch has {mean:.0f} documents on average, and varlen_attn "
            f"takes at most {capacity}: --attention_impl=triton takes any number"
        )


def compile_and_distribute(model: GPT, config: Config, attention_path: str) -> LossFn:
    """Return the model as a loss function: compiled if the settings ask, in DDP under torchrun."""
    # The blocked path, and SDPA with a mask, loop over blocks of queries: torch.compile would
    # unroll the loop, and make a graph for each length of a batch.
    is_masked = config.document_mask or any(module.window for module in with_window(model))
    in_blocks = "blocked" in attention_path or (is_masked and attention_path == "sdpa")
    many_graphs = config.varied_lengths and in_blocks
    if pick_compile(config.compile, next(model.parameters()).device, many_graphs):
        compile_model(model)
    if not dist.is_initialized():
        return model
    ddp = DDP(model, gradient_as_bucket_view=True)
    # the only buffers are RoPE's tables, equal on all ranks; the argument of DDP() is deprecated
    ddp.broadcast_buffers = False
    return ddp


# ---- one step ----


class StepBatch(NamedTuple):
    """A rank's share of a step, whose loss is the sum of the micro-batches' losses / divisor."""

    micro_batches: Sequence[tuple[Tensor, Tensor]]
    divisor: int  # the number of micro-batches, if each loss is a mean
    tokens: int  # processed in the step by all ranks together


def fetch_batch(loader: Loader, config: Config, step: int) -> StepBatch:
    """Fetch this rank's share of a step, and split it into micro-batches of equal size."""
    x, y = loader.batch(config.first_batch + step)
    pairs = list(zip(x.split(config.batch_size), y.split(config.batch_size), strict=True))
    tokens = world_size() * len(x) * x.shape[1]
    return StepBatch(pairs, divisor=len(pairs), tokens=tokens)


def train_step(
    training: Training,
    loss_fn: LossFn,
    batch: StepBatch,
    grad_clip: float,
) -> tuple[Tensor, Tensor]:
    """Update the model once, by the gradient of the batch's loss.

    Returns the loss, averaged over ranks, and the gradient norm before clipping (grad_clip = 0: no
    clipping), on the device. Both are the same on all ranks. If the loss or the norm is not finite,
    in float16 the update is skipped, and the loss scale falls if gradients overflowed; in other
    dtypes the update is applied. `may_continue` tells Monitor whether to end the run, which it does
    before these weights are saved.
    """
    scaler = training.scaler
    loss = torch.zeros((), device=training.device)
    for i, (x, y) in enumerate(batch.micro_batches, start=1):
        gradient_sync: AbstractContextManager = nullcontext()
        if isinstance(loss_fn, DDP) and i < len(batch.micro_batches):
            gradient_sync = loss_fn.no_sync()  # around the forward pass too, where DDP decides it
        with gradient_sync:
            with autocast(training.device, training.dtype):
                micro_loss = loss_fn(x, y) / batch.divisor
            scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()
    for optimizer in training.optimizers:
        scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(training.model.parameters(), grad_clip or math.inf)
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= world_size()
    for optimizer in training.optimizers:
        if scaler.is_enabled():
            is_bad = ~(loss.isfinite() & norm.isfinite())
            step_if_finite(optimizer, is_bad.float())
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    scaler.update()
    return loss, norm


def may_continue(loss: float, grad_norm: float, scaler: torch.amp.GradScaler) -> bool:
    """Tell whether a run may go on: the loss must be finite, and so must the gradient norm.

    In float16 the norm may be infinite or nan as long as the loss scale can still fall.
    """
    if not math.isfinite(loss):
        return False
    if math.isfinite(grad_norm):  # checked first: get_scale makes the host wait for the device
        return True
    return scaler.is_enabled() and scaler.get_scale() > SMALLEST_SCALE


# ---- between steps ----


class LaunchedStep(NamedTuple):
    """A launched step, not yet logged."""

    step: int
    lr: float
    tokens: int  # processed by all ranks together
    loss_and_norm: Tensor  # on the host, once the device has reached `ended`
    began: Event
    ended: Event


@dataclass
class Monitor:
    """Logs every step, validates, saves, and ends a run that has diverged.

    On CUDA a step is logged once the next one has been launched, so that the GPU never waits for
    the host. `validate` and `save` first log the pending step, and so a diverged step is neither
    validated nor saved.
    """

    config: Config
    training: Training
    log: Log
    saver: checkpoint.Saver
    rank_flops_per_token: float  # 0: unknown
    pending: LaunchedStep | None = None  # not yet logged

    @property
    def logs_late(self) -> bool:
        return self.training.device.type == "cuda"

    def begin(self) -> Event:
        """Return the event at which the next step begins: the pending step's end, or now."""
        return self.pending.ended if self.pending else Event(self.training.device)

    def add(self, launched: LaunchedStep) -> None:
        """Log the pending step and, unless that would keep a GPU waiting, the new one."""
        self.log_pending()
        self.pending = launched
        if not self.logs_late:
            self.log_pending()

    def log_pending(self) -> None:
        """Wait for the pending step, if there is one, and log it. Ends a run that diverged."""
        if self.pending is None:
            return
        step, lr, tokens, loss_and_norm, began, ended = self.pending
        self.pending = None
        seconds = ended.seconds_since(began)  # waits for the device
        loss, grad_norm = loss_and_norm.tolist()  # they are on the host now
        if not may_continue(loss, grad_norm, self.training.scaler):
            error = f"loss = {loss} or gradient norm = {grad_norm} is not finite"
            self.end_diverged(step, error, weights_are_bad=False)
        self.log.step(
            step,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            ms=1000 * seconds,
            tokens_per_s=tokens / seconds,
            **mfu_and_memory(self.training.device, self.rank_flops_per_token * tokens / seconds),
        )

    def validate(self, loader: Loader) -> None:
        """Log the validation loss, and save the weights if it is the lowest so far."""
        self.log_pending()
        config = self.config
        training = self.training
        sequences = loader.validation_sequences(config.val_tokens)
        batches_of_rank = math.ceil(sequences / (world_size() * config.batch_size))
        batches = self.log.progress(
            loader.validation_batches(config.val_tokens, config.batch_size),
            f"validation of step {training.step}",
            batches_of_rank,
        )
        training.model.eval()
        val_loss = mean_loss(training.model, batches, training.dtype)
        training.model.train()
        self.log.validation(training.step, val_loss)
        if val_loss < training.best_val_loss:
            training.best_val_loss = val_loss
            self.save_state("best", training.state(config, best=True))

    def save(self) -> None:
        """Save a checkpoint. Ends the run if weights are not finite."""
        self.log_pending()
        step = self.training.step
        if not all(p.isfinite().all() for p in self.training.model.parameters()):
            if step == 0:
                source = self.config.init_from
                raise UserError(f"initial weights are not finite: init_from = {source!r}")
            self.end_diverged(step, "its update left non-finite weights", weights_are_bad=True)
        self.log.sync()
        self.save_state("step", self.training.state(self.config))
        if step == 0:  # so any run with a step can be resumed; a full disk shows at once
            raise_on_all_ranks(self.saver.wait)

    def save_state(self, kind: str, state: State) -> None:
        """Save a state as Saver.save does; if rank 0 cannot, all ranks raise UserError.

        Otherwise the others would begin a step, whose collectives never end without rank 0.
        """
        raise_on_all_ranks(partial(self.saver.save, kind, state))

    def end_diverged(self, step: int, error: str, weights_are_bad: bool) -> NoReturn:
        """End the run without saving, so that the newest checkpoint is a good one.

        `weights_are_bad` tells whether this step's update made weights that are not finite;
        otherwise its loss or gradients were not, from the weights before it.
        """
        try:
            self.saver.wait()  # the newest checkpoint may still be on its way to the disk
        except UserError as error_of_write:
            print(f"warning: a checkpoint is missing: {error_of_write}", file=sys.stderr)
        if rank() == 0:  # every rank gets here, and ends
            if weights_are_bad or step > 1:
                advice = how_to_continue(self.config, step, self.saver.newest_step)
            else:
                advice = (
                    "This was before the first update, so a lower learning rate cannot help: check "
                    "the initial weights and the attention's formulas"
                )
            print(f"error: step {step}: {error}. {advice}", file=sys.stderr, flush=True)
        all_reduce_max(0)  # until rank 0 has printed: torchrun kills all ranks once one has ended
        sys.exit(1)


def how_to_continue(config: Config, step: int, saved: int) -> str:
    """Name the settings that continue a run which has diverged in this step.

    `saved` is the step of its newest intact checkpoint.
    """
    next_batch = config.first_batch + step - saved
    rate = float(f"{config.learning_rate / 2:g}")  # as the command has it
    min_lr = f" --min_lr={rate:g}" if config.min_lr > rate else ""
    return (
        f"The checkpoint of step {saved} is good: to continue at half the rate, repeat the command "
        f"with --resume --out_dir={shlex.quote(config.out_dir)} "
        f"--learning_rate={rate:g}{min_lr} at its end; --first_batch={next_batch} "
        "skips the batches up to this step"
    )


if __name__ == "__main__":
    main(CONFIG)
