"""The runs behind the papers' tables: their configs, their progress, and training what is missing.

A run of a scale is in OUT/<scale>/<row>/seed<seed>, whichever table needs it.
"""

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from config import MAY_CHANGE_ON_RESUME, Config, accumulation_steps, load_config
from data.shards import check_tokenizer, list_shards
from errors import EXIT_MISTAKE, UserError
from runtime import checkpoint
from runtime.device import pick_device
from runtime.distributed import EXIT_STOPPED
from runtime.files import is_locked, read_json
from runtime.log import read_text
from scripts.common.papers import SSMAX

CONFIGS = Path(__file__).parents[2] / "configs"
# Between two looks at a run that another process is training.
POLL_SECONDS = 0.5
FIRST_SEED = Config.seed
# A resumed run may change these, but a table's runs all have the same.
RECIPE = {"max_iters", "cooldown_iters"}
# Settings that may differ between machines that train one table; the rest define a run.
PER_MACHINE = MAY_CHANGE_ON_RESUME - RECIPE
PER_MACHINE -= {"data_dir", "out_dir", "resume", "init_from", "dry_run"}


@dataclass(frozen=True)
class Row:
    """A row of a table: its config file and its changes to a scale's settings."""

    name: str
    file: Path
    changes: Callable[[Config], dict] = lambda scale: {}
    base: str | None = None  # the row whose final weights it starts from


def swap(scale: Config) -> dict:
    """SSMax (e): softmax's weights as they are; s is 1 over the mean of log n (Sect. 3)."""
    return {"s_init": scale.block_size / math.lgamma(scale.block_size + 1), "max_iters": 0}


def before_swap(scale: Config) -> dict:
    return {"max_iters": scale.max_iters - scale.max_iters // 8}


def kept_step(scale: Config) -> int | None:
    """The step of the softmax run's checkpoint that (f) can start from, if any.

    With a constant learning rate, training up to it does not depend on the total steps. Other
    schedules have none.
    """
    step = before_swap(scale)["max_iters"]
    constant = scale.schedule == "constant" and step % scale.checkpoint_interval == 0
    return step if constant else None


def keep_for_swap(scale: Config) -> dict:
    return {"keep_every": step} if (step := kept_step(scale)) else {}


def swap_and_train(scale: Config) -> dict:
    """SSMax (f): the last 25,000 of 200,000 steps, 1,000 of them warm-up, scaled to max_iters.

    It goes on in the data order. AdamW starts anew: the paper says that the learning rate is warmed
    up again, and nothing of the moments, which s could not have had.
    """
    return swap(scale) | {
        "first_batch": before_swap(scale)["max_iters"],
        "max_iters": scale.max_iters // 8,
        "warmup_iters": max(1, scale.max_iters // 200),
    }


def probe(scale: Config) -> dict:
    """SSMax Fig. 2 is after fewer steps than the models of the other figures."""
    return {"max_iters": min(scale.max_iters, SSMAX["figure2"]["steps"])}


ROWS = {
    row.name: row
    for row in (
        Row("ssmax_e", CONFIGS / "ssmax.py", swap, "softmax"),
        Row("ssmax_f", CONFIGS / "ssmax.py", swap_and_train, "softmax_before_f"),
        Row("softmax", CONFIGS / "softmax.py", keep_for_swap),
        Row("softmax_before_f", CONFIGS / "softmax.py", before_swap),
        Row("ssmax_probe", CONFIGS / "ablations/ssmax_probe.py", probe),
    )
}


def find_row(name: str) -> Row:
    """The row named after a config, after a variant and p (lssar_p5), or in ROWS."""
    if name in ROWS:
        return ROWS[name]
    for folder in (CONFIGS, CONFIGS / "ablations"):
        if (folder / f"{name}.py").is_file():
            return Row(name, folder / f"{name}.py")
    variant, _, p = name.rpartition("_p")
    files = (CONFIGS / f"{variant}_p15.py", CONFIGS / f"{variant}.py")
    file = next((f for f in files if f.is_file()), CONFIGS / "ablations" / f"{variant}.py")
    return Row(name, file, lambda scale: {"p": float(p)})


@dataclass(frozen=True)
class PlannedRun:
    """A run to train: a row with a seed, its settings as config and arguments, its base run."""

    name: str
    view: str  # how the table's row evaluates it, as in softmax:yarn; empty: as usual
    config: Config
    arguments: list[str]
    base: "PlannedRun | None"
    kept: int | None  # the step of the base's checkpoint it starts from; None: its last

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

    def command(self) -> list[str] | None:
        """The command that trains the rest of the run; None if nothing is left."""
        if self.finished:
            return None
        arguments = self.arguments
        if self.step is not None:
            arguments = [a for a in arguments if not a.startswith("--init_from")] + ["--resume"]
        launcher = [sys.executable]
        if (processes := processes_of(self.config)) > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone"]
            launcher += [f"--nproc_per_node={processes}"]
        return [*launcher, "train.py", *arguments]

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


@dataclass(frozen=True)
class Scale:
    """A scale: its name, its config file if any, and the command line's settings for all runs."""

    name: str
    files: tuple[str, ...]
    out: Path
    settings: tuple[str, ...]  # as --key=value

    @property
    def config(self) -> Config:
        return load_config([*self.files, *self.settings])

    def run(self, row_name: str, seed: int) -> PlannedRun:
        name, _, view = row_name.partition(":")
        row, base, kept = find_row(name), None, None
        changes = row.changes(self.config) | {
            "seed": seed, "out_dir": self.out / self.name / name / f"seed{seed}",
        }  # fmt: skip
        if row.base == "softmax_before_f" and (kept := kept_step(self.config)):
            base = self.run("softmax", seed)
            changes["init_from"] = base.folder / f"step_{kept:06d}.pt"
        elif row.base:
            base = self.run(row.base, seed)
            changes["init_from"] = base.folder
        arguments = [str(row.file), *self.files, *self.settings]
        arguments += [f"--{key}={value}" for key, value in changes.items()]
        return PlannedRun(name, view, load_config(arguments), arguments, base, kept)


@dataclass(frozen=True)
class Work:
    """The work of one command: rows and seeds of a scale, and the folder of the table."""

    scale: Scale
    rows: tuple[str, ...]
    seeds: range
    folder: Path
    squad: str | None = None  # SQuAD's train-v2.0.json
    missing_shards: str | None = None  # a sentence on them; only with --plan

    @property
    def runs(self) -> list[PlannedRun]:
        """All rows of one seed before the next seed, so that a first table is complete early."""
        return [self.scale.run(row, seed) for seed in self.seeds for row in self.rows]


def open_scale(
    name: str, out: str, data: str | None, wandb_mode: str, settings: list[str]
) -> Scale:
    """The scale of --scale: 124m (train.py's defaults), a file of configs/scales, or any file.

    Raises UserError for an unknown scale, and for a setting that would change the runs.
    """
    known = {"124m": ()} | {
        path.stem: (str(path),) for path in sorted((CONFIGS / "scales").glob("*.py"))
    }
    if name.endswith(".py"):
        known = {Path(name).stem: (name,)}
        name = Path(name).stem
    elif name not in known:
        raise UserError(f"--scale {name!r} must be one of {', '.join(known)}, or a config file")
    for pair in settings:
        key, equals, _ = pair.partition("=")
        if not equals:
            raise UserError(f"--set {pair!r} must be KEY=VALUE, such as batch_size=16")
        if key not in PER_MACHINE:
            raise UserError(
                f"--set {pair!r} would change the scale's runs, which only --scale FILE.py "
                f"may do; --set takes {', '.join(sorted(PER_MACHINE))}"
            )
    extra = [f"--wandb_mode={wandb_mode}", *(f"--{pair}" for pair in settings)]
    if data:
        extra.append(f"--data_dir={data}")
    return Scale(name, known[name], Path(out), tuple(extra))


def with_bases(runs: list[PlannedRun]) -> list[PlannedRun]:
    """The runs with their unfinished bases, each base before the runs that start from it."""
    ordered: dict[Path, PlannedRun] = {}
    for run in runs:
        if run.base and not run.finished:
            ordered |= {base.folder: base for base in with_bases([run.base])}
        ordered.setdefault(run.folder, run)
    return list(ordered.values())


def check(runs: list[PlannedRun]) -> None:
    """Raise UserError for anything that training would refuse later, and for runs that differ."""
    for run in runs:
        if problem := run.disagreement():
            raise UserError(
                f"{run.folder} was trained with {problem}; move it away, or give another --out"
            )
        accumulation_steps(run.config, processes_of(run.config))


def missing_shards(config: Config) -> str | None:
    """A sentence on the shards to train on that have not been made; None if they have."""
    try:
        for split in ("train", "val"):
            list_shards(config.data_dir, split)
    except UserError as error:
        return str(error)
    return None


def check_data(runs: list[PlannedRun]) -> None:
    """Raise UserError where the runs' shards are missing, or were made with another tokenizer."""
    for config in {run.config.data_dir: run.config for run in runs}.values():
        for split in ("train", "val"):
            list_shards(config.data_dir, split)
        check_tokenizer(config.data_dir, config.tokenizer)


def processes_of(config: Config) -> int:
    """The number of training processes: one for each GPU, or one."""
    if config.device not in ("auto", "cuda") or pick_device(config.device).type != "cuda":
        return 1
    return torch.cuda.device_count()


def timings(folder: Path) -> dict[str, float]:
    """Row -> median seconds of a step, for the rows of a scale with any training."""
    steps: dict[str, list[float]] = {}
    for path in folder.glob("*/seed*/metrics.jsonl"):
        times = []
        for line in read_text(path).splitlines():
            with suppress(ValueError, LookupError, TypeError, RecursionError):  # of other lines
                times.append(json.loads(line)["ms"] / 1000)
        # the first step compiles and allocates
        steps.setdefault(path.parent.parent.name, []).extend(times[1:])
    return {name: statistics.median(times) for name, times in steps.items() if times}


def cost(runs: list[PlannedRun], scale: Scale) -> str:
    """A sentence on what is left to train: runs, tokens, and time where steps have been timed."""
    left = [run for run in with_bases(runs) if not run.finished]
    if not left:
        return f"to train: nothing, all {len(with_bases(runs))} runs are done"
    begun = sum(run.step is not None for run in left)
    text = (
        f"to train: {len(left)} runs ({begun} of them continued), "
        f"{sum(run.tokens_left for run in left):,} tokens"
    )
    timed = timings(scale.out / scale.name)
    if not timed:
        return text + "; the time is unknown until a step has been timed at this scale"
    other = statistics.mean(timed.values())
    seconds = sum(
        timed.get(run.name, other) * run.tokens_left / run.config.total_batch_size for run in left
    )
    known = sum(run.name in timed for run in left)
    return (
        f"{text}, about {timedelta(seconds=round(seconds))} by the median step of {known} of these "
        f"runs' rows in {scale.out / scale.name}"
        + (f" and, for the rest, the mean of {len(timed)} rows there" if known < len(left) else "")
    )


def train(runs: list[PlannedRun], scale: Scale) -> list[str]:
    """Train the unfinished runs one after the other; returns a sentence for each failure.

    A run that fails, such as one that diverges, does not stop the others; one that is refused (exit
    code 2) does.
    """
    failures = []
    for run in with_bases(runs):
        if run.finished:
            continue
        print(f"\n{run.folder}; {cost(runs, scale)}", flush=True)
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
    with subprocess.Popen(command) as process:
        try:
            code = process.wait()
        except BaseException:
            process.terminate()  # train.py saves, then ends
            process.wait()
            raise
    if code == EXIT_STOPPED:
        sys.exit(code)
    return code
