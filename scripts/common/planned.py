"""Planned runs: what is left to train, what that costs, and the training."""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from config import ROOT, Config, accumulation_steps, names
from data.shards import check_tokenizer, list_shards
from errors import EXIT_MISTAKE, UserError
from layers.heads import check_attention
from runtime import checkpoint
from runtime.device import pick_device
from runtime.distributed import EXIT_STOPPED
from runtime.files import is_locked, read_json
from runtime.log import read_metrics

POLL_SECONDS = 0.5
# A planned run and the run in its folder may differ in these, and in their paths.
FREE = {*names("machine", "logs", "run"), "data_dir"}


@dataclass(frozen=True)
class PlannedRun:
    """A run to train: its name, its settings as a config and as arguments of train.py."""

    name: str
    config: Config
    arguments: list[str]
    base: "PlannedRun | None" = None  # the run whose weights it starts from
    base_step: int | None = None  # of the base's checkpoint; None: the last step
    view: str = ""  # how a table row evaluates the run, as in softmax:yarn; empty: as usual

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
        """Tokens trained on so far, with the tokens of the base."""
        before = self.base.tokens if self.base and self.base_step is None else 0
        steps = (self.step or 0) + (self.base_step or 0)
        return before + steps * self.config.total_batch_size

    @property
    def tokens_left(self) -> int:
        return (self.config.max_iters - (self.step or 0)) * self.config.total_batch_size

    def command(self, processes: int | None = None) -> list[str]:
        """The command that starts or continues the training, by default with a process per GPU."""
        launcher, processes = [sys.executable], processes or processes_of(self.config)
        if processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone"]
            launcher += [f"--nproc_per_node={processes}"]
        return [*launcher, os.path.relpath(ROOT / "train.py"), *self.arguments, "--resume=auto"]

    def entry(self, values: list[float], evaluation: dict) -> dict:
        """The run in table.json: its values, and where they come from."""
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

    def difference(self) -> str | None:
        """A setting, or the initial weights, in which the run in the folder differs; else None."""
        if self.step is None:
            return None
        saved = checkpoint.settings_of(checkpoint.read_config(self.folder))
        wanted = checkpoint.settings_of(self.config)
        for key, value in wanted.items():
            if key not in FREE and saved[key] != value:
                return f"{key} = {saved[key]!r}, not {value!r}"
        paths = [Path(one["data_dir"]).resolve() for one in (saved, wanted)]
        if paths[0] != paths[1]:
            return f"data_dir = {saved['data_dir']!r}, not {wanted['data_dir']!r}"
        if self.base:
            start = self.config.init_from
            now = self.base.step is not None and checkpoint.find(start).id
            if read_json(self.folder / "began_with.json") != now:
                return f"other initial weights than {start} has now"
        return None


def with_bases(runs: list[PlannedRun]) -> list[PlannedRun]:
    """The runs, and before each run its unfinished bases."""
    ordered: dict[Path, PlannedRun] = {}
    for run in runs:
        if run.base and not run.finished:
            ordered |= {base.folder: base for base in with_bases([run.base])}
        ordered.setdefault(run.folder, run)
    return list(ordered.values())


# ---- before training ----


def check(runs: list[PlannedRun], elsewhere: str, processes: int | None = None) -> None:
    """Raise UserError for a folder with another run, and for settings that training refuses.

    `elsewhere` is the option that moves the runs to another folder.
    """
    for run in runs:
        if difference := run.difference():
            raise UserError(
                f"{run.folder} was trained with {difference}; move it away, or give another "
                f"{elsewhere}"
            )
        check_attention(run.config)
        accumulation_steps(run.config, processes or processes_of(run.config))


def check_data(runs: list[PlannedRun]) -> None:
    """Raise UserError where the shards of a run are missing or have another tokenizer."""
    for folder, tokenizer in {
        (run.config.data_dir, run.config.tokenizer) for run in runs if run.config.task == "language"
    }:
        for split in ("train", "val"):
            list_shards(folder, split)
        check_tokenizer(folder, tokenizer)


def processes_of(config: Config) -> int:
    """The number of training processes: one for each GPU, or one."""
    if config.device not in ("auto", "cuda") or pick_device(config.device).type != "cuda":
        return 1
    return torch.cuda.device_count()


def step_seconds(folders: Mapping[Path, str]) -> dict[str, float]:
    """Name -> median seconds of a step, over the folders of that name."""
    steps: dict[str, list[float]] = {}
    for folder, name in folders.items():
        times = [line["ms"] / 1000 for line in read_metrics(folder) if "ms" in line]
        steps.setdefault(name, []).extend(times[1:])  # the first step compiles and allocates
    return {name: statistics.median(times) for name, times in steps.items() if times}


def cost(runs: list[PlannedRun], folders: Mapping[Path, str]) -> str:
    """A sentence on the runs, tokens and time that are left to train.

    `folders` maps the folders of runs to names. A step takes the median time of the steps of runs
    with the same name, or else the mean over all names.
    """
    runs = with_bases(runs)
    left = [run for run in runs if not run.finished]
    if not left:
        return f"to train: nothing, all {len(runs)} runs are done"
    begun = sum(run.step is not None for run in left)
    tokens = sum(run.tokens_left for run in left)
    text = f"to train: {len(left)} runs ({begun} of them continued), {tokens:,} tokens"
    timed = step_seconds(folders)
    if not timed:
        return f"{text}; the time is known after the first steps"
    other = statistics.mean(timed.values())
    seconds = sum(
        timed.get(run.name, other) * run.tokens_left / run.config.total_batch_size for run in left
    )
    return f"{text}, about {timedelta(seconds=round(seconds))}"


# ---- training ----


def train(runs: list[PlannedRun], cost: Callable[[], str]) -> list[str]:
    """Train the unfinished runs one after the other; returns a sentence for each failure.

    A run that fails, such as a run that diverges, does not stop the others. A run that train.py
    refuses does.
    """
    failures = []
    for run in with_bases(runs):
        if run.finished:
            continue
        print(f"\n{run.folder}; {cost()}", flush=True)
        if run.base and not run.base.finished:
            failures.append(f"{run.folder} starts from {run.base.folder}, which is not finished")
            continue
        code = call_when_free(run.folder, run.command(), partial(getattr, run, "finished"))
        if code == EXIT_MISTAKE:
            raise UserError(f"{run.folder} was refused; the message is above")
        if code:
            failures.append(f"{run.folder} stopped with exit code {code} at step {run.step}")
    return failures


def call_when_free(folder: Path, command: list[str], finished: Callable[[], bool]) -> int:
    """Run a training command in a folder while no other process trains there.

    Returns the exit code, which is 0 where another process has finished the training.
    """
    while True:
        if is_locked(folder):
            print(f"{folder}: another process is training this run; waiting for it", flush=True)
        while is_locked(folder):
            time.sleep(POLL_SECONDS)
        if finished():
            return 0
        code = call(command)
        if not code or not is_locked(folder):
            return code  # else another process was faster to start


def call(command: list[str]) -> int:
    """Run a command and return its exit code. Exit too where it was stopped by a signal."""
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
    """Our environment, in which Python finds the modules of this repository from any folder."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def stop_on_signals() -> None:
    """Exit on the signals that end a job or close a terminal, so that the children end too."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, lambda *_: sys.exit(EXIT_STOPPED))
