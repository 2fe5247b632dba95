"""How the numbers of a table are made: measured on finished runs, or computed from formulas.

Both kinds may have costs, which are more columns: the time and memory of a step.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from config import Config, names
from errors import EXIT_MISTAKE, UserError, first_line
from runtime import checkpoint
from runtime.device import environment, pick_device, pick_dtype
from runtime.files import read_json, write_json
from scripts import benchmark
from scripts.common import runner
from scripts.common.planned import PlannedRun, call_when_free
from scripts.reproduce.rows import Scale

# At most so many table rows take turns with softmax when their cost is measured.
TOGETHER = 6
# name -> (x, y), drawn in a panel of that name
Curves = dict[str, tuple[list[float], list[float]]]


@dataclass(frozen=True)
class Work:
    """The work of one command: table rows and seeds of a scale, and the folder of the table."""

    scale: Scale
    rows: tuple[str, ...]
    seeds: range
    folder: Path
    squad: str | None = None  # SQuAD's train-v2.0.json
    planning: bool = False  # --plan, for which missing data are no error

    @property
    def runs(self) -> list[PlannedRun]:
        """All runs of a seed before the next seed, so that a first table is complete early."""
        return [self.scale.run(row, seed) for seed in self.seeds for row in self.rows]

    def training(self, measurement: "Measurement") -> list[PlannedRun]:
        """The runs that a measurement needs."""
        rows = tuple(dict.fromkeys([*measurement.needs, *self.rows]))
        return replace(self, rows=rows).runs if measurement.trained else []


def at(multiple: float, config: Config) -> int:
    """A multiple of the training length, in tokens."""
    return round(multiple * config.block_size)


def stretched(multiples: tuple, prompt: int, config: Config) -> tuple:
    """The multiples times the smallest integer at which the training length fits a prompt.

    Names stay as they are.
    """
    factor = -(-prompt // config.block_size)
    return tuple(m if isinstance(m, str) else m * factor for m in multiples)


# ---- costs ----


@dataclass(frozen=True)
class Costs:
    """Columns with the cost of each table row, timed in turns with softmax on this machine."""

    columns: tuple[str, ...]
    # the figures of a table row and of softmax, for each of the `ways` -> the columns
    values: Callable[[list[dict], list[dict], Config], list[float]]
    phases: tuple[str, ...]
    rounds: int
    note: str
    ways: Callable[[Config], list[dict]] = lambda config: [{}]  # changes of the settings

    def file(self, work: Work) -> Path:
        return work.folder / "costs.json"

    def saved(self, work: Work) -> dict[str, dict]:
        """The figures measured on this machine with these settings."""
        saved = read_json(self.file(work)) or {}
        return saved["rows"] if saved.get("made_with") == made_with(work.scale.config) else {}

    def wanted(self, work: Work) -> list[str]:
        """The table rows to time. A view of a run costs as much as the run."""
        saved = self.saved(work)
        every = list(dict.fromkeys([*saved, *(row.partition(":")[0] for row in work.rows)]))
        left = [row for row in every if row not in saved]
        return every if left and len(every) <= TOGETHER else left

    def measure(self, work: Work) -> None:
        left, found = self.wanted(work), self.saved(work)
        for i in range(0, len(left), TOGETHER):
            group = list(dict.fromkeys(["softmax", *left[i : i + TOGETHER]]))
            configs = {row: work.scale.run(row, work.seeds[0]).config for row in group}
            timed = {
                (row, number): config.replace(**changes)
                for row, config in configs.items()
                for number, changes in enumerate(self.ways(config))
            }
            figures = benchmark.measure(
                {f"{row} {number}": config for (row, number), config in timed.items()},
                self.rounds, phases=self.phases,
            )  # fmt: skip
            own = {row: [figures[f"{r} {n}"] for r, n in timed if r == row] for row in group}
            found |= {
                row: {"own": own[row], "softmax": own["softmax"]}
                for row in group
                if row in left or row not in found
            }
            made = {"environment": environment(), "threads": torch.get_num_threads()}
            made |= {"rounds": self.rounds, "made_with": made_with(work.scale.config)}
            self.file(work).parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file(work), made | {"rows": found})

    def of(self, work: Work, name: str) -> list[float] | None:
        """The columns of a table row; None before it is timed."""
        run = name.partition(":")[0]
        figures = self.saved(work).get(run)
        config = work.scale.run(run, work.seeds[0]).config
        if figures is None:
            return None
        return self.values(figures["own"], figures["softmax"], config)


def made_with(config: Config) -> dict[str, Any]:
    """The machine, and the settings that the cost of a step may depend on."""
    dtype = str(pick_dtype(config.dtype, pick_device(config.device)))
    settings = config.as_dict()
    timed = {name: settings[name] for name in (*names(fixed=True), *names("machine"))}
    return {"machine": environment()["machine"]} | timed | {"dtype": dtype}


# ---- the two kinds of measurement ----


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The columns of a table, and how to fill them."""

    trained: ClassVar[bool]

    columns: tuple = ()  # multiples of the training length, or names
    better: str | tuple[str | None, ...] | None = None  # a tuple: of each column
    digits: int = 4
    compare: str = "difference"  # of our values and the paper's, or "ratio" to softmax
    needs: tuple[str, ...] = ()  # table rows whose runs are trained too
    costs: Costs | None = None

    def columns_at(self, config: Config) -> tuple:
        return self.columns + (self.costs.columns if self.costs else ())

    def better_at(self, config: Config) -> tuple[str | None, ...]:
        if isinstance(self.better, tuple):
            return self.better
        return (self.better,) * len(self.columns_at(config))

    def notes(self, config: Config) -> tuple[str, ...]:
        return (self.costs.note,) if self.costs else ()

    def check(self, work: Work) -> None:
        """Raise UserError for anything that would be refused later."""

    def plan(self, work: Work) -> str:
        left = self.costs.wanted(work) if self.costs else ()
        return f"\nto time: {len(left)} table rows, minutes" if left else ""

    def measure(self, work: Work) -> list[str]:
        """Measure what is missing; returns a sentence for each failure."""
        if self.costs:
            self.costs.measure(work)
        return []

    def results(self, work: Work, name: str) -> list[dict]:
        """The runs of a table row, as table.json has them."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class OfFormulas(Measurement):
    """Numbers that take no training: from the formulas of attention.py, or costs alone."""

    trained = False

    compute: Callable[[str], tuple[list[float], Curves]] = lambda name: ([], {})

    def plan(self, work: Work) -> str:
        return super().plan(work).lstrip() or "to compute: seconds"

    def results(self, work: Work, name: str) -> list[dict]:
        values, curves = self.compute(name)
        costs = self.costs.of(work, name) if self.costs else []
        if costs is None:
            return []
        here = environment()
        evaluation = {"environment": here, "curves": curves}
        values = [*values, *costs]
        return [{"seed": None, "values": values, "environment": here, "evaluation": evaluation}]


@dataclass(frozen=True, kw_only=True)
class OfRuns(Measurement):
    """Numbers of finished runs, by an evaluation or from the files of the runs."""

    trained = True

    # the columns of a run's measurement, without costs
    values: Callable[[dict, Config], list[float]] = lambda measured, config: measured["values"]
    options: Callable[[Config], Any] | None = None  # of the evaluation
    read: Callable[[PlannedRun, PlannedRun], dict] | None = None  # files of a run, of softmax
    curves: Callable[[dict], Curves] | None = None  # of a measurement
    control: Callable[[Any, Config], Any] = lambda options, config: None  # options of the control
    views: Mapping[str, dict] = field(default_factory=dict)  # changes of the options, by name
    finetuned: bool = False  # on SQuAD before measuring
    prompt: Callable[[Config], int] = lambda config: 1  # the shortest length that fits it

    def columns_at(self, config: Config) -> tuple:
        return stretched(super().columns_at(config), self.prompt(config), config)

    def notes(self, config: Config) -> tuple[str, ...]:
        factor, *_ = stretched((1,), self.prompt(config), config)
        stretch = (
            f"The paper's lengths begin at the training length. Here all are {factor} times as "
            f"long, since the prompt takes {self.prompt(config)} tokens.",
        )
        return (*(stretch if factor > 1 else ()), *super().notes(config))

    def options_of(self, run: PlannedRun) -> list[Any]:
        """The options of the measurement, and of its control if there is one."""
        assert self.options is not None
        own = replace(self.options(run.config), **(self.views[run.view] if run.view else {}))
        control = self.control(own, run.config)
        return [own] if control is None else [own, control]

    def check(self, work: Work) -> None:
        if self.finetuned and not (work.squad or importlib.util.find_spec("datasets")):
            raise UserError(
                "SQuAD needs a library: pip install datasets, or give --squad its train-v2.0.json"
            )
        if self.finetuned and work.squad and not Path(work.squad).is_file():
            raise UserError(f"--squad {work.squad}: no such file")
        if self.options and not all(map(self.find, work.runs)):
            options = self.options(work.scale.config)
            if not work.planning:
                getattr(options, "check", options.facts)(work.scale.config)

    def plan(self, work: Work) -> str:
        if self.options is None:
            return "to evaluate: nothing, the files of the runs have the numbers"
        left = [run for run in work.runs if self.find(run) is None]
        text = f"to evaluate: {len(left)} runs"
        try:
            todo = [(one, run.config) for run in left for one in self.options_of(run)]
            if todo:
                total = sum(options.amount(config) for options, config in todo)
                text += f", {total:,} {todo[0][0].unit} in all"
        except UserError as error:
            if not work.planning:
                raise
            text += f", an unknown number of {todo[0][0].unit} ({error})"
        return text + (", after SQuAD" if self.finetuned and left else "") + super().plan(work)

    def measure(self, work: Work) -> list[str]:
        failures = []
        for run in work.runs if self.options else ():
            if not run.finished or self.find(run):
                continue
            if self.finetuned and (failure := finetune(run, work.squad)):
                failures.append(failure)
                continue
            try:
                for options in self.options_of(run):
                    runner.measured(options, self.folder(run))
            except RuntimeError as error:  # such as a GPU's memory, which other runs may not need
                failures.append(f"{run.folder} cannot be evaluated: {first_line(error)}")
        return failures + super().measure(work)

    def folder(self, run: PlannedRun) -> Path:
        return run.folder / "squad" if self.finetuned else run.folder

    def find(self, run: PlannedRun) -> dict | None:
        """The stored measurement of a finished run, with its control as `control`; else None."""
        folder = self.folder(run)
        if not run.finished or (self.finetuned and not is_finetuned(run)):
            return None
        own, *control = (runner.stored(options, folder) for options in self.options_of(run))
        if own is None or None in control:
            return None
        return own | ({"control": control[0]} if control else {})

    def results(self, work: Work, name: str) -> list[dict]:
        costs = self.costs.of(work, name) if self.costs else []
        entries: list[dict] = []
        for seed in work.seeds if costs is not None else ():
            run, *others = (work.scale.run(row, seed) for row in (name, *self.needs))
            if not all(one.finished and not one.difference() for one in (run, *others)):
                continue
            found = self.read(run, (others or [run])[0]) if self.read else self.find(run)
            if found:
                values = [*self.values(found, run.config), *(costs or [])]
                found |= {"curves": self.curves(found)} if self.curves else {}
                entries.append(run.entry(values, found | {"folder": str(self.folder(run))}))
        return entries


def is_finetuned(run: PlannedRun) -> bool:
    """Whether the run has been fine-tuned to the end, from the weights that it has now."""
    folder = run.folder / "squad"
    step, facts = checkpoint.step(folder), read_json(folder / "squad.json")
    done = step is not None and step >= checkpoint.read_config(folder).max_iters
    return done and facts["began_with"] == checkpoint.find(run.folder).id


def finetune(run: PlannedRun, squad: str | None) -> str | None:
    """Fine-tune a run on SQuAD, or the rest of it; returns a sentence where that fails."""
    folder = run.folder / "squad"
    command = [sys.executable, "-m", "scripts.finetune_squad", str(run.folder)]
    command += [f"--out_dir={folder}", *([f"--squad={squad}"] if squad else []), "--resume=auto"]
    command += [f"--device={run.config.device}", f"--dtype={run.config.dtype}"]
    code = call_when_free(folder, command, lambda: is_finetuned(run))
    if code == EXIT_MISTAKE:
        raise UserError(f"{run.folder} cannot be fine-tuned; the message is above")
    return f"the fine-tuning of {run.folder} ended with exit code {code}" if code else None
