"""A run's folder: its config and checkpoints, written atomically and read back.

config.json        every setting, resolved
tokenizer.json     the tokenizer, unless it is built in
environment.json   versions, machine, commit
uncommitted.patch  `git diff HEAD` of the repository, where that is not empty
began_with.json    step and sha256 of the checkpoint that init_from took its weights from
wandb.json         the run's id in wandb
metrics.jsonl      one object per line, for a step or a validation each
step_000200.pt     everything needed to resume, after 200 steps
best_000150.pt     the weights with the lowest validation loss
checkpoints.json   sha256 of each checkpoint; unlisted files are ignored

A checkpoint is written to a temporary file, synced and renamed before checkpoints.json lists it,
and older ones are deleted only after that: the newest one listed is always intact.
"""

import math
import os
import re
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from config import SETTINGS, Config, nearest_file, saved_config
from data.tokenizer import copy_file, identify
from errors import UserError, first_line
from model import GPT
from runtime.device import environment, uncommitted_changes
from runtime.files import (
    atomic_write,
    check_writable,
    convert,
    delete_abandoned,
    read_json,
    sha256_of,
    write_json,
)

INDEX = "checkpoints.json"
KINDS = {"latest": "step", "best": "best"}
# A name must not lead out of the run's folder.
NAME = r"^(step|best)_\d{6,}\.pt$"
# The values that a Config may have.
Settings = dict[str, None | bool | int | float | str]
# Learnable scalars of attention, which another variant may not have.
SCALARS = ("s", "b", "p_n", "sink")
# Settings of a model that the names and shapes of its weights may not reveal.
HIDDEN = ("projections", "n_head", "norm", "tie_embeddings", "tokenizer")


class Entry(msgspec.Struct):
    """What the index knows of a checkpoint."""

    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    keep: bool = False  # as one of every `keep_every` steps, whatever a resumed run sets


class Index(msgspec.Struct):
    """The content of checkpoints.json."""

    checkpoints: dict[Annotated[str, msgspec.Meta(pattern=NAME)], Entry] = {}

    def newest_first(self, kind: str) -> list[str]:
        names = [name for name in self.checkpoints if name.startswith(kind)]
        return sorted(names, key=step_of, reverse=True)


class State(msgspec.Struct, kw_only=True):
    """The content of a checkpoint; a best_*.pt has no optimizers and no scaler."""

    model: dict[str, Any]
    step: Annotated[int, msgspec.Meta(ge=0)]
    config: Settings
    best_val_loss: float = math.inf
    tokens: int = 0  # of an epoch of the data; 0: not recorded
    optimizers: list[dict[str, Any]] = []
    scaler: dict[str, int | float] = {}


@dataclass
class Training:
    """A model in training: what its checkpoints save and restore."""

    model: GPT
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    step: int = 0  # the updates done
    best_val_loss: float = math.inf
    tokens: int = 0  # of an epoch of the data
    resumed_at: int | None = None

    def weights(self, config: Config) -> State:
        """What evaluations and new runs need."""
        return State(
            model=self.model.state_dict(), step=self.step, config=settings_of(config),
            best_val_loss=self.best_val_loss, tokens=self.tokens,
        )  # fmt: skip

    def state(self, config: Config) -> State:
        """All that resuming needs; `restore` loads it back."""
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        scaler = self.scaler.state_dict()
        return msgspec.structs.replace(self.weights(config), optimizers=optimizers, scaler=scaler)

    def restore(self, state: State) -> None:
        """Copy a state into the model, its optimizers and the loss scaler.

        Raises UserError where it does not fit them.
        """
        try:
            self.model.load_state_dict(state.model)
            for optimizer, saved in zip(self.optimizers, state.optimizers, strict=True):
                options = optimizer.param_groups
                optimizer.load_state_dict(saved)
                for group, own in zip(optimizer.param_groups, options, strict=True):
                    group.update(own)  # the config's, which a resumed run has not changed
            if state.scaler:  # empty in a run that did not scale its loss: it may go on in float16
                self.scaler.load_state_dict(state.scaler)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            *_, reason = str(error).splitlines() or [type(error).__name__]
            raise UserError(
                f"the checkpoint of step {state.step} does not fit this run: {reason.strip()}"
            ) from error
        self.step = self.resumed_at = state.step
        self.best_val_loss, self.tokens = state.best_val_loss, state.tokens


# ---- writing ----


def write_header(run: Path, config: Config) -> None:
    """Write the settings and environment to a run's folder, before its first step."""
    delete_stale(run)
    copy_file(config.tokenizer, run)
    write_json(run / "config.json", config.as_dict())
    write_json(run / "environment.json", environment())
    patch = run / "uncommitted.patch"
    if changes := uncommitted_changes():
        with atomic_write(patch) as file:
            file.write(changes)
    else:
        patch.unlink(missing_ok=True)


def settings_of(config: Config) -> dict[str, Any]:
    """The settings of a run, its tokenizer as data.tokenizer.identify gives it."""
    return config.as_dict() | {"tokenizer": identify(config.tokenizer)}


class Saver:
    """Writes a run's checkpoints in a background thread, one after another.

    Of the step_*.pt in the run's folder, the newest `keep_last` are kept, and those at multiples of
    `keep_every` steps (0: none), for good. There is one best_*.pt. With `quiet`, as on all ranks
    but 0, nothing is written.
    """

    def __init__(self, run: Path, keep_last: int, keep_every: int, quiet: bool = False):
        self.run, self.keep_last, self.keep_every, self.quiet = run, keep_last, keep_every, quiet
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future[None] | None = None

    def save(self, kind: str, state: State) -> None:
        """Copy the state to host memory, then write it in the background, as a "step" or "best".

        First waits for the previous checkpoint. Raises UserError if writing that failed.
        """
        if self.quiet:
            return
        self.wait()
        content = to_host(msgspec.structs.asdict(state), {})
        self.pending = self.thread.submit(self._write, f"{kind}_{state.step:06d}.pt", content)

    def wait(self) -> None:
        """Wait until everything is on disk. Raises UserError if a write failed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.wait()
        self.thread.shutdown()  # finishes a write in progress, even after an error

    def _write(self, name: str, content: dict[str, Any]) -> None:
        path, before = self.run / name, read_index(self.run)
        try:
            with atomic_write(path) as file:
                torch.save(content, file)
            keep = self.keep_every > 0 and content["step"] % self.keep_every == 0
            entry = Entry(sha256_of(path), keep)
            kept = self._entries_to_keep(name, before or Index()) | {name: entry}
            write_json(self.run / INDEX, msgspec.to_builtins(Index(kept)))
        except (UserError, RuntimeError) as error:  # torch makes its own error of a full disk
            again = "continue with --resume" if before else "start the run with the same command"
            raise UserError(
                f"{path}: this checkpoint cannot be written ({first_line(error)}). Earlier ones "
                f"are untouched: if the disk is full, free some space, then {again}"
            ) from error
        delete_stale(self.run)

    def _entries_to_keep(self, new: str, index: Index) -> dict[str, Entry]:
        """The index entries to keep beside a new one, which replaces all later ones of its kind."""
        best, steps = index.newest_first("best"), index.newest_first("step")
        if new.startswith("best"):
            best = []
        else:
            steps = [name for name in steps if step_of(name) < step_of(new)]
            milestones = [name for name in steps if index.checkpoints[name].keep]
            steps = steps[: self.keep_last - 1] + milestones
        return {name: index.checkpoints[name] for name in best + steps}


def to_host(value: Any, copies: dict[tuple, Tensor]) -> Any:
    """A copy of nested dicts and lists, with tensors in host memory and tied ones still tied."""
    if isinstance(value, Tensor):
        key = value.data_ptr(), value.dtype, value.shape
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]
    if isinstance(value, dict):
        return {key: to_host(item, copies) for key, item in value.items()}
    if isinstance(value, list):
        return [to_host(item, copies) for item in value]
    return value


def delete_stale(run: Path) -> None:
    """Delete checkpoints that the index does not list, and what killed processes left behind."""
    index = read_index(run)
    for file in run.iterdir():
        if file.name.startswith(".") and file.name.endswith(".tmp"):
            delete_abandoned(file)
        elif re.fullmatch(NAME, file.name) and not (index and file.name in index.checkpoints):
            file.unlink()


# ---- what is there ----


def read_index(run: str | Path) -> Index | None:
    """The checkpoints of a run; None where none has been saved yet.

    Raises UserError where the file is damaged.
    """
    return read_json(Path(run) / INDEX, Index) if os.path.isdir(run) else None


def step_of(name: str) -> int:
    return int(name[5:-3])


def step(run: str | Path) -> int | None:
    """The step of a run's newest checkpoint, None where there is none."""
    index = read_index(run) or Index()
    return next(map(step_of, index.newest_first("step")), None)


def is_checkpoint(run: str | Path) -> bool:
    """Whether the path is the file of a checkpoint, not the folder of a run."""
    return Path(run).suffix == ".pt"


def folder_of(run: str | Path) -> Path:
    """The folder of a run, or the folder that a checkpoint's file lies in."""
    return Path(run).parent if is_checkpoint(run) else Path(run)


def exists(run: str | Path) -> bool:
    """Whether the folder holds a run that can be resumed.

    Raises UserError where it has checkpoints but no index of them.
    """
    found = sorted(path.name for path in Path(run).glob("*.pt") if re.fullmatch(NAME, path.name))
    # a kill during the very first save leaves files of step 0 without an index
    if read_index(run) is None and any(map(step_of, found)):
        raise UserError(
            f"{run}: holds {found[-1]}, but its {INDEX} is missing; restore it, or use a "
            f"checkpoint by itself: {Path(run) / found[-1]}"
        )
    return step(run) is not None


def resumes(run: Path, resume: bool | str) -> bool:
    """Whether the run in a folder is resumed; with "auto" it is if it has a checkpoint.

    Raises UserError where there is nothing to resume, or a new run would overwrite something. A run
    that ended before its first checkpoint was saved may be overwritten: it has no steps.
    """
    found = exists(run)
    if resume is True and not found:
        raise UserError(why_none(run))
    if found and not resume:
        raise UserError(f"{run} holds a run; continue it with --resume, or give another --out_dir")
    if found:
        return True
    check_writable(run)
    path, metrics = run / "config.json", run / "metrics.jsonl"
    foreign = "attention" not in (read_json(path, dict[str, Any]) or {"attention": None})
    text = metrics.read_text(errors="replace") if metrics.is_file() else ""
    if foreign or '"loss"' in text or (text and not text.startswith('{"step": 0')):
        raise UserError(
            f"{path if foreign else metrics} belongs to no run that can be resumed, and a new run "
            "would overwrite it; move it away, or give another --out_dir"
        )
    return False


# ---- reading ----


class Found(NamedTuple):
    """A checkpoint's file, and the step and checksum that identify its weights."""

    path: Path
    step: int
    sha256: str

    @property
    def id(self) -> dict[str, Any]:
        """What is recorded of it: runs of the same name have different checksums."""
        return {"step": self.step, "sha256": self.sha256}


def find(run: str | Path, which: str = "latest", quiet: bool = False) -> Found:
    """The newest intact checkpoint of a run, or its best one, its checksum verified.

    A damaged one is reported on standard error, and the previous one is used. `run` may also be the
    file of a checkpoint. Raises UserError where none is intact.
    """
    path, folder = Path(run), folder_of(run)
    index = read_index(folder) or Index()
    names = index.newest_first(KINDS[which])
    if is_checkpoint(path):
        if which == "best":
            raise UserError(f"{run} is one checkpoint; the best one is chosen from a run's folder")
        if path.is_file() and path.name not in index.checkpoints:  # copied away from its run
            return Found(path, load(path).step, sha256_of(path))
        names = [path.name] if path.is_file() else []
    for name in names:
        entry = index.checkpoints[name]
        problem = verify(folder / name, entry)
        if problem is None:
            return Found(folder / name, step_of(name), entry.sha256)
        if not quiet:
            print(f"warning: {folder / name} is damaged: {problem}", file=sys.stderr, flush=True)
    if names:
        raise UserError(f"{folder}: damaged, and no earlier one is left: {', '.join(names)}")
    raise UserError(why_none(path, which))


def verify(path: Path, entry: Entry) -> str | None:
    """How a file differs from its entry in the index; None where it does not."""
    try:
        intact = sha256_of(path) == entry.sha256
    except OSError as error:
        return error.strerror
    return None if intact else "its checksum is not the one it was saved with"


def why_none(run: Path, which: str = "latest") -> str:
    """Why no checkpoint is found at a path, and what to do."""
    if os.path.exists(run):
        return f"{run}: no checkpoint in it ({which}); train.py without --resume begins a run"
    return (
        f"{run}: no such run; {nearest_file(run)}a run is a folder that train.py made, or the "
        ".pt file of a checkpoint in it; weights of other programs cannot be loaded"
    )


def load(path: Path) -> State:
    """A checkpoint's content, memory-mapped: its CPU tensors are read when first used.

    Nothing in the file is run as code. Raises UserError where it cannot be read.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise UserError(why_none(path)) from None
    except Exception as error:  # torch.load raises many types for damaged files
        raise UserError(f"{path}: the checkpoint cannot be read: {first_line(error)}") from error
    return convert(content, State, path)


def load_to_resume(run: Path, config: Config, quiet: bool) -> State:
    """The latest checkpoint of a run that this config continues.

    Raises UserError where the run was trained with settings that a resumed one may not change, or
    has more steps than this config's max_iters.
    """
    state = load(find(run, quiet=quiet).path)
    asked = settings_of(config)
    defaults = {key: getattr(Config, key) for key in asked}  # of settings that came later
    for key, saved in (defaults | state.config).items():
        if asked.get(key) != saved and (key not in SETTINGS or SETTINGS[key]["fixed"]):
            raise UserError(
                f"{run} was trained with {key} = {saved!r}, so it cannot be resumed with "
                f"{asked.get(key)!r}; to start a new run from its weights: --init_from={run}"
            )
    if state.step > config.max_iters:
        raise UserError(f"{run} has {state.step} steps, above max_iters = {config.max_iters}")
    return state


def read_config(run: str | Path) -> Config:
    """The Config that a run, or the file of a checkpoint, was saved with.

    Raises UserError where there is none or it is no longer valid.
    """
    if is_checkpoint(run):
        return saved_config(load(Path(run)).config, run)
    path = Path(run) / "config.json"
    values = read_json(path, Settings) if os.path.isdir(run) else None
    if values is None:
        raise UserError(why_none(Path(run)))
    return saved_config(values, path)


def load_weights(model: GPT, run: str | Path, which: str = "latest") -> Found:
    """Copy a run's weights into the model; returns the checkpoint that they are from.

    The attention variant may differ: its learnable scalars then keep their initial values. Raises
    UserError where the run has no checkpoint or its model differs in anything else.
    """
    found = find(run, which)
    state = load(found.path)
    own, saved = model.state_dict(), state.model
    ours = settings_of(model.config)
    hidden = [*HIDDEN, *(("q_rank", "kv_rank") if model.config.projections == "tpa" else ())]
    theirs = {key: getattr(Config, key) for key in hidden} | state.config  # older ones lack some
    different = [f"{k} {theirs[k]} for {ours[k]}" for k in hidden if theirs[k] != ours[k]]
    there, here = ({name: tuple(x.shape) for name, x in all.items()} for all in (saved, own))
    for name in sorted({name for name, _ in there.items() ^ here.items()}):
        if name.rpartition(".")[2] not in SCALARS or (name in there and name in here):
            different.append(f"{name} {there.get(name)} for {here.get(name)}")
    if different:
        raise UserError(
            f"{found.path}: its model differs: {', '.join(different[:3])} do not fit; only the "
            "attention may be another, if it projects the same from its input"
        )
    model.load_state_dict(saved, strict=False)
    return found
