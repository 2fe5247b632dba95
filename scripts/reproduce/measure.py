"""How the numbers of a table are made: measured on finished runs, or computed from formulas."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from config import Config, names
from errors import first_line
from runtime.device import environment, pick_device, pick_dtype
from runtime.files import read_json
from scripts import benchmark
from scripts.common import runner
from scripts.common.planned import PlannedRun
from scripts.common.runner import Evaluation, Store
from scripts.reproduce.rows import Scale, view_options

# name -> (x, y), drawn in a panel of that name
Curves = dict[str, tuple[list[float], list[float]]]
Values = tuple[list[float], Curves]  # the columns of a table row, and its curves


@dataclass(frozen=True)
class Work:
    """The work of one command: table rows and seeds of a scale, and the folder of the table."""

    scale: Scale
    rows: tuple[str, ...]
    seeds: Sequence[int]
    folder: Path

    def runs(self, *more: str) -> list[PlannedRun]:
        """The runs of more table rows and of these; all of a seed before the next seed, so that a
        first table is complete early."""
        rows = dict.fromkeys([*more, *self.rows])
        return [self.scale.run(row, seed) for seed in self.seeds for row in rows]


def at(multiple: float, config: Config) -> int:
    """A multiple of the training length, in tokens."""
    return round(multiple * config.block_size)


@dataclass(frozen=True)
class Costs:
    """Columns with the cost of each table row, timed in turns with softmax on this machine."""

    columns: tuple[str, ...]
    values: Callable[[dict, dict, Config], list[float]]  # of a table row's figures and softmax's
    phase: str
    rounds: int
    changes: Callable[[Config], dict] = lambda config: {}  # of the settings

    def store(self, work: Work) -> Store:
        """The figures measured on this machine with these settings, in costs.json."""
        return Store(work.folder / "costs.json", made_with(work.scale.config))

    def missing(self, work: Work) -> list[str]:
        """The table rows to time. A view of a run costs as much as the run."""
        runs = dict.fromkeys(row.partition(":")[0] for row in work.rows)
        return [name for name in runs if name not in self.store(work).parts]

    def measure(self, work: Work) -> None:
        work.folder.mkdir(parents=True, exist_ok=True)
        for name in self.missing(work):
            configs = {one: work.scale.run(one, work.seeds[0]).config for one in ("softmax", name)}
            timed = {one: config.replace(**self.changes(config)) for one, config in configs.items()}
            figures = benchmark.measure(timed, self.rounds, phases=(self.phase,))
            self.store(work).add(name, {"own": figures[name], "softmax": figures["softmax"]})

    def of(self, work: Work, name: str) -> list[float] | None:
        """The columns of a table row; None before it is timed."""
        run = name.partition(":")[0]
        figures, config = self.store(work).parts.get(run), work.scale.run(run, work.seeds[0]).config
        if figures is None:
            return None
        return self.values(figures["own"], figures["softmax"], config)


def made_with(config: Config) -> dict[str, Any]:
    """The machine, and the settings that the cost of a step may depend on."""
    settings = config.as_dict()
    timed = {name: settings[name] for name in names("attention", "model", "machine")}
    dtype = str(pick_dtype(config.dtype, pick_device(config.device)))
    machine = {"machine": environment()["machine"], "threads": torch.get_num_threads()}
    return machine | timed | {"dtype": dtype}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How a table's numbers are made.

    Either `evaluation` measures finished runs, or `read` takes numbers from the files of the runs,
    or `compute` needs no runs.
    """

    columns: tuple | Callable[[Config], tuple]  # multiples of the training length, or names
    # the columns of a run's measurement, without costs
    values: Callable[[dict, Config], list[float]] = lambda measured, config: measured["values"]
    evaluation: Callable[[Config], Evaluation] | None = None
    read: Callable[..., Values] | None = None  # the files of a run, and of the runs it needs
    compute: Callable[[str], Values] | None = None  # from formulas, for a table row's name
    curves: Callable[[dict], Curves] | None = None  # of a measurement
    better: str | tuple[str | None, ...] | None = None  # a tuple: of each column
    digits: int = 4
    needs: tuple[str, ...] = ()  # table rows whose runs are trained too
    costs: Costs | None = None

    def training(self, work: Work) -> list[PlannedRun]:
        return [] if self.compute else work.runs(*self.needs)

    def plan(self, work: Work) -> str:
        runs = work.runs() if self.evaluation else []
        text = f"to evaluate: {sum(not self.find(run) for run in runs)} runs"
        return text + (f"; to time: {len(self.costs.missing(work))}" if self.costs else "")

    def check(self, work: Work) -> None:
        """Raise UserError for anything that would be refused after the training."""
        configs = {run.name: run.config for run in work.runs()} if self.evaluation else {}
        for config in configs.values():
            assert self.evaluation is not None
            self.evaluation(config).check(config)

    def measure(self, work: Work) -> list[str]:
        """Measure what is missing; returns a sentence for each failure."""
        failures = []
        for run in work.runs() if self.evaluation else ():
            try:
                if run.finished:
                    runner.with_control(self.evaluation_of(run), run.folder)
            except RuntimeError as error:  # such as a GPU's memory, which other runs may not need
                failures.append(f"{run.folder} cannot be evaluated: {first_line(error)}")
        if self.costs:
            self.costs.measure(work)
        return failures

    def evaluation_of(self, run: PlannedRun) -> Evaluation:
        """The evaluation of a run, with the options of its view."""
        assert self.evaluation is not None
        return replace(self.evaluation(run.config), **view_options(run.view))

    def find(self, run: PlannedRun, *others: PlannedRun) -> dict | None:
        """The stored measurement of a finished run, with its control as `control`; else None."""
        if self.read:
            values, curves = self.read(run, *others)
            made = read_json(run.folder / "environment.json")
            return {"values": values, "curves": curves, "environment": made}
        if not run.finished:
            return None
        return runner.with_control(self.evaluation_of(run), run.folder, runner.stored)

    def results(self, work: Work, name: str) -> list[dict]:
        """The runs of a table row, as table.json has them."""
        if self.compute:
            values, curves = self.compute(name)
            here = environment()
            evaluation = {"environment": here, "curves": curves}
            return [{"seed": None, "values": values, "environment": here, "evaluation": evaluation}]
        timed = self.costs.of(work, name) if self.costs else []
        entries: list[dict] = []
        for seed in work.seeds if timed is not None else ():
            run, *others = (work.scale.run(row, seed) for row in (name, *self.needs))
            if not all(one.finished and not one.difference() for one in (run, *others)):
                continue
            found = self.find(run, *others)
            if found is None:
                continue
            found |= {"curves": self.curves(found)} if self.curves else {}
            values = [*self.values(found, run.config), *(timed or [])]
            entries.append(run.entry(values, found | {"folder": str(run.folder)}))
        return entries
