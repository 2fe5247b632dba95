"""A run's folder: its config and checkpoints, written atomically and read back.

config.json        every setting, resolved
tokenizer.json     the tokenizer, unless it is built in
environment.json   versions, machine, commit
uncommitted.patch  `git diff HEAD` of the repository, where that is not empty
began_with.json    step and sha256 of the checkpoint that init_from took its weights from
wandb.json         the run's id in wandb
metrics.jsonl      one object per line: first the run's id, then a step or a validation each
step_000200.pt     everything needed to resume, after 200 steps
best_000150.pt     the weights with the lowest validation loss
checkpoints.json   the run's id, bytes and sha256 of each checkpoint; unlisted files are ignored

A checkpoint is written to a temporary file, synced and renamed before checkpoints.json lists it,
and older ones are deleted only after that: the newest one listed is always intact.
"""

import hashlib
import json
import math
import os
import re
import secrets
import shutil
import sys
import zipfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, TypeVar

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


class Entry(msgspec.Struct):
    """What the index knows of a checkpoint."""

    bytes: int
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    keep: bool = False  # as one of every `keep_every` steps, whatever a resumed run sets


class Index(msgspec.Struct):
    """The content of checkpoints.json; metrics.jsonl and every checkpoint have the same run_id."""

    run_id: str
    checkpoints: dict[Annotated[str, msgspec.Meta(pattern=NAME)], Entry]

    def newest_first(self, kind: str) -> list[str]:
        names = [name for name in self.checkpoints if name.startswith(kind)]
        return sorted(names, key=step_of, reverse=True)


class Weights(msgspec.Struct, kw_only=True):
    """What every checkpoint has; val_loss is that of a best_*.pt."""

    run_id: str
    model: dict[str, Any]
    step: Annotated[int, msgspec.Meta(ge=0)]
    config: Settings
    val_loss: float | None = None


class TrainingState(Weights, kw_only=True):
    """The content of a step_*.pt: all that resuming needs."""

    optimizers: list[dict[str, Any]]
    scaler: dict[str, int | float]
    best_val_loss: float = math.inf
    tokens: int = 0  # of an epoch of the data; 0: not recorded


State = TypeVar("State", bound=Weights)

# ---- writing ----


def write_header(run: Path, config: Config) -> None:
    """Write the settings and environment to a run's folder, before its first step."""
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


def new_run_id() -> str:
    return secrets.token_hex(8)


def training_state(
    run_id: str,
    model: GPT,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    step: int,
    config: Config,
    best_val_loss: float = math.inf,
    tokens: int = 0,
) -> TrainingState:
    """All that resuming needs; `restore` loads it back."""
    return TrainingState(
        run_id=run_id,
        model=model.state_dict(),
        step=step,
        config=settings_of(config),
        optimizers=[optimizer.state_dict() for optimizer in optimizers],
        scaler=scaler.state_dict(),
        best_val_loss=best_val_loss,
        tokens=tokens,
    )


def best_weights(run_id: str, model: GPT, step: int, config: Config, val_loss: float) -> Weights:
    """The weights with the lowest validation loss, and that loss."""
    weights = model.state_dict()
    return Weights(
        run_id=run_id, model=weights, step=step, config=settings_of(config), val_loss=val_loss
    )


class Saver:
    """Writes a run's checkpoints in a background thread, one after another.

    Of the step_*.pt in the run's folder, the newest `keep_last` are kept, and those at multiples of
    `keep_every` steps (0: none), for good. There is one best_*.pt.
    """

    def __init__(self, run: Path, keep_last: int, keep_every: int):
        self.run, self.keep_last, self.keep_every = run, keep_last, keep_every
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future[None] | None = None

    def save(self, state: Weights) -> None:
        """Copy the state to host memory, then write it in the background.

        A TrainingState becomes a step_*.pt, other weights best_*.pt. First waits for the previous
        checkpoint. Raises UserError if writing that failed.
        """
        self.wait()
        kind = "step" if isinstance(state, TrainingState) else "best"
        copies: dict[tuple, Tensor] = {}
        content = to_host(msgspec.structs.asdict(state), copies)
        needed = sum(tensor.nbytes for tensor in copies.values())
        name = f"{kind}_{state.step:06d}.pt"
        self.pending = self.thread.submit(self._write, name, content, needed)

    def wait(self) -> None:
        """Wait until everything is on disk. Raises UserError if a write failed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def failed(self) -> bool:
        """Whether the last write has already failed; `wait` raises its error."""
        pending = self.pending
        return pending is not None and pending.done() and pending.exception() is not None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.wait()
        self.thread.shutdown()  # finishes a write in progress, even after an error

    def _write(self, name: str, content: dict[str, Any], needed: int) -> None:
        path, before = self.run / name, read_index(self.run)
        try:
            with atomic_write(path) as file:
                saved = HashingFile(file)
                saved.write_content(content)
            keep = self._is_milestone(content["step"])
            entry = Entry(bytes=saved.bytes, sha256=saved.sha256.hexdigest(), keep=keep)
            kept = self._entries_to_keep(name, before) | {name: entry}
            index = Index(run_id=content["run_id"], checkpoints=kept)
            write_json(self.run / INDEX, msgspec.to_builtins(index))
        except UserError as error:
            free, cause = shutil.disk_usage(self.run).free, error.__cause__
            reason = cause.strerror if isinstance(cause, OSError) else cause
            advice = (
                "The earlier checkpoints are untouched: free some space, then continue with "
                "--resume"
                if before
                else "No checkpoint was saved before: free some space, then start the run again "
                "with the same command"
            )
            raise UserError(
                f"{path}: {reason}; this checkpoint needs {needed:,} bytes, and {free:,} "
                f"are free on its disk. {advice}"
            ) from error
        delete_stale(self.run)

    def _is_milestone(self, step: int) -> bool:
        return self.keep_every > 0 and step % self.keep_every == 0

    def _entries_to_keep(self, new: str, index: Index | None) -> dict[str, Entry]:
        """The index entries to keep beside a new one, which replaces all later ones of its kind."""
        if index is None:
            return {}
        best, steps = index.newest_first("best"), index.newest_first("step")
        if new.startswith("best"):
            best = []
        else:
            before = [name for name in steps if step_of(name) < step_of(new)]
            for name in before:
                index.checkpoints[name].keep |= self._is_milestone(step_of(name))
            steps = before[: self.keep_last - 1] + [n for n in before if index.checkpoints[n].keep]
        return {name: index.checkpoints[name] for name in best + steps}


class HashingFile:
    """A file that counts and hashes what is written to it."""

    def __init__(self, file: IO[bytes]):
        self.file, self.bytes, self.sha256 = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.bytes += len(data)
        self.sha256.update(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()

    def write_content(self, content: dict[str, Any]) -> None:
        try:
            torch.save(content, self)  # type: ignore[arg-type]  # it only needs write and flush
        except RuntimeError as error:  # torch replaces the file's error with its own
            raise self.error or error from None


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


class Found(NamedTuple):
    """A checkpoint's file, and the step and checksum that identify its weights."""

    path: Path
    step: int
    sha256: str

    @property
    def id(self) -> dict[str, Any]:
        """What is recorded of it: runs of the same name have different checksums."""
        return {"step": self.step, "sha256": self.sha256}


def newest(run: str | Path) -> Found | None:
    """The newest checkpoint that a run's index lists, None where there is none."""
    index = read_index(run)
    names = index.newest_first("step") if index else []
    if index is None or not names:
        return None
    return Found(Path(run) / names[0], step_of(names[0]), index.checkpoints[names[0]].sha256)


def step(run: str | Path) -> int | None:
    """The step of a run's newest checkpoint, None where there is none."""
    found = newest(run)
    return found.step if found else None


def is_checkpoint(run: str | Path) -> bool:
    """Whether what was given as a run is the file of one checkpoint."""
    return Path(run).suffix == ".pt"


def folder_of(run: str | Path) -> Path:
    """The folder of a run, or the one that a checkpoint's file lies in."""
    return Path(run).parent if is_checkpoint(run) else Path(run)


def exists(run: str | Path) -> bool:
    """Whether the folder holds a run that can be resumed.

    Raises UserError where it has checkpoints but no index of them.
    """
    found = [path.name for path in Path(run).glob("*.pt") if re.fullmatch(NAME, path.name)]
    # a kill during the very first save leaves files of step 0 without an index
    if read_index(run) is None and any(step_of(name) for name in found):
        raise UserError(why_none(Path(run)))
    return step(run) is not None


def require_resumable(run: Path) -> None:
    """Raise UserError for a folder that holds no run to continue."""
    if newest(run) is None:
        raise UserError(why_none(run))


def require_unused_folder(run: Path) -> None:
    """Raise UserError for a folder that holds a run, or files that a new run would overwrite.

    A run that ended before its first checkpoint was saved may be overwritten.
    """
    if exists(run):
        raise UserError(f"{run} holds a run; continue it with --resume, or give another --out_dir")
    path, metrics = run / "config.json", run / "metrics.jsonl"
    config = read_json(path, dict[str, Any])
    at_risk = None
    if config is not None and "attention" not in config:  # not written by train.py
        at_risk = path
    elif metrics.is_file() and metrics.stat().st_size:
        # the first checkpoint is saved before the second is due
        interval = (config or {}).get("checkpoint_interval")
        if not isinstance(interval, int) or last_step(metrics) > interval:
            at_risk = metrics
    if at_risk:
        raise UserError(
            f"{at_risk} belongs to no run that can be resumed, and a new run would overwrite it; "
            "move it away, or give another --out_dir"
        )


def last_step(metrics: Path) -> float:
    """The last step in a metrics.jsonl; infinite where it is not a run's."""
    steps = [0]
    try:
        lines = metrics.read_text().splitlines()
        if "run_id" not in json.loads(lines[0]):
            return math.inf
        steps += [json.loads(line)["step"] for line in lines[1:-1]]  # a kill may cut the last line
        return max(steps)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return math.inf


# ---- reading ----


def find(run: str | Path, which: str = "latest", quiet: bool = False) -> Found:
    """The newest whole checkpoint of a run, or its best one, with its checksum verified.

    A damaged one is reported on standard error, and the previous one is used. `run` may also be the
    file of one checkpoint. Raises UserError where none is left.
    """
    if is_checkpoint(run):
        if which == "best":
            raise UserError(f"{run} is one checkpoint; the best one is chosen from a run's folder")
        return find_file(Path(run))
    run = Path(run)
    while index := read_index(run):
        names = index.newest_first(KINDS[which])
        for name in names:
            entry = index.checkpoints[name]
            problem = verify_checksum(run / name, entry.bytes, entry.sha256)
            if problem is None:
                return Found(run / name, step_of(name), entry.sha256)
            if not listed(run / name):
                break  # a run in training has replaced it: look again
            if not quiet:
                print(f"warning: {run / name} is damaged: {problem}", file=sys.stderr, flush=True)
        else:
            if names:
                damaged = f"all its checkpoints ({which}) are damaged: {', '.join(names)}"
                raise UserError(f"{run}: {damaged}")
            break
    raise UserError(why_none(run, which))


def find_file(path: Path) -> Found:
    """One checkpoint, verified by its run's index or, copied away from it, by its own checksums."""
    if not os.path.isfile(path):
        raise UserError(why_none(path))
    index = read_index(path.parent)
    if entry := index and index.checkpoints.get(path.name):
        if problem := verify_checksum(path, entry.bytes, entry.sha256):
            raise UserError(f"{path} is damaged: {problem}")
        return Found(path, step_of(path.name), entry.sha256)
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # zipfile raises many types for damaged files
        raise UserError(f"{path}: the checkpoint cannot be read: {first_line(error)}") from error
    if damaged:
        raise UserError(f"{path} is damaged: {damaged} in it fails its checksum")
    return Found(path, load(path, Weights).step, sha256_of(path))


def why_none(run: Path, which: str = "latest") -> str:
    """Why no checkpoint is found at a path, and what to do."""
    if not os.path.exists(run):
        return (
            f"{run}: no such run; {nearest_file(run)}a run is a folder that train.py made, or the "
            ".pt file of a checkpoint in it; weights of other programs cannot be loaded"
        )
    if run.is_file():
        return f"{run} is a file, but neither a run's folder nor the .pt file of a checkpoint"
    found = sorted(path.name for path in run.glob("*.pt") if re.fullmatch(NAME, path.name))
    if found and not (run / INDEX).exists():
        return (
            f"{run}: holds {found[-1]}, but its {INDEX} is missing; restore it, or use a "
            f"checkpoint by itself: {run / found[-1]}"
        )
    if found:
        return f"{run}: no checkpoint in it ({which})"
    if (run / "config.json").exists():
        return f"{run}: no checkpoint in it yet; train.py without --resume begins the run again"
    return f"{run}: no config.json in it; a run is a folder that train.py made"


def listed(path: Path) -> bool:
    """Whether the index of its run lists a checkpoint."""
    index = read_index(path.parent)
    return index is not None and path.name in index.checkpoints


def checkpoint_id(run: str | Path, which: str = "latest") -> dict[str, Any]:
    """Step and sha256 of the checkpoint that `load_weights` would read."""
    return find(run, which, quiet=True).id


def verify_checksum(path: Path, bytes: int, sha256: str) -> str | None:
    """How a file deviates from this size and checksum; None if it does not."""
    try:
        if (size := path.stat().st_size) != bytes:
            return f"it has {size:,} bytes, not {bytes:,}"
        found = sha256_of(path)
    except OSError as error:
        return error.strerror
    return None if found == sha256 else "its checksum is not the one it was saved with"


def load(path: Path, type: type[State]) -> State:
    """A checkpoint's content, memory-mapped: its CPU tensors are read when first used.

    Nothing in the file is run as code. Raises UserError where it is missing or damaged, or is of
    another step or run than its index says.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise UserError(why_none(path)) from None
    except Exception as error:  # torch.load raises many types for damaged files
        raise UserError(f"{path}: the checkpoint cannot be read: {first_line(error)}") from error
    state = convert(content, type, path)
    index = read_index(path.parent)
    if index and path.name in index.checkpoints:
        if state.step != step_of(path.name):
            raise UserError(f"{path}: it was renamed: it is of step {state.step}")
        if index.run_id != state.run_id:
            raise UserError(f"{path}: it belongs to another run than {INDEX}")
    return state


def find_and_load(
    run: str | Path, which: str, type: type[State], quiet: bool = False
) -> tuple[Found, State]:
    """The checkpoint that `find` gives, and its content."""
    while True:
        found = find(run, which, quiet)
        try:
            return found, load(found.path, type)
        except UserError:
            if listed(found.path) or is_checkpoint(run):
                raise  # else a run in training has replaced it: look again


def load_to_resume(run: Path, config: Config, quiet: bool) -> TrainingState:
    """The latest checkpoint of a run that this config continues.

    Raises UserError where the run was trained with settings that a resumed one may not change, or
    has more steps than this config's max_iters.
    """
    _, state = find_and_load(run, "latest", TrainingState, quiet)
    asked = settings_of(config)
    defaults = {key: getattr(Config, key) for key in asked}  # of settings that came later
    for key, saved in (defaults | state.config).items():
        if key not in SETTINGS:
            raise UserError(
                f"{run} was trained with {key} = {saved!r}, which is not a setting here"
            )
        if SETTINGS[key]["fixed"] and asked[key] != saved:
            raise UserError(
                f"{run} was trained with {key} = {saved!r}, so it cannot be resumed with "
                f"{asked[key]!r}; give its original settings (its config.json "
                f"has them), or start a new run from its weights: --init_from={run}"
            )
    if state.step > config.max_iters:
        raise UserError(f"{run} has {state.step} steps, above max_iters = {config.max_iters}")
    return state


def restore(
    state: TrainingState,
    model: GPT,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
) -> None:
    """Copy a training state into the model, its optimizers and the loss scaler.

    Raises UserError where it does not fit them.
    """
    try:
        model.load_state_dict(state.model)
        for optimizer, saved in zip(optimizers, state.optimizers, strict=True):
            options = optimizer.param_groups
            optimizer.load_state_dict(saved)
            for group, own in zip(optimizer.param_groups, options, strict=True):
                group.update(own)  # the config's, which a resumed run has not changed
            check_optimizer_state(optimizer)
        if state.scaler:  # empty in a run that did not scale its loss: it may go on in float16
            scaler.load_state_dict(state.scaler)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        *_, reason = str(error).splitlines() or [type(error).__name__]
        raise UserError(
            f"the checkpoint of step {state.step} does not fit this run: {reason.strip()}"
        ) from error


def check_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError where a parameter's state is not what a step of the optimizer leaves."""
    matrix = torch.zeros(2, 2, requires_grad=True)
    matrix.grad = torch.zeros(2, 2)
    kind: Any = type(optimizer)  # whose parameters are not those of its base class
    example = kind([matrix])
    example.step()
    expected = {key: (value.dtype, value.dim()) for key, value in example.state[matrix].items()}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state[p] if p in optimizer.state else {}
        for key in state and expected.keys() | state.keys():
            value, (dtype, dim) = state.get(key), expected.get(key, (None, 0))
            shape = p.shape if dim else ()
            if not isinstance(value, Tensor) or (value.dtype, value.shape) != (dtype, shape):
                raise ValueError(f"the optimizer's {key} of a parameter {list(p.shape)} is damaged")


def read_config(run: str | Path) -> Config:
    """The Config that a run, or the file of a checkpoint, was saved with.

    Raises UserError where there is none or it is no longer valid.
    """
    if is_checkpoint(run):
        return saved_config(load(Path(run), Weights).config, run)
    path = Path(run) / "config.json"
    values = read_json(path, Settings) if os.path.isdir(run) else None
    if values is None:
        raise UserError(why_none(Path(run)))
    return saved_config(values, path)


def load_weights(model: GPT, run: str | Path, which: str = "latest") -> Found:
    """Copy a run's weights into the model; returns the checkpoint that they are from.

    The attention variant may differ: its learnable scalars then keep their initial values. Raises
    UserError where the run has no checkpoint or its shapes do not fit.
    """
    found, state = find_and_load(run, which, Weights)
    own, saved = model.state_dict(), state.model
    scalars = {name for name in own | saved if name.rpartition(".")[2] in SCALARS}
    missing = [name for name in own if name not in saved and name not in scalars]
    unknown = [name for name in saved if name not in own and name not in scalars]
    for name in sorted(own.keys() & saved.keys()):
        if not isinstance(saved[name], Tensor) or own[name].shape != saved[name].shape:
            theirs = list(getattr(saved[name], "shape", ()))
            missing.append(f"{name} {theirs} for {list(own[name].shape)}")
    if different := differing_settings(settings_of(model.config), state.config) + missing + unknown:
        raise UserError(
            f"{found.path}: its model differs: {', '.join(different[:3])} do not fit; n_layer, "
            "n_head, n_embd, projections, norm, mlp, bias, ties, tokenizer and what a variant "
            "projects from the input (asentmax) must agree"
        )
    model.load_state_dict(saved, strict=False)
    return found


def differing_settings(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The settings of two models that differ and that the shapes of weights do not reveal."""
    keys = ["projections", "n_head", "norm", "tie_embeddings", "tokenizer"]
    keys += ["q_rank", "kv_rank"] if ours["projections"] == "tpa" else []
    theirs = {key: getattr(Config, key) for key in keys} | theirs  # older ones lack some
    return [f"{key} {theirs[key]} for {ours[key]}" for key in keys if theirs[key] != ours[key]]
