"""The log of a run: printed lines, metrics.jsonl, wandb."""

import importlib.util
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from config import Config
from errors import UserError, discard_output, first_line
from runtime.files import atomic_write, read_json, write_json, writing


def say(text: str) -> None:
    """Print a line. A closed pipe or terminal, or a full disk, does not end the run."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:  # the output's encoding has no such character
        print(text.encode("ascii", "backslashreplace").decode(), flush=True)
    except OSError:
        discard_output()


class Log:
    """Printed lines, metrics.jsonl and wandb; none of them with `quiet`, as on all ranks but 0.

    A run that is resumed continues its metrics.jsonl after the step `resumed_at`.
    """

    def __init__(self, config: Config, resumed_at: int | None, quiet: bool):
        self.config = config
        self.quiet = quiet
        if quiet:
            return
        run = Path(config.out_dir)
        earlier = []
        if resumed_at is not None:  # the run repeats later steps
            earlier = [values for values in read_metrics(run) if values["step"] <= resumed_at]
        path = run / "metrics.jsonl"
        with atomic_write(path, "w") as file:
            file.writelines(json.dumps(values) + "\n" for values in earlier)
        self.file = open(path, "a")
        self.wandb = start_wandb(config, resumed=resumed_at is not None)
        for values in earlier:  # a killed run may not have sent them to wandb
            self.send(values)

    def print(self, text: str) -> None:
        if not self.quiet:
            say(text)

    def progress(self, items: Iterable, name: str, count: int) -> Any:
        """The items; on a terminal, with a progress bar if they take more than two seconds."""
        hidden = self.quiet or None  # None: hidden if there is no terminal
        return tqdm(items, name, count, leave=False, delay=2, disable=hidden)

    def validation(self, step: int, val_loss: float) -> None:
        self.print(f"step {step}/{self.config.max_iters}: validation loss {val_loss:.4f}")
        self.write({"step": step, "val_loss": val_loss})

    def step(self, step: int, **values: float) -> None:
        """Log an update: loss, lr, grad_norm, ms, tokens_per_s, mfu (if known), memory_mb."""
        self.write({"step": step, **values})
        if step % self.config.log_interval == 0:
            steps_left = self.config.max_iters - step
            time_left = timedelta(seconds=round(values["ms"] * steps_left / 1000))
            mfu = f", MFU {100 * values['mfu']:.1f}%" if "mfu" in values else ""
            self.print(
                f"step {step}/{self.config.max_iters}: loss {values['loss']:.4f}, "
                f"lr {values['lr']:.2e}, grad norm {values['grad_norm']:.2f}, "
                f"{values['ms']:.0f} ms, {values['tokens_per_s']:,.0f} tokens/s{mfu}, "
                f"{values['memory_mb']:,.0f} MB, "
                f"{time_left} left"
            )

    def write(self, values: dict[str, float]) -> None:
        """Write a line to metrics.jsonl, and to wandb. Raises UserError if the disk is full."""
        if self.quiet:
            return
        # JSON holds no infinite values
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        with writing(self.file.name):
            self.file.write(json.dumps(finite) + "\n")
            self.file.flush()
        self.send(finite)

    def send(self, values: dict[str, float]) -> None:
        """Send values to wandb, which merges values of the same step; skip steps that it has."""
        if self.wandb and values["step"] >= self.wandb.starting_step:
            with self.without_wandb_on_error():
                self.wandb.log(values, step=values["step"])

    @contextmanager
    def without_wandb_on_error(self) -> Iterator[None]:
        """Go on without wandb where its process has died, as by a signal to all processes."""
        try:
            yield
        except Exception as error:  # wandb's, or of the connection to its process
            self.wandb = None
            say(f"wandb has stopped ({first_line(error)}): metrics.jsonl has every step")

    def sync(self) -> None:
        """Sync metrics.jsonl to disk, so that it is never behind a checkpoint."""
        if not self.quiet:
            with writing(self.file.name):
                os.fsync(self.file.fileno())

    def finish(self) -> None:
        """Close wandb's run. If the process ends without it, wandb marks the run as failed."""
        if not self.quiet and self.wandb:
            with self.without_wandb_on_error():
                self.wandb.finish()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Read the steps and validations in a run's metrics.jsonl; [] if there is no such file.

    A line that a kill has cut short is left out.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        with suppress(ValueError, RecursionError):
            line = json.loads(text)
            if isinstance(line, dict) and type(line.get("step")) is int:
                lines.append(line)
    return lines


def wandb_mode(config: Config) -> str:
    """Return the setting or, if it is "auto", the mode in wandb's environment variables, if any."""
    if config.wandb_mode != "auto":
        return config.wandb_mode
    # a variable of transformers and of earlier versions of wandb
    if os.environ.get("WANDB_DISABLED", "").lower() in ("1", "on", "y", "yes", "t", "true"):
        return "disabled"
    return os.environ.get("WANDB_MODE") or "auto"


def wandb_settings(config: Config) -> Any:
    """Return wandb's settings: ours and, where we have none, wandb's environment variables.

    Returns None if wandb is disabled or, where nothing asks for it, not installed. Raises UserError
    for what wandb does not allow, such as a project called "team/project".
    """
    mode = wandb_mode(config)
    if mode == "disabled":
        return None
    if importlib.util.find_spec("wandb") is None:
        if mode == "auto":
            return None
        raise UserError(f"wandb_mode = {mode!r}, but wandb is not installed: pip install wandb")
    import pydantic  # wandb depends on it
    import wandb  # takes a second

    run = Path(config.out_dir)
    settings = wandb.Settings(
        project="sharp-attention",
        run_name="/".join(run.parts[-2:]),
        root_dir=str(run),
        init_timeout=8,
        finish_timeout=config.timeout / 2,  # the other ranks wait for the upload
        silent=True,
        resume="allow",
    )
    wanted = {"project": config.wandb_project, "entity": config.wandb_entity}
    if mode != "auto":
        wanted["mode"] = mode
    try:
        settings.update_from_env_vars(dict(os.environ))
        for name, value in wanted.items():
            if value:
                setattr(settings, name, value)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        setting = f"{first['loc'][0]} = {first['input']!r}"
        raise UserError(f"wandb: {setting}: {first['msg']}") from error
    except (wandb.errors.Error, ValueError) as error:
        project = config.wandb_project or os.environ.get("WANDB_PROJECT", "")
        hint = "; --wandb_entity=TEAM names a team" if "/" in project else ""
        raise UserError(f"wandb: {first_line(error)}{hint}") from error
    if "/" in (settings.entity or ""):
        raise UserError(f"wandb: the entity {settings.entity!r} must be only the name of a team")
    return settings


def start_wandb(config: Config, resumed: bool) -> Any:
    """Start a wandb run; returns None if wandb is disabled, not installed or not logged in to.

    Its id is saved in wandb.json in the run's folder, so that a resumed run continues it.
    """
    settings = wandb_settings(config)
    is_auto = wandb_mode(config) == "auto"
    if settings is None:
        if is_auto:
            say("wandb is off: it is not installed")
        return None
    import wandb

    if is_auto:
        try:
            has_key = wandb.login(prompt=False, verify=False)
        except wandb.errors.Error as error:  # WANDB_API_KEY is not of a key's form
            say(f"wandb is off: {first_line(error)}")
            return None
        if not has_key:
            say("wandb is off: `wandb login` or --wandb_mode=offline turns it on")
            return None
    path = Path(config.out_dir, "wandb.json")
    saved = read_json(path, dict[str, str]) if resumed else None
    init = partial(
        wandb.init,
        id=(saved or {}).get("id"),
        config=config.as_dict(),
        settings=settings,
    )
    try:
        started = init()
    except wandb.errors.Error as error:
        say(f"wandb does not answer ({first_line(error)}): this run is logged offline")
        started = init(mode="offline")
    write_json(path, {"id": started.id})
    if started.offline:
        say(f"wandb logs this run offline; upload it with: wandb sync {started.sync_dir}")
    return started
