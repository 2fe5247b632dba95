"""The log of a run: printed lines, metrics.jsonl, wandb."""

import json
import math
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from config import Config
from errors import first_line
from runtime.files import atomic_write, read_json, write_json, writing


def say(text: str) -> None:
    """Print a line. A closed pipe or terminal, or a full disk under the output, ends no run."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Log:
    """Printed lines, metrics.jsonl and wandb; none of them with `quiet`, as on all ranks but 0.

    A run that is resumed continues its metrics.jsonl after the step `resumed_at`.
    """

    def __init__(self, run: Path, config: Config, resumed_at: int | None, quiet: bool):
        self.config, self.quiet = config, quiet
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

    def print(self, text: str) -> None:
        if not self.quiet:
            say(text)

    def progress(self, items: Iterable, name: str, count: int | None = None) -> Any:
        """The items; on a terminal, with a progress bar if they take more than two seconds."""
        hidden = True if self.quiet else None  # None: where there is no terminal
        return tqdm(items, name, count, leave=False, delay=2, disable=hidden)

    def validation(self, step: int, val_loss: float) -> None:
        self.print(f"step {step}/{self.config.max_iters}: validation loss {val_loss:.4f}")
        self.write({"step": step, "val_loss": val_loss})

    def step(self, step: int, **values: float | None) -> None:
        """Log an update: loss, lr, grad_norm, ms, tokens_per_s, mfu (None: unknown), memory_mb."""
        self.write({"step": step, **values})
        if step % self.config.log_interval == 0:
            shown = {key: value for key, value in values.items() if value is not None}
            left = timedelta(seconds=round(shown["ms"] * (self.config.max_iters - step) / 1000))
            self.print(
                f"step {step}/{self.config.max_iters}: loss {shown['loss']:.4f}, "
                f"lr {shown['lr']:.2e}, grad norm {shown['grad_norm']:.2f}, {shown['ms']:.0f} ms, "
                f"{shown['tokens_per_s']:,.0f} tokens/s"
                + (f", MFU {100 * shown['mfu']:.1f}%" if "mfu" in shown else "")
                + f", {shown['memory_mb']:,.0f} MB, {left} left"
            )

    def write(self, values: dict[str, float | None]) -> None:
        """Write a line to metrics.jsonl, and to wandb. Raises UserError where the disk is full."""
        if self.quiet:
            return
        # leaves out values that are unknown or not finite, which JSON cannot hold
        known = {k: v for k, v in values.items() if v is not None and math.isfinite(v)}
        with writing(self.file.name):
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
            with writing(self.file.name):
                os.fsync(self.file.fileno())

    def finish(self) -> None:
        """Close wandb's run. A process that ends otherwise leaves it to wandb, as a failure."""
        if not self.quiet and self.wandb:
            self.wandb.finish()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The steps and validations in a run's metrics.jsonl, [] where there is none.

    A line that a kill has cut short is left out.
    """
    path, lines = run / "metrics.jsonl", []
    if path.is_file():
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError, RecursionError):
                lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict) and type(line.get("step")) is int]


def start_wandb(run: Path, config: Config, resumed: bool) -> Any:
    """A wandb run; None where wandb is disabled.

    Its id is saved in wandb.json in the run's folder, so that a resumed run continues it.
    """
    path, mode = run / "wandb.json", config.wandb_mode
    if mode == "disabled":
        return None
    import wandb  # takes a second

    if mode == "auto" and not wandb.login(prompt=False, verify=False):
        say("wandb is off: `wandb login` or --wandb_mode=offline turns it on")
        return None
    mode = cast(Any, "online" if mode == "auto" else mode)
    before = (read_json(path, dict[str, str]) if resumed else None) or {}
    options: dict[str, Any] = dict(
        project=config.wandb_project, name="/".join(run.parts[-2:]), dir=run, resume="allow",
        id=before.get("id"), config=config.as_dict(),
        settings=wandb.Settings(init_timeout=8, silent=True),
    )  # fmt: skip
    try:
        started = wandb.init(mode=mode, **options)
    except wandb.errors.Error as error:
        say(f"wandb does not answer ({first_line(error)}): this run is logged offline")
        mode, started = "offline", wandb.init(mode="offline", **options)
    write_json(path, {"id": started.id})
    if mode == "offline":
        say(f"wandb logs this run offline; upload it with: wandb sync {Path(started.dir).parent}")
    return started
