"""Planned runs: which of them are left to train, and their training."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from config import FREE_ON_RESUME, LEARNED, ROOT, Config, micro_batch_size
from errors import EXIT_MISTAKE, UserError
from layers.heads import check_attention
from runtime import checkpoint, metadata, run_folder
from runtime.distributed import EXIT_STOPPED
from runtime.files import is_locked, read_json
from runtime.nanogpt import NANOGPT

POLL_SECONDS = 0.5
# What torchrun passes on to its processes.
TORCHRUN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


@dataclass(frozen=True)
class PlannedRun:
    """A run to train: its settings, as a config and as arguments of train.py."""

    config: Config
    arguments: list[str]
    base: "PlannedRun | None" = None  # the run whose final weights it starts from

    @property
    def folder(self) -> Path:
        return Path(self.config.out_dir)

    @property
    def step(self) -> int | None:
        """The step of the latest checkpoint; None without one."""
        return run_folder.latest_step(self.folder)

    @property
    def finished(self) -> bool:
        return self.step is not None and self.step >= self.config.max_iters

    @property
    def tokens(self) -> int:
        """Tokens seen so far, the base run's included."""
        tokens = (self.step or 0) * self.config.total_batch_size
        if self.base is not None:
            tokens += self.base.tokens
        return tokens

    @property
    def tokens_left(self) -> int:
        """Tokens that the run has yet to see."""
        steps_left = max(0, self.config.max_iters - (self.step or 0))
        return steps_left * self.config.total_batch_size

    def command(self) -> list[str]:
        """Return the command that starts or continues the training, with a process for each GPU."""
        command = [sys.executable]
        processes = processes_of(self.config)
        if processes > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone"]
            # torchrun would handle signals that this process ignores, such as SIGHUP under nohup
            heard = [number.name for number in TORCHRUN_SIGNALS if not is_ignored(number)]
            command += [*torchrun, f"--nproc_per_node={processes}"]
            command.append(f"--signals_to_handle={','.join(heard)}")
        return [*command, os.path.relpath(ROOT / "train.py"), *self.arguments, "--resume=auto"]

    def record(self, values: Sequence[float | None], evaluation: dict) -> dict:
        """Return the run as table.json has it: its values, and where they come from."""
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
        """Return what the folder's run differs in, to follow "was trained with"; None if nothing.

        It may have different settings, initial weights, data or formulas.
        """
        if self.step is None:
            return None
        saved = comparable(run_folder.read_config(self.folder))
        planned = comparable(self.config)
        began = metadata.read_start_record(self.folder)
        # the same data may lie in several folders: data_difference_of compares them
        compares_data = bool(began.data) and Path(self.config.data_dir).exists()
        for key in LEARNED:
            if saved[key] != planned[key] and not (key == "data_dir" and compares_data):
                return f"{key} = {saved[key]!r}, not {planned[key]!r}"
        for change in began.changes:
            changed = sorted(change.keys() - {"step"} - FREE_ON_RESUME)
            if changed:
                key = changed[0]
                return f"{key} = {change[key][1]!r} from step {change['step']} on"
        if self.base is not None:
            if self.base.step is None or began.began_with != checkpoint.find(self.base.folder).id:
                return f"initial weights that differ from {self.base.folder}"
        elif initial := metadata.init_from_difference(self.folder, self.config.init_from):
            return f"{initial} as its start, not init_from = {self.config.init_from!r}"
        elif is_replaced(self.config.init_from, began.began_with):
            return f"initial weights that differ from {self.config.init_from}"
        data = metadata.data_difference_of(self.folder, self.config)
        return data or metadata.formulas_difference(self.folder, self.config)


def is_replaced(init_from: str, began_with: dict | None) -> bool:
    """Tell whether init_from now has other weights than a run began with.

    False where either is not known: the weights are gone, or of Hugging Face.
    """
    if began_with is None:
        return False
    with suppress(UserError):
        weights = checkpoint.find(init_from.removeprefix(NANOGPT), quiet=True)
        return weights.id != began_with
    return False


def comparable(config: Config) -> dict:
    """Return the settings of a run, with one spelling of the data folder."""
    settings = checkpoint.settings_of(config)
    return settings | {"data_dir": str(Path(config.data_dir).resolve())}


def processes_of(config: Config) -> int:
    """Return how many processes train, on a GPU each: as many as divide a step's micro-batches."""
    if config.device not in ("auto", "cuda"):
        return 1
    sequences = micro_batch_size(config, world_size=1)
    micro_batches = config.total_batch_size // (sequences * config.block_size)
    for processes in range(torch.cuda.device_count(), 1, -1):
        if micro_batches % processes == 0:
            return processes
    return 1


def with_bases(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the distinct runs, and before each unfinished run its base."""
    ordered: dict[Path, PlannedRun] = {}
    for run in runs:
        if run.base and not run.finished:
            ordered.setdefault(run.base.folder, run.base)
        ordered.setdefault(run.folder, run)
    return list(ordered.values())


# ---- before training ----


def check_plan(runs: Sequence[PlannedRun]) -> None:
    """Raise UserError for a folder with another run, and for settings that training refuses."""
    sentences = mismatches(runs)
    if sentences:
        raise UserError(f"{sentences[0]}; move it away, or give another --out")
    for run in runs:
        check_attention(run.config)
        micro_batch_size(run.config, processes_of(run.config))


def mismatches(runs: Sequence[PlannedRun]) -> list[str]:
    """A sentence for each run in a folder that was trained with something else than planned."""
    sentences = []
    for run in runs:
        difference = run.difference()
        if difference is not None:
            sentences.append(f"{run.folder} was trained with {difference}")
    return sentences


def left_to_train(runs: Sequence[PlannedRun]) -> str:
    """Say how many runs and tokens are left to train."""
    left = [run for run in runs if not run.finished]
    if not left:
        return "to train: nothing, all runs are done"
    tokens = sum(run.tokens_left for run in left)
    runs_left = "1 run" if len(left) == 1 else f"{len(left)} runs"
    return f"to train: {runs_left}, {tokens:,} tokens"


# ---- training ----


def train(runs: Sequence[PlannedRun]) -> list[str]:
    """Train the unfinished runs one after the other; returns a sentence for each failure.

    Runs that other processes are training are left to them and waited for, so that the same command
    started on each GPU shares the work. A run that fails, for example because it diverges, does not
    stop the others. A run that train.py rejects does.
    """
    failures: list[str] = []
    left = list(runs)
    while True:
        left = [run for run in left if not run.finished]
        if not left:
            return failures + mismatches(runs)  # such as by an edit since the first was trained
        ready = [run for run in left if run.base not in left]
        run = next((run for run in ready if not is_locked(run.folder)), None)
        if run is None:
            print(f"{ready[0].folder}: another process is training this run; waiting for it")
            while all(is_locked(run.folder) for run in ready):
                time.sleep(POLL_SECONDS)
            continue
        if run.base is not None and not run.base.finished:
            failures.append(f"{run.folder} starts from {run.base.folder}, which is not finished")
            left.remove(run)
            continue
        print(f"\n{run.folder}; {left_to_train(left)}", flush=True)
        code = check_with_torchrun(run) or call(run.command())
        if code and is_locked(run.folder):  # torchrun exits with 1 instead of EXIT_MISTAKE
            continue  # another process was faster to start
        if code == EXIT_MISTAKE and run.finished:
            continue  # and has finished it meanwhile
        if code == EXIT_MISTAKE:
            raise UserError(f"{run.folder} was refused; the message is above")
        if difference := run.difference():
            raise UserError(
                f"{run.folder} was trained with {difference}: the code, the data or a config file "
                "changed after this command had started"
            )
        if code:
            failures.append(
                f"{run.folder} stopped with exit code {code} at step {run.step}; if it diverged, "
                "it needs a lower learning_rate, as all entries with the same rate do"
            )
        left.remove(run)


def check_with_torchrun(run: PlannedRun) -> int:
    """Return the exit code of a dry run with as many processes; 0 where torchrun is not used.

    torchrun hides the exit code of a mistake.
    """
    processes = processes_of(run.config)
    if processes == 1:
        return 0
    command = [sys.executable, os.path.relpath(ROOT / "train.py"), *run.arguments]
    environment = os.environ | {"WORLD_SIZE": str(processes)}
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):  # of a scheduler
        environment.pop(name, None)
    return subprocess.run(
        [*command, "--resume=auto", "--dry_run"], env=environment, stdout=subprocess.DEVNULL
    ).returncode


def call(command: list[str]) -> int:
    """Run a command; returns its exit code. Where a signal stopped it, this process exits too."""
    # torchrun kills its processes after so many seconds: enough for a step and a save
    environment = os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "240"}
    with subprocess.Popen(command, env=environment) as process:
        try:
            code = process.wait()
        except BaseException:
            process.terminate()  # train.py saves, then ends
            process.wait()
            raise
    if code == EXIT_STOPPED:
        sys.exit(code)
    return code


def stop_on_signals() -> None:
    """Exit on the signals that end a job or close a terminal, so that the children end too."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if not is_ignored(number):
            signal.signal(number, lambda *_: sys.exit(EXIT_STOPPED))


def is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN
