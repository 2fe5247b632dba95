"""A run's checkpoints, written and read back.

step_000200.pt     everything needed to resume, after 200 steps
best.pt            the weights with the lowest validation loss

A checkpoint is written to a temporary file, which is synced and then renamed, so a step_*.pt is
never incomplete. Older checkpoints are deleted only after the rename. Each file is a zip archive,
whose checksums reveal damage by the disk.
"""

import functools
import io
import math
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from config import RECORDED_ON_RESUME, Config
from data.shards import Fingerprint
from errors import UserError, first_line
from model import GPT
from runtime.config_files import Settings
from runtime.distributed import rank
from runtime.files import atomic_write, convert, sha256_of
from runtime.run_folder import (
    checkpoints,
    is_checkpoint,
    no_checkpoint,
    read_checkpoint,
    step_of,
)

# Learnable scalars of attention, which another variant may not have.
SCALARS = ("s", "b", "p_n", "sink")
# Settings that must agree to load weights, though they change no name or shape.
NOT_IN_SHAPES = (
    "projections",
    "q_rank",
    "kv_rank",
    "n_head",
    "norm",
    "mlp",
    "tie_embeddings",
    "tokenizer",
)


class State(msgspec.Struct, kw_only=True):
    """The content of a checkpoint; best.pt has no optimizers and no scaler."""

    model: dict[str, torch.Tensor]
    step: Annotated[int, msgspec.Meta(ge=0)]
    config: Settings
    best_val_loss: float = math.inf
    data: Fingerprint = {}  # empty: not recorded
    optimizers: list[dict[str, Any]] = []
    scaler: dict[str, int | float] = {}


@dataclass
class Training:
    """A model in training: what its checkpoints save and restore."""

    model: GPT
    dtype: torch.dtype  # of matrix products: see runtime.device.autocast
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    step: int = 0  # the updates done
    best_val_loss: float = math.inf
    data: Fingerprint = field(default_factory=dict)  # what identifies the data
    resumed_at: int | None = None
    # settings of the schedule and of the data that a resumed run changes: values before and now
    changes: dict[str, tuple] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def state(self, config: Config, best: bool = False) -> State:
        """Return the full training state; with `best`, the weights and what describes them."""
        state = State(
            model=self.model.state_dict(),
            step=self.step,
            config=settings_of(config),
            best_val_loss=self.best_val_loss,
            data=self.data,
        )
        if not best:
            state.optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
            state.scaler = self.scaler.state_dict()
        return state

    def restore(self, state: State, config: Config) -> None:
        """Copy a state into the model, its optimizers and the loss scaler, to train with a config.

        Raises UserError if it does not fit them.
        """
        try:
            self.model.load_state_dict(state.model)
            for optimizer, saved in zip(self.optimizers, state.optimizers, strict=True):
                groups = optimizer.param_groups
                optimizer.load_state_dict(saved)
                optimizer.param_groups = groups  # with the options of this run, such as `fused`
            if state.scaler:  # empty in a run that did not scale its loss: it may go on in float16
                self.scaler.load_state_dict(state.scaler)
        # weights of another model.py, a renamed best.pt, or a state that no torch optimizer wrote
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            raise UserError(
                f"the checkpoint of step {state.step} does not fit this run: {lines[-1].strip()}"
            ) from error
        self.step = state.step
        self.resumed_at = state.step
        self.best_val_loss = state.best_val_loss
        self.changes = changes_since(state, config)


# ---- writing ----


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings as a checkpoint holds them, wherever the tokenizer's file lies."""
    return config.as_dict() | {"tokenizer": config.tokenizer_id}


class Saver:
    """Writes a run's checkpoints in a background thread, one after another.

    Of the step_*.pt in the run's folder, the newest `keep_last` are kept, and every one at a
    multiple of `keep_every` steps (0: none). Files later than the step that the run was resumed at
    are damaged: they are deleted once a checkpoint is saved. Only rank 0 writes.
    """

    def __init__(self, config: Config, resumed_at: int | None):
        self.run = Path(config.out_dir)
        self.config = config
        last_intact = resumed_at or 0
        self.intact = [path for path in checkpoints(self.run) if step_of(path) <= last_intact]
        self.thread = ThreadPoolExecutor(1)
        self.pending = self.thread.submit(lambda: None)
        self.has_failed = False  # a write, since a step_*.pt was written

    @property
    def newest_step(self) -> int:
        """The step of the newest intact checkpoint."""
        return step_of(self.intact[0])

    def save(self, kind: str, state: State) -> None:
        """Copy the state to host memory, then write it in the background, as a "step" or "best".

        First waits for the previous checkpoint. Where writing it failed, as on a disk that is full
        for a while, a warning says so; raises UserError if another has failed since the last
        step_*.pt was written: best.pt, which is smaller, may fit where they do not.
        """
        if rank() > 0:
            return
        try:
            self.wait()
        except UserError as error:
            if self.has_failed:
                raise
            self.has_failed = True
            print(f"warning: a checkpoint is missing: {error}", file=sys.stderr)
        content = io.BytesIO()
        torch.save(msgspec.structs.asdict(state), content)
        name = "best.pt" if kind == "best" else f"step_{state.step:06d}.pt"
        self.pending = self.thread.submit(self._write, self.run / name, content)

    def wait(self) -> None:
        """Wait until everything is on disk. Raises UserError if a write failed."""
        self.pending.result()

    def close(self) -> None:
        """Finish a write in progress, whether or not it fails."""
        self.thread.shutdown()

    def _write(self, path: Path, content: io.BytesIO) -> None:
        with atomic_write(path) as file:
            file.write(content.getbuffer())
        if path.name == "best.pt":
            return
        self.has_failed = False
        self.intact = [path, *(old for old in self.intact if old != path)]
        keep = set(self.intact[: self.config.keep_last])
        if self.config.keep_every:
            keep |= {old for old in self.intact if step_of(old) % self.config.keep_every == 0}
        for old in checkpoints(self.run):
            if old not in keep:
                old.unlink()


# ---- reading ----


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint's file, as it was at a time: training replaces best.pt."""

    path: Path
    modified_ns: int
    run: Path  # the argument of find: the run's folder, or this file

    @functools.cached_property  # it reads the whole file
    def id(self) -> dict[str, Any]:
        """The step and sha256, which identify the weights in results.

        Raises UserError as `require_unchanged` does.
        """
        self.require_unchanged()
        return {"step": load(self.path).step, "sha256": sha256_of(self.path)}

    def require_unchanged(self) -> None:
        """Raise UserError if training has replaced or deleted the file since."""
        if not self.path.exists() or self.path.stat().st_mtime_ns != self.modified_ns:
            raise UserError(
                f"{self.path} was replaced or deleted meanwhile by a training run: repeat the "
                "command"
            )


def find(run: str | Path, quiet: bool = False) -> Checkpoint:
    """Find the newest intact checkpoint of a run.

    A file whose checksums or content are wrong is reported on standard error, and the previous
    checkpoint is used. `run` may also be the file of a checkpoint. Raises UserError if none is
    intact, and if a file cannot be read for a transient reason.
    """
    files = [Path(run)] if is_checkpoint(run) else checkpoints(run)
    files = [path for path in files if path.is_file()]
    for path in files:
        try:
            return open_intact(path, path.stat().st_mtime_ns, Path(run))
        except Exception as error:  # zipfile raises many types for damaged files
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            transient = isinstance(cause, OSError | MemoryError) or "unable to mmap" in str(cause)
            if transient:  # a run that went on without it would delete it
                raise UserError(f"{path}: cannot be read now: {first_line(cause)}") from error
            if not quiet:
                print(f"warning: {path} is damaged: {first_line(error)}", file=sys.stderr)
    if files:
        raise UserError(f"{files[0]} is damaged, and no earlier checkpoint is intact")
    raise UserError(no_checkpoint(run))


@functools.cache  # it reads the whole file, and a table looks up each run several times
def open_intact(path: Path, modified_ns: int, run: Path) -> Checkpoint:
    """The checkpoint in a file. Raises exceptions of various types if it is damaged."""
    with zipfile.ZipFile(path) as archive:
        damaged_entry = archive.testzip()
    if damaged_entry is not None:
        raise UserError(f"the checksum of {damaged_entry} in it is wrong")
    load(path)  # raises if it is no checkpoint
    return Checkpoint(path, modified_ns, run)


def load(path: Path) -> State:
    """Read a checkpoint's content, memory-mapped: tensors are paged in lazily.

    Nothing in the file is run as code. Raises UserError if it cannot be read.
    """
    return convert(read_checkpoint(path), State, path)


def settings_before(state: State) -> Settings:
    """Return all settings of a checkpoint, with the defaults of settings that came later."""
    return Config().as_dict() | state.config


def changes_since(state: State, config: Config) -> dict[str, tuple]:
    """Return what a resumed run changes and its folder records: the values before and now."""
    before = settings_before(state)
    now = config.as_dict()
    return {key: (before[key], now[key]) for key in RECORDED_ON_RESUME if before[key] != now[key]}


def load_weights(
    model: GPT, checkpoint: Checkpoint, resize: Callable | None = None
) -> dict[str, Any]:
    """Copy a checkpoint's weights into the model, as `copy_weights`; returns the checkpoint's id.

    `resize`(weights, model) returns the weights in the model's shapes.
    """
    checkpoint.require_unchanged()  # a file that is gone is not a damaged one
    state = load(checkpoint.path)
    if resize is not None:
        state.model = resize(state.model, model)
    copy_weights(model, state, checkpoint.path)
    weights_id = checkpoint.id
    checkpoint.require_unchanged()  # so that the id is of the weights that were read
    return weights_id


def copy_weights(model: GPT, state: State, source: str | Path) -> None:
    """Copy the weights of a state into the model.

    The models may differ in what changes neither the names nor the shapes of the weights, such as
    the attention variant, its window or RoPE's base; learnable scalars that the state lacks keep
    their initial values. Raises UserError for any other difference.
    """
    saved = settings_before(state)
    wanted = settings_of(model.config)
    different = []
    for key in NOT_IN_SHAPES:
        if saved[key] != wanted[key]:
            different.append(f"{key} is {saved[key]} there, {wanted[key]} here")
    saved_shapes = {name: tuple(x.shape) for name, x in state.model.items()}
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    for name in sorted(saved_shapes.keys() | shapes.keys()):
        saved_shape = saved_shapes.get(name)
        shape = shapes.get(name)
        is_other_scalar = name.rpartition(".")[2] in SCALARS and None in (saved_shape, shape)
        if saved_shape != shape and not is_other_scalar:
            different.append(
                f"{name} is {saved_shape or 'missing'} there, {shape or 'missing'} here"
            )
    if different:
        raise UserError(
            f"{source}: its model differs: {'; '.join(different[:3])}. Only settings without "
            "weights may differ, such as the attention variant or a window"
        )
    model.load_state_dict(state.model, strict=False)
