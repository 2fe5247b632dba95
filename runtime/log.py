"""The log of a run: printed lines, metrics.jsonl, wandb."""

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import msgspec
from tqdm import tqdm

from config import Config
from errors import UserError, first_line
from runtime.files import atomic_write, open_regular, read_json, write_json

# Seconds between two updates of a progress bar, on a terminal and in a file.
TERMINAL_S, FILE_S = 0.1, 60


class BestEffortStream:
    """A stream whose write errors are ignored: a closed pipe, a full disk, a closed terminal.

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


class Log:
    """Printed lines, metrics.jsonl and wandb; none of them with `quiet`, as on all ranks but 0.

    A run that is resumed continues its metrics.jsonl after the step `resumed_at`.
    """

    def __init__(self, run: Path, config: Config, resumed_at: int | None, quiet: bool):
        self.config, self.quiet, self.first_step = config, quiet, resumed_at or 0
        self.ms_a_step = 0.0
        if quiet:
            return
        path, before = run / "metrics.jsonl", []
        if resumed_at is not None:  # the run repeats later steps
            before = [values for values in read_metrics(run) if values["step"] <= resumed_at]
        with atomic_write(path, "w") as file:
            file.writelines(json.dumps(values) + "\n" for values in before)
        self.file = open(path, "a")
        self.wandb = start_wandb(run, config, resumed=resumed_at is not None)
        for values in before:  # a killed run may not have sent them to wandb
            self.send(values)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self.quiet:
            with suppress(OSError):  # what could not be written has been reported
                self.file.close()
            if self.wandb:
                self.wandb.finish(exit_code=0 if error is None else 1)

    def print(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    def progress(self, items: Iterable, name: str, count: int | None = None) -> Any:
        """The items, with a progress bar if they take more than two seconds."""
        every = TERMINAL_S if sys.stderr.isatty() else FILE_S
        return tqdm(
            items, name, count, leave=False, delay=2, mininterval=every, maxinterval=10 + every,
            disable=self.quiet,
        )  # fmt: skip

    def validation(self, step: int, val_loss: float) -> None:
        self.print(f"step {step}/{self.config.max_iters}: validation loss {val_loss:.4f}")
        self.write({"step": step, "val_loss": val_loss})

    def step(self, step: int, **values: float | None) -> None:
        """Log an update: loss, lr, grad_norm, ms, tokens_per_s, mfu (None: unknown), memory_mb."""
        self.write({"step": step, **values})
        shown = {key: value for key, value in values.items() if value is not None}
        # the first steps compile and allocate: they say nothing about later ones
        if step <= self.first_step + 2:
            self.ms_a_step = shown["ms"]
        self.ms_a_step += 0.1 * (shown["ms"] - self.ms_a_step)
        left = timedelta(seconds=round(self.ms_a_step * (self.config.max_iters - step) / 1000))
        if step % self.config.log_interval == 0:
            self.print(
                f"step {step}/{self.config.max_iters}: loss {shown['loss']:.4f}, "
                f"lr {shown['lr']:.2e}, grad norm {shown['grad_norm']:.2f}, {shown['ms']:.0f} ms, "
                f"{shown['tokens_per_s']:,.0f} tokens/s"
                + (f", MFU {100 * shown['mfu']:.1f}%" if "mfu" in shown else "")
                + f", {shown['memory_mb']:,.0f} MB, {left} left"
            )

    def write(self, values: dict[str, float | None]) -> None:
        """Write a line to metrics.jsonl, and to wandb."""
        if self.quiet:
            return
        # leaves out values that are unknown or not finite, which JSON cannot hold
        known = {k: v for k, v in values.items() if v is not None and math.isfinite(v)}
        with self._writing():
            self.file.write(json.dumps(known) + "\n")
            self.file.flush()
        self.send(known)

    def send(self, values: dict[str, float]) -> None:
        """Send values to wandb, which joins those of one step, unless it already has the step."""
        if self.wandb and values["step"] >= self.wandb.starting_step:
            self.wandb.log(values, step=values["step"])

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


# ---- metrics.jsonl ----


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The steps and validations in a run's metrics.jsonl, [] where there is none.

    A line that a kill has cut short is left out. Raises UserError where the file cannot be read.
    """
    path, lines = run / "metrics.jsonl", []
    try:
        with open_regular(path) as file:
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    for line in text.splitlines():
        with suppress(ValueError, RecursionError):
            lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict) and type(line.get("step")) is int]


# ---- wandb ----


class WandbRun(msgspec.Struct):
    """The content of wandb.json."""

    id: Annotated[str, msgspec.Meta(pattern=r"^[\w.-]{1,128}$")]  # what wandb takes as an id


def start_wandb(run: Path, config: Config, resumed: bool) -> Any:
    """A wandb run, or None where wandb is disabled or not installed.

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
    mode = config.wandb_mode
    if mode == "auto":
        mode = "online" if wandb.login(prompt=False, verify=False) else "offline"
    before = read_json(run / "wandb.json", WandbRun) if resumed else None

    def start(mode: Any) -> Any:
        return wandb.init(
            mode=mode, project=config.wandb_project, name=run.name, dir=run,
            id=before.id if before else None, resume="allow", config=config.as_dict(),
            settings=wandb.Settings(init_timeout=8, silent=True),
        )  # fmt: skip

    try:
        started = start(mode)
    except wandb.errors.Error as error:
        print(f"wandb does not answer ({first_line(error)}): this run is logged offline")
        mode, started = "offline", start("offline")
    write_json(run / "wandb.json", {"id": started.id})
    if mode == "offline":
        folder = Path(started.dir).parent
        print(f"wandb logs this run offline; upload it with: wandb sync {folder}")
    return started
