"""A run's folder: its config and checkpoints, written atomically and read back.

config.json        every setting, resolved
tokenizer.json     the tokenizer, unless it is built in
environment.json   versions, machine, commit
uncommitted.patch  the repository's changes since its commit, untracked .py files included; of a
                   start that resumed at step 200 uncommitted_000200.patch
began_with.json    step and sha256 of the checkpoint that init_from took its weights from
wandb.json         the run's id in wandb
metrics.jsonl      one object per line, for a step or a validation each
step_000200.pt     everything needed to resume, after 200 steps
best.pt            the weights with the lowest validation loss

A checkpoint is written to a temporary file, synced and renamed, and older ones are deleted only
after that, so a checkpoint under its own name is whole. The file is a zip archive, whose checksums
show whether a disk has damaged it since.
"""

import io
import math
import re
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch

from attention_paths.fingerprint import differs
from config import MAY_CHANGE, Config, saved_config
from data.tokenizer import copy_tokenizer
from errors import UserError, did_you_mean, first_line
from layers.heads import formulas_hash
from model import GPT
from optim import learning_rate
from runtime.device import environment, uncommitted
from runtime.files import atomic_write, convert, read_json, sha256_of, write_json

# The values that a Config may have.
Settings = dict[str, None | bool | int | float | str]
# Learnable scalars of attention, which another variant may not have.
SCALARS = ("s", "b", "p_n", "sink")
# Settings of a model that the names and shapes of its weights may not reveal.
HIDDEN = ("projections", "q_rank", "kv_rank", "n_head", "norm", "tie_embeddings", "tokenizer")


class State(msgspec.Struct, kw_only=True):
    """The content of a checkpoint; best.pt has no optimizers and no scaler."""

    model: dict[str, torch.Tensor]
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
    dtype: torch.dtype  # of matrix products: see runtime.device.autocast
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    step: int = 0  # the updates done
    best_val_loss: float = math.inf
    tokens: int = 0  # of an epoch of the data
    resumed_at: int | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def state(self, config: Config, best: bool = False) -> State:
        """All that resuming needs; for a best.pt, what evaluations and new runs need."""
        return State(
            model=self.model.state_dict(), step=self.step, config=settings_of(config),
            best_val_loss=self.best_val_loss, tokens=self.tokens,
            optimizers=[] if best else [optimizer.state_dict() for optimizer in self.optimizers],
            scaler={} if best else self.scaler.state_dict(),
        )  # fmt: skip

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
                    group.update(own)  # the config's, such as `fused` on another device
                check_shapes(optimizer)
            if state.scaler:  # empty in a run that did not scale its loss: it may go on in float16
                self.scaler.load_state_dict(state.scaler)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            *_, reason = str(error).splitlines() or [type(error).__name__]
            raise UserError(
                f"the checkpoint of step {state.step} does not fit this run: {reason.strip()}"
            ) from error
        self.step = self.resumed_at = state.step
        self.best_val_loss, self.tokens = state.best_val_loss, state.tokens


def check_shapes(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a state of another shape, with which a fused step would crash."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if torch.as_tensor(value).shape != (() if name == "step" else parameter.shape):
                raise ValueError(f"the optimizer's {name} has another shape than its parameter")


# ---- writing ----


def formulas_of(run: Path) -> str | None:
    """The fingerprint of the formulas that a run began with, if it is recorded."""
    return (read_json(run / "environment.json", dict[str, Any]) or {}).get("formulas")


def edited_formulas(run: Path, config: Config) -> str | None:
    """What a run began with, in words, where attention.py has other formulas now; else None."""
    if differs(formulas_of(run), formulas_hash(config)):
        return f"other formulas of {config.attention!r} than attention.py has now"
    return None


def write_header(run: Path, config: Config, attention: dict, resumed_at: int | None) -> None:
    """Write the settings and environment to a run's folder, before its first step.

    `attention` is what layers.selfcheck found. A resumed run keeps the fingerprint of the formulas
    that it began with, and says where they have changed since; each start has a patch.
    """
    copy_tokenizer(config.tokenizer, run)
    began = read_json(run / "config.json", dict[str, Any]) if config.resume else None
    init_from = {"init_from": began.get("init_from", "")} if began else {}  # a resume has none
    write_json(run / "config.json", config.as_dict() | init_from)
    made = environment(config.device) | attention
    if resumed_at is not None:
        if edited := edited_formulas(run, config):
            print(f"warning: {run} began with {edited}", file=sys.stderr)
        made["formulas"] = formulas_of(run)
    write_json(run / "environment.json", made)
    name = f"uncommitted_{resumed_at:06d}.patch" if resumed_at else "uncommitted.patch"
    with atomic_write(run / name) as file:
        file.write(uncommitted())


def settings_of(config: Config) -> dict[str, Any]:
    """The settings of a run as a checkpoint holds them, wherever the tokenizer's file lies."""
    return config.as_dict() | {"tokenizer": config.tokenizer_id}


class Saver:
    """Writes a run's checkpoints in a background thread, one after another.

    Of the step_*.pt in the run's folder, the newest `keep_last` are kept, and those at multiples of
    `keep_every` steps (0: none). Damaged ones, later than the step that the run was resumed at, are
    deleted once a checkpoint is saved. With `quiet`, as on all ranks but 0, nothing is written.
    """

    def __init__(self, run: Path, config: Config, resumed_at: int | None, quiet: bool = False):
        self.run, self.quiet = run, quiet
        self.last, self.every = config.keep_last, config.keep_every
        self.intact = [path for path in checkpoints(run) if step_of(path) <= (resumed_at or 0)]
        self.thread = ThreadPoolExecutor(1)
        self.pending = self.thread.submit(lambda: None)

    def save(self, kind: str, state: State) -> None:
        """Copy the state to host memory, then write it in the background, as a "step" or "best".

        First waits for the previous checkpoint. Raises UserError if writing that failed.
        """
        if self.quiet:
            return
        self.wait()
        content = io.BytesIO()
        torch.save(msgspec.structs.asdict(state), content)
        name = "best.pt" if kind == "best" else f"step_{state.step:06d}.pt"
        self.pending = self.thread.submit(self._write, self.run / name, content)

    def wait(self) -> None:
        """Wait until everything is on disk. Raises UserError if a write failed."""
        self.pending.result()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.wait()
        self.thread.shutdown()  # finishes a write in progress, even after an error

    def _write(self, path: Path, content: io.BytesIO) -> None:
        with atomic_write(path) as file:
            file.write(content.getbuffer())
        if path.name != "best.pt":
            older, self.intact = self.intact, [path, *self.intact]
            milestones = [p for p in older if self.every and step_of(p) % self.every == 0]
            for old in {*checkpoints(self.run)} - {*self.intact[: self.last], *milestones}:
                old.unlink()


# ---- what is there ----


def checkpoints(run: str | Path) -> list[Path]:
    """The checkpoints that a run can be resumed from, the newest first."""
    files = [path for path in Path(run).glob("*.pt") if re.fullmatch(r"step_\d{6,}", path.stem)]
    return sorted(files, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def step(run: str | Path) -> int | None:
    """The step of a run's newest checkpoint, None where there is none."""
    return next(map(step_of, checkpoints(run)), None)


def is_checkpoint(run: str | Path) -> bool:
    """Whether the path is the file of a checkpoint, not the folder of a run."""
    return Path(run).suffix == ".pt"


def folder_of(run: str | Path) -> Path:
    """The folder of a run, or the folder that a checkpoint's file lies in."""
    return Path(run).parent if is_checkpoint(run) else Path(run)


def resumes(run: Path, resume: bool | str) -> bool:
    """Whether the run in a folder is resumed; with "auto" it is if it has a checkpoint.

    Raises UserError where there is nothing to resume, or a new run would overwrite something. A run
    that ended before its first checkpoint was saved may be overwritten: it has no steps.
    """
    if checkpoints(run):
        if not resume:
            raise UserError(f"{run} holds a run: use --resume to continue it, or another --out_dir")
        return True
    if resume is True:
        raise UserError(no_checkpoint(run))
    path, metrics = run / "config.json", run / "metrics.jsonl"
    foreign = "attention" not in (read_json(path, dict[str, Any]) or {"attention": None})
    if foreign or (metrics.is_file() and b'"loss"' in metrics.read_bytes()):
        raise UserError(
            f"{path if foreign else metrics} belongs to no run that can be resumed, and a new run "
            "would overwrite it; move it away, or give another --out_dir"
        )
    return False


def no_checkpoint(run: str | Path) -> str:
    """A sentence on a path without a checkpoint."""
    run = Path(run)
    hint = "" if run.exists() else did_you_mean(str(run), map(str, run.parent.glob("*")))
    return (
        f"{run}: no checkpoint in it; {hint}a run is a folder that train.py made, or "
        "the .pt file of a checkpoint in it"
    )


# ---- reading ----


class Found(NamedTuple):
    """A checkpoint's file, and its step and sha256, which identify its weights in results."""

    path: Path
    id: dict[str, Any]


def find(run: str | Path, which: str = "latest", quiet: bool = False) -> Found:
    """The newest intact checkpoint of a run, or its best weights.

    A file whose checksums or content are wrong is reported on standard error, and the previous
    checkpoint is used. `run` may also be the file of a checkpoint. Raises UserError where none is
    intact.
    """
    if is_checkpoint(run):
        files = [Path(run)]
    else:
        files = [Path(run) / "best.pt"] if which == "best" else checkpoints(run)
    files = [path for path in files if path.is_file()]
    for path in files:
        try:
            with zipfile.ZipFile(path) as archive:
                if wrong := archive.testzip():
                    raise UserError(f"the checksum of {wrong} in it is wrong")
            return Found(path, {"step": load(path).step, "sha256": sha256_of(path)})
        except Exception as error:  # zipfile raises many types for damaged files
            if not quiet:
                print(f"warning: {path} is damaged: {first_line(error)}", file=sys.stderr)
    if files:
        raise UserError(f"{files[0]} is damaged, and no earlier checkpoint is intact")
    raise UserError(no_checkpoint(run))


def load(path: Path) -> State:
    """A checkpoint's content, memory-mapped: its CPU tensors are read when first used.

    Nothing in the file is run as code. Raises UserError where it cannot be read.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load raises many types for damaged files
        raise UserError(f"{path}: the checkpoint cannot be read: {first_line(error)}") from error
    return convert(content, State, path)


def load_to_resume(run: Path, config: Config, quiet: bool) -> State:
    """The latest checkpoint of a run that this config continues.

    Raises UserError where the run was trained with settings that a resumed one may not change, or
    another schedule: the learning rate of its last step would not have been the same.
    """
    state = load(find(run, quiet=quiet).path)
    before = Config().as_dict() | state.config  # with defaults of settings that came later
    now = settings_of(config)
    schedule = {key: before[key] for key in ("max_iters", "cooldown_iters")}
    last = max(0, state.step - 1)
    rates = {learning_rate(last, c) for c in (config, config.replace(**schedule))}
    for key, saved in before.items():
        fixed = key not in MAY_CHANGE
        fixed |= key in schedule and state.step > 0 and len(rates) > 1
        if fixed and now.get(key) != saved:
            raise UserError(
                f"{run} was trained with {key} = {saved!r}, so it cannot be resumed with "
                f"{now.get(key)!r}; a new run from its weights: train.py {run}/config.json "
                f"--init_from={run} --out_dir=NEW"
            )
    return state


def read_config(run: str | Path) -> Config:
    """The Config that a run, or the file of a checkpoint, was saved with.

    Raises UserError where there is none or it is no longer valid.
    """
    path = Path(run) if is_checkpoint(run) else Path(run) / "config.json"
    values = load(path).config if is_checkpoint(run) else read_json(path, Settings)
    if values is None:
        raise UserError(no_checkpoint(run))
    return saved_config(values, path).replace(out_dir=str(folder_of(run)))  # it may have moved


def load_weights(model: GPT, run: str | Path, which: str = "latest") -> Found:
    """Copy a run's weights into the model, as `copy_weights`; returns their checkpoint."""
    found = find(run, which)
    copy_weights(model, load(found.path), found.path)
    return found


def copy_weights(model: GPT, state: State, source: str | Path) -> None:
    """Copy the weights of a state into the model.

    The attention variant may differ: its learnable scalars then keep their initial values. Raises
    UserError where the models differ in anything else.
    """
    settings, wanted = Config().as_dict() | state.config, settings_of(model.config)
    different = [f"{k} {settings[k]} for {wanted[k]}" for k in HIDDEN if settings[k] != wanted[k]]
    states = state.model, model.state_dict()
    there, here = ({name: tuple(x.shape) for name, x in weights.items()} for weights in states)
    for name in sorted({name for name, _ in there.items() ^ here.items()}):
        if name.rpartition(".")[2] not in SCALARS or (name in there and name in here):
            different.append(f"{name} {there.get(name)} for {here.get(name)}")
    if different:
        raise UserError(
            f"{source}: its model differs: {', '.join(different[:3])} do not fit; only the "
            "attention may be another, if it projects the same from its input"
        )
    model.load_state_dict(state.model, strict=False)
