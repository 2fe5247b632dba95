"""Planned runs: what is left of them, what that will cost, and training it."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from config import MAY_CHANGE_ON_RESUME, Config, accumulation_steps
from data.shards import check_tokenizer, list_shards
from errors import EXIT_MISTAKE, UserError
from runtime import checkpoint
from runtime.device import ROOT, pick_device
from runtime.distributed import EXIT_STOPPED
from runtime.files import is_locked, read_json
from runtime.log import read_text

# A resumed run may change these, but planned runs all keep theirs.
RECIPE = {"max_iters", "cooldown_iters"}
# Between two looks at a run that another process is training.
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class PlannedRun:
    """A run to train: its name, its settings as config and arguments, and its base run."""

    name: str
    config: Config
    arguments: list[str]
    base: "PlannedRun | None" = None  # whose weights it starts from
    kept: int | None = None  # the step of the base's checkpoint it starts from; None: its last
    view: str = ""  # how a row of a table evaluates it, as in softmax:yarn; empty: as usual

    @property
    def folder(self) -> Path:
        return Path(self.config.out_dir)

    @property
    def step(self) -> int | None:
        return checkpoint.step(self.folder)

    @property
    def finished(self) -> bool:
        return self.step is not None and self.step >= self.config.max_iters

    @property
    def tokens(self) -> int:
        """Tokens trained on so far, including those of the base."""
        steps = (self.step or 0) + (self.kept or 0)
        before = self.base.tokens if self.base and self.kept is None else 0
        return before + steps * self.config.total_batch_size

    @property
    def tokens_left(self) -> int:
        return (self.config.max_iters - (self.step or 0)) * self.config.total_batch_size

    def command(self, processes: int | None = None) -> list[str] | None:
        """The command that trains the rest of the run; None if nothing is left.

        It trains in `processes` processes, by default one for each GPU.
        """
        if self.finished:
            return None
        arguments = self.arguments
        if self.step is not None:
            arguments = [a for a in arguments if not a.startswith("--init_from")] + ["--resume"]
        launcher, processes = [sys.executable], processes or processes_of(self.config)
        if processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone"]
            launcher += [f"--nproc_per_node={processes}"]
        return [*launcher, os.path.relpath(ROOT / "train.py"), *arguments]

    def entry(self, values: list[float], evaluation: dict) -> dict:
        """The run in table.json, with its values for the columns and where these are from."""
        return {
            "seed": self.config.seed,
            "values": values,
            "run": str(self.folder),
            "step": self.step,
            "tokens": self.tokens,
            "began_with": self.config.init_from or None,
            "environment": read_json(self.folder / "environment.json"),
            "evaluation": evaluation,
        }

    def disagreement(self) -> str | None:
        """How the run in the folder differs from this one; None if it does not.

        That is a setting, with both values, or its initial weights.
        """
        if self.step is None:
            return None
        saved = checkpoint.settings_of(checkpoint.read_config(self.folder))
        for key, own in checkpoint.settings_of(self.config).items():
            same = saved[key] == own or key in MAY_CHANGE_ON_RESUME - RECIPE - {"data_dir"}
            if key == "data_dir":
                same = Path(saved[key]).resolve() == Path(own).resolve()
            if not same:
                return f"{key} = {saved[key]!r}, not {own!r}"
        if self.base:
            start = self.config.init_from
            current = self.base.step is not None and checkpoint.checkpoint_id(start)
            if read_json(self.folder / "began_with.json") != current:
                return f"initial weights other than those now in {start}"
        return None


def with_bases(runs: list[PlannedRun]) -> list[PlannedRun]:
    """The runs with their unfinished bases, each base before the runs that start from it."""
    ordered: dict[Path, PlannedRun] = {}
    for run in runs:
        if run.base and not run.finished:
            ordered |= {base.folder: base for base in with_bases([run.base])}
        ordered.setdefault(run.folder, run)
    return list(ordered.values())


# ---- before training ----


def check(runs: list[PlannedRun], elsewhere: str, processes: int | None = None) -> None:
    """Raise UserError for anything that training would refuse later, and for runs that differ.

    `elsewhere` is the option that moves the runs to another folder.
    """
    for run in runs:
        if problem := run.disagreement():
            raise UserError(
                f"{run.folder} was trained with {problem}; move it away, or give another "
                f"{elsewhere}"
            )
        accumulation_steps(run.config, processes or processes_of(run.config))


def missing_shards(config: Config) -> str | None:
    """A sentence on the shards to train on that have not been made; None if they have."""
    if config.task != "language":
        return None
    try:
        for split in ("train", "val"):
            list_shards(config.data_dir, split)
    except UserError as error:
        return str(error)
    return None


def check_data(runs: list[PlannedRun]) -> None:
    """Raise UserError where the runs' shards are missing, or were made with another tokenizer."""
    texts = (run.config for run in runs if run.config.task == "language")
    for config in {config.data_dir: config for config in texts}.values():
        for split in ("train", "val"):
            list_shards(config.data_dir, split)
        check_tokenizer(config.data_dir, config.tokenizer)


def processes_of(config: Config) -> int:
    """The number of training processes: one for each GPU, or one."""
    if config.device not in ("auto", "cuda") or pick_device(config.device).type != "cuda":
        return 1
    return torch.cuda.device_count()


def step_seconds(folders: Mapping[Path, str]) -> dict[str, float]:
    """Name -> median seconds of a step, over the folders of that name with any training."""
    steps: dict[str, list[float]] = {}
    for folder, name in folders.items():
        times = []
        for line in read_text(folder / "metrics.jsonl").splitlines():
            with suppress(ValueError, LookupError, TypeError, RecursionError):  # of other lines
                times.append(json.loads(line)["ms"] / 1000)
        # the first step compiles and allocates
        steps.setdefault(name, []).extend(times[1:])
    return {name: statistics.median(times) for name, times in steps.items() if times}


def cost(runs: list[PlannedRun], folders: Mapping[Path, str]) -> str:
    """A sentence on what is left to train: runs, tokens, and time where steps have been timed.

    `folders` maps folders of runs to names: a run's step takes the median time of those with its
    name, or where there is none, the mean over all names.
    """
    left = [run for run in with_bases(runs) if not run.finished]
    if not left:
        return f"to train: nothing, all {len(with_bases(runs))} runs are done"
    begun = sum(run.step is not None for run in left)
    text = (
        f"to train: {len(left)} runs ({begun} of them continued), "
        f"{sum(run.tokens_left for run in left):,} tokens"
    )
    timed = step_seconds(folders)
    if not timed:
        return text + "; the time is unknown until a step has been timed"
    other = statistics.mean(timed.values())
    seconds = sum(
        timed.get(run.name, other) * run.tokens_left / run.config.total_batch_size for run in left
    )
    untimed = sum(run.name not in timed for run in left)
    return (
        f"{text}, about {timedelta(seconds=round(seconds))} by the median step of each, one after "
        "the other" + (f"; for {untimed} of them by the mean of others" if untimed else "")
    )


# ---- training ----


def train(runs: list[PlannedRun], cost: Callable[[], str]) -> list[str]:
    """Train the unfinished runs one after the other; returns a sentence for each failure.

    A run that fails, such as one that diverges, does not stop the others; one that is refused (exit
    code 2) does. Before each run its folder is printed, and what `cost` says.
    """
    failures = []
    for run in with_bases(runs):
        if run.finished:
            continue
        print(f"\n{run.folder}; {cost()}", flush=True)
        if run.base and not run.base.finished:
            failures.append(f"{run.folder} starts from {run.base.folder}, which is not finished")
            continue
        code = call_when_free(run.folder, run.command)
        if code == EXIT_MISTAKE:
            raise UserError(f"{run.folder} was refused; the message is above")
        if code:
            failures.append(f"{run.folder} stopped with exit code {code} at step {run.step}")
    return failures


def call_when_free(folder: Path, command: Callable[[], list[str] | None]) -> int:
    """Run a command that trains the run in a folder, once no other process is training it.

    After each wait `command` says what is left to do, None for nothing. Returns the exit code.
    """
    while True:
        wait_for_others(folder)
        if (arguments := command()) is None:
            return 0
        code = call(arguments)
        if not code or not is_locked(folder):
            return code  # else another process was faster to start


def wait_for_others(folder: Path) -> None:
    """Return once no process is training the run in a folder."""
    if is_locked(folder):
        print(f"{folder}: another process is training this run; waiting for its end", flush=True)
    while is_locked(folder):
        time.sleep(POLL_SECONDS)


def call(command: list[str]) -> int:
    """Run a command with our output and return its exit code. If it is stopped, exit as well."""
    with subprocess.Popen(command, env=child_environment()) as process:
        try:
            code = process.wait()
        except BaseException:
            process.terminate()  # train.py saves, then ends
            process.wait()
            raise
    if code == EXIT_STOPPED:
        sys.exit(code)
    return code


def child_environment() -> dict[str, str]:
    """Our environment, in which Python finds this repository's modules from any folder."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def stop_on_signals() -> None:
    """Exit on the signals that end a job or close a terminal, so that the children end too."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, lambda *_: sys.exit(EXIT_STOPPED))
