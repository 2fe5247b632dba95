"""A run's folder: its config and checkpoints, written atomically and read back.

config.json        every setting, resolved
environment.json   versions, machine, commit
uncommitted.patch  `git diff HEAD` of the repository, where that is not empty
began_with.json    step and sha256 of the checkpoint that init_from took its weights from
wandb.json         the run's id in wandb
metrics.jsonl      one object per line: a step or a validation
step_000200.pt     everything needed to resume, after 200 steps
best_000150.pt     the weights with the lowest validation loss
checkpoints.json   bytes and sha256 of each checkpoint; unlisted files are ignored

A checkpoint is written to a temporary file, synced and renamed before checkpoints.json lists it,
and older ones are deleted only after that: the newest one listed is always intact.
"""

import hashlib
import re
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from config import MAY_CHANGE_ON_RESUME, Config
from errors import UserError
from model import GPT
from runtime.device import environment, uncommitted_changes
from runtime.files import atomic_write, read_json, sha256_of, write_json

INDEX = "checkpoints.json"
NAME = r"(step|best)_\d{6,}\.pt"
KINDS = {"latest": "step", "best": "best"}


# ---- writing ----


def write_header(run: Path, config: Config, job: str | None) -> None:
    """Write the settings and environment to a run's folder, before its first step."""
    write_json(run / "config.json", config.as_dict())
    write_json(run / "environment.json", environment() | {"job": job})
    patch = run / "uncommitted.patch"
    if changes := uncommitted_changes():
        with atomic_write(patch) as file:
            file.write(changes)
    else:
        patch.unlink(missing_ok=True)


def training_state(
    model: GPT,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    step: int,
    config: Config,
) -> dict[str, Any]:
    """The content of a step_*.pt; `restore` loads it back."""
    return {
        "model": model.state_dict(),
        "step": step,
        "config": config.as_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "scaler": scaler.state_dict(),
    }


class Saver:
    """Writes a run's checkpoints in a background thread, one after another.

    Of the step_*.pt in the run's folder, the newest `keep_last` are kept, and those at multiples of
    `keep_every` steps (0: none). There is one best_*.pt.
    """

    def __init__(self, run: Path, keep_last: int, keep_every: int):
        self.run, self.keep_last, self.keep_every = run, keep_last, keep_every
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future[None] | None = None

    def save(self, kind: str, state: dict[str, Any]) -> None:
        """Copy the state to host memory, then write `<kind>_<step>.pt` in the background.

        First waits for the previous checkpoint. Raises UserError if writing that failed.
        """
        self.wait()
        name = f"{kind}_{state['step']:06d}.pt"
        copies: dict[tuple, Tensor] = {}
        state = to_host(state, copies)
        needed = sum(tensor.nbytes for tensor in copies.values())
        self.pending = self.thread.submit(self._write, name, state, needed)

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

    def _write(self, name: str, state: dict[str, Any], needed: int) -> None:
        path, index = self.run / name, self._entries_to_keep(name)
        try:
            with atomic_write(path) as file:
                saved = HashingFile(file)
                saved.write_state(state)
            index[name] = {"bytes": saved.bytes, "sha256": saved.sha256.hexdigest()}
            write_json(self.run / INDEX, index)
        except UserError as error:
            free, cause = shutil.disk_usage(self.run).free, error.__cause__
            reason = cause.strerror if isinstance(cause, OSError) else cause
            raise UserError(
                f"{path}: {reason}; this checkpoint needs {needed:,} bytes, and {free:,} "
                "are free on its disk. The earlier checkpoints are untouched: free some space, "
                "then continue with --resume"
            ) from error
        delete_stale(self.run)

    def _entries_to_keep(self, new: str) -> dict[str, dict]:
        """The index entries to keep beside a new one, which replaces all later ones of its kind."""
        index = read_index(self.run)
        best, steps = newest_first(index, "best"), newest_first(index, "step")
        if new.startswith("best"):
            best = []
        else:
            before = [name for name in steps if step_of(name) < step_of(new)]
            permanent = [n for n in before if self.keep_every and step_of(n) % self.keep_every == 0]
            steps = before[: self.keep_last - 1] + permanent
        return {name: index[name] for name in best + steps}


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

    def write_state(self, state: dict[str, Any]) -> None:
        try:
            torch.save(state, self)  # type: ignore[arg-type]  # it only needs write and flush
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
    """Delete checkpoints that the index does not list, and files that a kill left half-written."""
    index = read_index(run)
    for file in run.iterdir():
        name = file.name.removeprefix(".").removesuffix(".tmp")
        if re.fullmatch(NAME, name) and (name not in index or name != file.name):
            file.unlink()


# ---- the index ----


def read_index(run: str | Path) -> dict[str, dict]:
    """Checkpoint name -> its `bytes` and `sha256`; empty where there is no index yet.

    Raises UserError where the file is damaged.
    """
    path = Path(run) / INDEX
    index = read_json(path)
    if index is None:
        return {}
    # a name must not lead out of this folder
    if not isinstance(index, dict) or not all(
        re.fullmatch(NAME, name)
        and isinstance(entry, dict)
        and isinstance(entry.get("bytes"), int)
        and isinstance(entry.get("sha256"), str)
        for name, entry in index.items()
    ):
        raise UserError(f"{path}: damaged: it must have bytes and sha256 of every *.pt")
    return index


def step_of(name: str) -> int:
    return int(name[5:-3])


def newest_first(index: dict[str, dict], kind: str) -> list[str]:
    return sorted((name for name in index if name.startswith(kind)), key=step_of, reverse=True)


def step(run: str | Path) -> int | None:
    """The step of a run's newest checkpoint, None where there is none."""
    names = newest_first(read_index(run), "step")
    return step_of(names[0]) if names else None


def exists(run: str | Path) -> bool:
    """Whether the folder holds a run that can be resumed.

    Raises UserError where it has checkpoints but no index of them.
    """
    index = read_index(run)
    found = [path.name for path in Path(run).glob("*.pt") if re.fullmatch(NAME, path.name)]
    # a kill during the very first save leaves files of step 0 without an index
    if not index and any(step_of(name) for name in found):
        raise UserError(f"{run}: holds {max(found)}, but its {INDEX} is missing; restore it")
    return bool(newest_first(index, "step"))


def made_by(run: str | Path, job: str | None) -> bool:
    """Whether this job started the run, or was the last to continue it."""
    made = read_json(Path(run) / "environment.json")
    return isinstance(made, dict) and made.get("job") == job


def require_unused_folder(run: Path, job: str | None) -> None:
    """Raise UserError for a folder that holds a run, or files that a new run would overwrite.

    A restarted job may overwrite what it wrote itself before its first checkpoint.
    """
    if exists(run):
        raise UserError(f"{run} holds a run; continue it with --resume, or give another --out_dir")
    config, metrics = run / "config.json", run / "metrics.jsonl"
    at_risk = None
    if "attention" not in (read_json(config) or {"attention": ""}):  # not written by train.py
        at_risk = config
    elif metrics.is_file() and metrics.stat().st_size and not (job and made_by(run, job)):
        at_risk = metrics
    if at_risk:
        raise UserError(
            f"{at_risk} belongs to no run that can be resumed, and a new run would overwrite it; "
            "move it away, or give another --out_dir"
        )


# ---- reading ----


def find(run: str | Path, which: str = "latest", quiet: bool = False) -> Path:
    """The newest whole checkpoint of a run, or its best one, with its checksum verified.

    A damaged one is reported on standard error, and the previous one is used. `run` may also be the
    path of one checkpoint. Raises UserError where none is left.
    """
    run = Path(run)
    if run.suffix == ".pt":
        run, which = run.parent, run.name
    index = read_index(run)
    names = (
        newest_first(index, KINDS[which]) if which in KINDS else [n for n in index if n == which]
    )
    if not names:
        raise UserError(
            f"{run}: no checkpoint in it ({which}); train.py without --resume creates one"
        )
    for name in names:
        path = run / name
        problem = verify_checksum(path, **index[name])
        if problem is None:
            return path
        if not quiet:
            print(f"warning: {path} is damaged: {problem}", file=sys.stderr, flush=True)
    raise UserError(f"{run}: all its checkpoints ({which}) are damaged: {', '.join(names)}")


def checkpoint_id(run: str | Path, which: str = "latest") -> dict[str, Any]:
    """Step and sha256 of the checkpoint that `load_weights` would read.

    They identify its weights even among runs of the same name.
    """
    path = find(run, which, quiet=True)
    return {"step": step_of(path.name), "sha256": read_index(path.parent)[path.name]["sha256"]}


def verify_checksum(path: Path, bytes: int, sha256: str) -> str | None:
    """How a file deviates from this size and checksum; None if it does not."""
    try:
        if (size := path.stat().st_size) != bytes:
            return f"it has {size:,} bytes, not {bytes:,}"
        found = sha256_of(path)
    except OSError as error:
        return error.strerror
    return None if found == sha256 else "its checksum is not the one it was saved with"


def load(path: str | Path) -> dict[str, Any]:
    """A checkpoint's content, memory-mapped: its CPU tensors are read when first used.

    Nothing in the file is run as code. Raises UserError where it is missing or damaged.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint") from None
    except Exception as error:  # torch.load raises many types for damaged files
        raise UserError(f"{path}: the checkpoint cannot be read: {first_line(error)}") from error
    if not isinstance(state, dict) or not {"model", "step", "config"} <= state.keys():
        raise UserError(f"{path}: not a checkpoint of train.py: it needs model, step and config")
    return state


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def load_to_resume(run: Path, config: Config, quiet: bool) -> dict[str, Any]:
    """The latest checkpoint of a run that this config continues.

    Raises UserError where the run was trained with settings that a resumed one may not change, or
    has more steps than this config's max_iters.
    """
    state = load(find(run, quiet=quiet))
    for key, saved in state["config"].items():
        if key not in MAY_CHANGE_ON_RESUME and getattr(config, key, None) != saved:
            raise UserError(
                f"{run} was trained with {key} = {saved!r}, so it cannot be resumed with "
                f"{getattr(config, key)!r}; give its original settings (its config.json "
                f"has them), or start a new run from its weights: --init_from={run}"
            )
    if state["step"] > config.max_iters:
        raise UserError(f"{run} has {state['step']} steps, above max_iters = {config.max_iters}")
    return state


def restore(
    state: dict[str, Any],
    model: GPT,
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
) -> None:
    """Copy a `training_state` into the model, its optimizers and the loss scaler."""
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    scaler.load_state_dict(state["scaler"])


def read_config(run: str | Path) -> Config:
    """The Config saved with a run.

    Raises UserError where there is none or it is no longer valid.
    """
    path = Path(run) / "config.json"
    if Path(run).is_file():
        raise UserError(f"{run} is a file; a run is a folder that train.py made")
    values = read_json(path)
    if values is None:
        raise UserError(f"{run}: no config.json in it; a run is a folder that train.py made")
    try:
        return Config(**values)
    except TypeError as error:
        raise UserError(f"{path}: {error}") from error


def load_weights(model: GPT, run: str | Path, which: str = "latest") -> int:
    """Copy a run's weights into the model; returns their step.

    The attention variant may differ: its learnable scalars then keep their initial values. Raises
    UserError where the run has no checkpoint or its shapes do not fit.
    """
    path = find(run, which)
    state = load(path)
    own, saved = model.state_dict(), state["model"]
    scalars = {name for name in own | saved if name.rpartition(".")[2] in ("s", "b", "p_n")}
    missing = [name for name in own if name not in saved and name not in scalars]
    unknown = [name for name in saved if name not in own and name not in scalars]
    for name in sorted(own.keys() & saved.keys()):
        if own[name].shape != saved[name].shape:
            missing.append(f"{name} {list(saved[name].shape)} for {list(own[name].shape)}")
    for key in ("n_head", "norm", "tie_embeddings"):  # which shapes do not reveal
        theirs, ours = state["config"][key], getattr(model.config, key)
        if theirs != ours:
            missing.append(f"{key} {theirs} for {ours}")
    if missing or unknown:
        raise UserError(
            f"{path}: its model differs: {', '.join((missing + unknown)[:3])} "
            "do not fit; n_layer, n_head, n_embd, norm, mlp, bias, ties and vocabulary must agree"
        )
    model.load_state_dict(saved, strict=False)
    return state["step"]
