"""The log of a run: printed lines, metrics.jsonl, wandb."""

import json
import math
import netrc
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar, cast
from urllib.parse import urlsplit

import msgspec
import numpy as np
from tqdm import tqdm

from config import Config
from errors import UserError, first_line
from runtime.files import atomic_write, open_regular, read_json, write_json

# Seconds between two lines on the progress of a validation or a long step.
PROGRESS_S = 60
# A spike: a loss at least SPIKE standard deviations above the mean of the last SPIKE_STEPS steps,
# once there are SPIKE_AFTER of them.
SPIKE, SPIKE_STEPS, SPIKE_AFTER = 7, 1000, 100

T = TypeVar("T")


class BestEffortStream:
    """A stream whose write errors are ignored: a closed pipe, a full disk, a terminal that is gone.

    What is printed is never worth a run; metrics.jsonl has it.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def best_effort_output() -> Iterator[None]:
    """Go on without standard output or standard error while the block runs, if they are lost."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, BestEffortStream(stream)) for stream in before)
    try:
        yield
    finally:
        for stream in before:
            try:
                stream.flush()
            except OSError:  # else the interpreter would complain when it exits
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
        sys.stdout, sys.stderr = before


class WandbRun(msgspec.Struct):
    """The content of wandb.json."""

    id: Annotated[str, msgspec.Meta(pattern=r"^[\w.-]{1,128}$")]  # what wandb takes as an id


class Log:
    """Printed lines, metrics.jsonl and wandb; none of these with `quiet`, as on all ranks but 0.

    Continues after the step `resumed_at`, if any. `batch_location(step)` describes where the batch
    of a step (1-based) begins in the data. Raises UserError where the run resumes and its
    metrics.jsonl belongs to a different run than `run_id`.
    """

    def __init__(
        self,
        run: Path,
        run_id: str,
        config: Config,
        resumed_at: int | None,
        batch_location: Callable[[int], str],
        quiet: bool,
    ):
        self.config, self.quiet, self.batch_location = config, quiet, batch_location
        self.losses: deque[float] = deque(maxlen=SPIKE_STEPS)
        self.wandb: Any = None  # a wandb.Run
        self.row: dict[str, float] = {}
        self.first_step = resumed_at or 0
        self.seconds_a_step = 0.0
        # of the step it resumes at: None where a stop has cut that validation short
        self.resumed_val_loss: float | None = None
        if quiet:
            return
        path = run / "metrics.jsonl"
        kept = truncate_metrics(path, run_id, resumed_at)
        for line in kept:
            if isinstance(line.get("loss"), float):
                self.losses.append(line["loss"])
            if line["step"] == resumed_at and isinstance(line.get("val_loss"), float):
                self.resumed_val_loss = line["val_loss"]
        self.file = open(path, "a")
        self.wandb = start_wandb(run, config, resumed=resumed_at is not None)
        if self.wandb:
            for line in kept:  # a killed run may not have sent them to wandb
                self.add_to_row(line)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self.quiet:
            with suppress(OSError):  # what could not be written has been reported
                self.file.close()
            if self.wandb:
                if error is None:
                    self.send_row()
                self.wandb.finish(exit_code=0 if error is None else 1)

    def print(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    def progress(self, items: Iterable[T], count: int, name: str) -> Iterator[T]:
        """The items, with a bar on a terminal, and a line a minute in a file."""
        if self.quiet or sys.stderr.isatty():
            yield from tqdm(items, name, count, leave=False, delay=2, disable=self.quiet)
            return
        started = shown = time.monotonic()
        for done, item in enumerate(items):
            if (now := time.monotonic()) - shown >= PROGRESS_S and done:
                left = timedelta(seconds=round((now - started) / done * (count - done)))
                self.print(f"{name}: {done} of {count} batches, {left} left")
                shown = now
            yield item

    def write(self, values: dict[str, float | None]) -> None:
        if self.quiet:
            return
        # leaves out values that are unknown or not finite, which JSON cannot hold
        known = {k: v for k, v in values.items() if v is not None and math.isfinite(v)}
        with self._writing():
            self.file.write(json.dumps(known) + "\n")
            self.file.flush()
        if self.wandb:
            self.add_to_row(known)

    def add_to_row(self, values: dict[str, float]) -> None:
        """Collect a step and its validation in one row: wandb never extends a row it has."""
        if self.row and self.row["step"] != values["step"]:
            self.send_row()
        self.row |= values

    def send_row(self) -> None:
        row, self.row = self.row, {}
        if row and row["step"] >= self.wandb.starting_step:  # wandb already has earlier steps
            self.wandb.log(row, step=row["step"], commit=True)

    def sync(self) -> None:
        """Sync metrics.jsonl to disk, so that it is never behind a checkpoint."""
        if not self.quiet:
            with self._writing():
                os.fsync(self.file.fileno())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Report an error of the disk in a sentence."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.file.name}: {error.strerror}; if the disk is full, free some space, then "
                "continue with --resume"
            ) from error

    def validation(self, step: int, val_loss: float) -> None:
        self.print(f"step {step}/{self.config.max_iters}: validation loss {val_loss:.4f}")
        self.write({"step": step, "val_loss": val_loss})

    def step(
        self,
        *,
        step: int,
        loss: float,
        lr: float,
        grad_norm: float,
        seconds: float,
        tokens: int,
        mfu: float | None,
        memory_mb: float,
        save_ms: float | None = None,
    ) -> None:
        """Log an update of `tokens` tokens that took `seconds`."""
        if self.quiet:
            return
        # the first step compiles and allocates: it says nothing about later ones
        if step <= self.first_step + 2:
            self.seconds_a_step = seconds
        self.seconds_a_step += 0.1 * (seconds - self.seconds_a_step)
        left = timedelta(seconds=round(self.seconds_a_step * (self.config.max_iters - step)))
        ms, tokens_per_s = 1000 * seconds, tokens / seconds
        spike = self.spike(loss)
        self.write(
            {
                "step": step, "loss": loss, "lr": lr, "grad_norm": grad_norm, "ms": ms,
                "tokens_per_s": tokens_per_s, "mfu": mfu, "memory_mb": memory_mb,
                "save_ms": save_ms, "spike": spike,
            }
        )  # fmt: skip
        if spike:
            self.print(
                f"step {step}: loss spike, {loss:.4f} is {spike:.1f} standard deviations above "
                f"the steps before; the batch begins {self.batch_location(step)}"
            )
        if step % self.config.log_interval == 0:
            self.print(
                f"step {step}/{self.config.max_iters}: loss {loss:.4f}, lr {lr:.2e}, "
                f"grad norm {grad_norm:.2f}, {ms:.0f} ms, {tokens_per_s:,.0f} tokens/s"
                + (f", MFU {100 * mfu:.1f}%" if mfu else "")
                + f", {memory_mb:,.0f} MB, {left} left"
            )

    def spike(self, loss: float) -> float | None:
        """By how many standard deviations a loss exceeds previous steps, if it is a spike."""
        if not math.isfinite(loss):
            return None
        previous = np.array(self.losses)
        self.losses.append(loss)
        if len(previous) < SPIKE_AFTER or not previous.std():
            return None
        above = float((loss - previous.mean()) / previous.std())
        return above if above >= SPIKE else None


def truncate_metrics(path: Path, run_id: str, step: int | None) -> list[dict[str, Any]]:
    """Truncate metrics.jsonl after the step that a run resumes from: later steps are repeated.

    Its first line is the run's id. Returns the others that are kept: none for a new run, whose step
    is None. Raises UserError where a run resumes and the file is of another one.
    """
    lines, kept = [], []
    if step is not None:
        for line in read_text(path).splitlines():
            try:
                lines.append(json.loads(line))
            except (ValueError, RecursionError):
                pass  # a line that a kill cut short
    if lines and lines[0] != {"run_id": run_id}:
        raise UserError(
            f"{path} belongs to a different run than the checkpoints beside it: restore the "
            "run's own, or move it away to resume without"
        )
    for values in lines[1:]:
        with suppress(KeyError, TypeError):
            if values["step"] <= step:
                kept.append(values)
    with atomic_write(path, "w") as file:
        file.writelines(json.dumps(values) + "\n" for values in [{"run_id": run_id}, *kept])
    return kept


def read_text(path: Path) -> str:
    """The text of a file, '' where there is none."""
    try:
        with open_regular(path) as file:
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The steps in a run's metrics.jsonl; damaged and unfinished lines are left out."""
    steps = []
    for line in read_text(run / "metrics.jsonl").splitlines():
        with suppress(ValueError, RecursionError):
            values = json.loads(line)
            if isinstance(values, dict) and isinstance(values.get("step"), int):
                steps.append(values)
    return steps


def wandb_key(url: str) -> bool:
    """Whether an API key is set, in the environment or by `wandb login`; uses no network."""
    try:
        # with a path, as wandb reads it: netrc rejects its default file if others may read it
        path = os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")
        stored = netrc.netrc(path).authenticators(urlsplit(url).netloc)
    except (OSError, netrc.NetrcParseError):
        stored = None
    return bool(os.environ.get("WANDB_API_KEY") or stored)


def start_wandb(run: Path, config: Config, resumed: bool) -> Any:
    """A wandb run, or None where wandb is disabled or not installed; waits 8 s for a network.

    Its id is saved in wandb.json in the run's folder, so that a resumed run continues it.
    """
    if config.wandb_mode == "disabled":
        return None
    try:
        import wandb
    except ImportError:
        if config.wandb_mode != "auto":
            raise UserError(
                f"wandb_mode = {config.wandb_mode!r}, but wandb is not installed: pip install wandb"
            ) from None
        print("wandb is not installed: this run is logged in metrics.jsonl only")
        return None
    online = config.wandb_mode == "online"
    if config.wandb_mode == "auto":
        online = wandb_key(wandb.Settings().base_url)
    settings = wandb.Settings(init_timeout=8, silent=True)
    file = run / "wandb.json"
    kept = read_json(file, WandbRun) if resumed else None
    wandb_id = kept.id if kept else None
    uploaded = supersede_offline_parts(run, wandb_id)

    def start(online: bool) -> Any:
        # an offline part has the whole run; wandb cannot merge it with one on its server
        new = uploaded and not online
        return wandb.init(
            mode="online" if online else "offline", project=config.wandb_project, name=run.name,
            dir=run, id=None if new else wandb_id, resume="allow", config=config.as_dict(),
            settings=settings,
        )  # fmt: skip

    try:
        started = start(online)
    except wandb.errors.Error as error:
        print(f"wandb does not answer ({first_line(error)}): this run is kept offline")
        online, started = False, start(False)
    write_json(file, {"id": started.id})
    if not online:
        print(
            f"wandb keeps this run offline; upload it with: wandb sync {Path(started.dir).parent}"
        )
    return started


def supersede_offline_parts(run: Path, wandb_id: str | None) -> bool:
    """Rename a resumed run's offline parts that were not uploaded: the next part contains them.

    Returns whether wandb's server may have another part of the run.
    """
    uploaded, folder = False, run / "wandb"
    if folder.is_symlink():  # what it leads to is not this run's
        return False
    for part in list(folder.iterdir()) if wandb_id and folder.is_dir() else []:
        kind, _, run_id = part.name.rpartition("-")
        if run_id == wandb_id and kind.startswith(("run", "offline-run")):
            if kind.startswith("run") or list(part.glob("*.synced")):
                uploaded = True
            else:
                part.rename(folder / f"superseded-{part.name}")
    return uploaded
