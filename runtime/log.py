"""What a run says: printed lines, metrics.jsonl, wandb."""

import json
import math
import netrc
import os
from collections import deque
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from config import Config
from errors import UserError
from runtime import checkpoint
from runtime.files import read_json, write_json

# A spike: a loss so many standard deviations above the mean of so many steps before it, at least.
SPIKE, SPIKE_STEPS, SPIKE_AFTER = 7, 1000, 100


class Log:
    """Printed lines, metrics.jsonl and wandb; on processes other than the first it does nothing.

    Goes on after the step `resumed_at`, if any; `batch_location(step)` says where the batch of a
    step, counted from 1, begins.
    """

    def __init__(self, run: Path, config: Config, resumed_at: int | None, batch_location, quiet):
        self.config, self.quiet, self.wandb, self.row = config, quiet, None, {}
        self.batch_location, self.losses = batch_location, deque(maxlen=SPIKE_STEPS)
        if quiet:
            return
        path = run / "metrics.jsonl"
        kept = checkpoint.start_metrics(path, resumed_at)
        for line in kept:
            if isinstance(line.get("loss"), float):
                self.losses.append(line["loss"])
        self.file = open(path, "a")
        self.wandb = start_wandb(run, config, resumed=resumed_at is not None)
        if self.wandb:
            for line in kept:  # a kill may have come before wandb had sent them
                self.to_wandb(line)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if not self.quiet:
            self.file.close()
            if self.wandb:
                if error is None:
                    self.send_row()
                self.wandb.finish(exit_code=0 if error is None else 1)

    def say(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    def write(self, values: dict) -> None:
        if self.quiet:
            return
        # what is unknown, or no number that JSON has, is left out
        values = {k: v for k, v in values.items() if v is not None and math.isfinite(v)}
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        if self.wandb:
            self.to_wandb(values)

    def to_wandb(self, values: dict) -> None:
        """Send whole rows, a step with its validation: wandb never adds to one that it has."""
        if self.row and self.row["step"] != values["step"]:
            self.send_row()
        self.row |= values

    def send_row(self) -> None:
        row, self.row = self.row, {}
        if row and row["step"] >= self.wandb.starting_step:  # the steps before are in wandb
            self.wandb.log(row, step=row["step"], commit=True)

    def sync(self) -> None:
        """Bring metrics.jsonl to the disk, so that it never ends before a checkpoint does."""
        if not self.quiet:
            os.fsync(self.file.fileno())

    def validation(self, step: int, val_loss: float) -> None:
        self.say(f"step {step}/{self.config.max_iters}: validation loss {val_loss:.4f}")
        self.write({"step": step, "val_loss": val_loss})

    def step(self, *, left_s: float, **values) -> None:
        if self.quiet:
            return
        spike = self.spike(values["loss"])
        self.write(values | {"spike": spike})
        if spike:
            self.say(
                f"step {values['step']}: loss spike, {values['loss']:.4f} is {spike:.1f} standard "
                f"deviations above the steps before; the batch begins "
                f"{self.batch_location(values['step'])}"
            )
        if values["step"] % self.config.log_interval == 0:
            mfu = f", MFU {100 * values['mfu']:.1f}%" if values["mfu"] else ""
            self.say(
                f"step {values['step']}/{self.config.max_iters}: loss {values['loss']:.4f}, "
                f"lr {values['lr']:.2e}, gradient {values['grad_norm']:.2f}, "
                f"{values['ms']:.0f} ms, {values['tokens_per_s']:,.0f} tokens/s{mfu}, "
                f"{values['memory_mb']:,.0f} MB, {timedelta(seconds=round(left_s))} left"
            )

    def spike(self, loss: float) -> float | None:
        """How many standard deviations a loss is above the steps before it, if that is a spike."""
        if not math.isfinite(loss):
            return None
        before = np.array(self.losses)
        self.losses.append(loss)
        if len(before) < SPIKE_AFTER or not before.std():
            return None
        above = float((loss - before.mean()) / before.std())
        return above if above >= SPIKE else None


def wandb_key(url: str) -> bool:
    """Whether a key is set, in the environment or by `wandb login`; asks no network."""
    try:
        # by its path, as wandb reads it: netrc refuses its own default where others may read it
        path = os.path.expanduser(os.environ.get("NETRC") or "~/.netrc")
        stored = netrc.netrc(path).authenticators(urlsplit(url).netloc)
    except (OSError, netrc.NetrcParseError):
        stored = None
    return bool(os.environ.get("WANDB_API_KEY") or stored)


def start_wandb(run: Path, config: Config, resumed: bool):
    """A wandb run, or None where it is disabled or not installed; waits 8 s for a network.

    Its id is kept in wandb.json of the run's folder, for the run to go on under it.
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
        mode = "online" if wandb_key(wandb.Settings().base_url) else "offline"
    settings = wandb.Settings(init_timeout=8, silent=True)
    file = run / "wandb.json"
    kept = read_json(file) if resumed else None
    wandb_id = kept.get("id") if isinstance(kept, dict) else None
    uploaded = set_aside(run, wandb_id)

    def start(mode: str):
        # an offline part is whole; wandb would not join it to one that its server has
        new = mode == "offline" and uploaded
        return wandb.init(
            mode=mode, project=config.wandb_project, name=run.name, dir=run,
            id=None if new else wandb_id, resume="allow", config=config.as_dict(),
            settings=settings,
        )  # fmt: skip

    try:
        started = start(mode)
    except wandb.errors.Error as error:
        print(f"wandb does not answer ({checkpoint.first_line(error)}): this run is kept offline")
        mode, started = "offline", start("offline")
    write_json(file, {"id": started.id})
    if mode == "offline":
        print(
            f"wandb keeps this run offline; upload it with: wandb sync {Path(started.dir).parent}"
        )
    return started


def set_aside(run: Path, wandb_id: str | None) -> bool:
    """Rename what wandb kept offline of a resumed run, if not uploaded: the next part has it all.

    Says whether wandb's server may have another part of it.
    """
    uploaded, folder = False, run / "wandb"
    for part in list(folder.iterdir()) if wandb_id and folder.exists() else []:
        kind, _, of = part.name.rpartition("-")
        if of == wandb_id and kind.startswith(("run", "offline-run")):
            if kind.startswith("run") or list(part.glob("*.synced")):
                uploaded = True
            else:
                part.rename(folder / f"superseded-{part.name}")
    return uploaded
