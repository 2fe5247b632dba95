"""How the numbers of a table are made: measured on runs, read from their files, or computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure

from config import Config
from errors import UserError, first_line
from runtime.device import environment
from scripts.common import runner
from scripts.common.options import EvaluationOptions
from scripts.common.planned import PlannedRun
from scripts.common.runner import Evaluation
from scripts.reproduce.entries import Scale, view_options

# name -> (x, y), drawn in a panel of that name
Curves = dict[str, tuple[list[float], list[float]]]
Values = tuple[Sequence[float | None], Curves]  # the columns of an entry, and its curves
Pictures = Figure | dict[str, Figure]  # one, or several by file name


def at(multiple: float, config: Config) -> int:
    """A multiple of the training length, in tokens."""
    return round(multiple * config.block_size)


def lengths(multiples: Sequence[float], config: Config) -> tuple[int, ...]:
    """Multiples of the training length, in tokens."""
    return tuple(at(multiple, config) for multiple in multiples)


@dataclass(frozen=True)
class Experiment:
    """A table or figure: its entries (see entries.find_entry), its numbers and its pictures.

    Either `evaluation` measures finished runs, or `read` takes the numbers from the files of runs,
    or `compute` needs no runs.
    """

    title: str
    unit: str
    entries: tuple[str, ...]
    columns: tuple | Callable[[Config], tuple]  # multiples of the training length, or names
    # the columns of a run's measurement, at the scale with this config
    values: Callable[[dict, Config], Sequence[float | None]] = lambda measured, config: []
    evaluation: Evaluation | None = None
    options: Callable[[Config], EvaluationOptions] | None = None  # of the evaluation, at a scale
    read: Callable[..., Values] | None = None  # of a run, and of the runs that it needs
    compute: Callable[[str], Values] | None = None  # from formulas, for an entry's name
    needs: tuple[str, ...] = ()  # entries whose runs are trained too
    curves: Callable[[dict], Curves] | None = None  # of a measurement
    better: str | tuple[str | None, ...] | None = None  # "lower" or "higher"; a tuple: by column
    digits: int = 4
    draw: Callable[[dict], Pictures] = lambda table: {}
    paper: dict | None = None  # the section of papers.json with values for these entries
    paper_scale: str = "124m"  # where the section names no scales
    note: str = ""
    remarks: Callable[[dict], Sequence[str]] = lambda table: ()  # sentences on a table
    task: str = "language"  # of the runs
    baseline: str = ""  # an entry that the others are compared with, seed by seed


@dataclass(frozen=True)
class Work:
    """The work of one command: the chosen entries of an experiment, for each seed."""

    name: str
    experiment: Experiment
    scale: Scale
    chosen: tuple[str, ...]
    seeds: Sequence[int]
    again: bool = False  # measure again what has been measured

    def runs(self) -> list[PlannedRun]:
        """All runs of a seed before the next seed, so that a first table is complete early."""
        if self.experiment.compute:
            return []
        entries = dict.fromkeys([*self.experiment.needs, *self.chosen])
        return [self.scale.run(name, seed) for seed in self.seeds for name in entries]

    def evaluated(self) -> list[PlannedRun]:
        """The runs to evaluate."""
        return self.runs() if self.experiment.evaluation else []

    def options(self, run: PlannedRun) -> EvaluationOptions:
        """The options of the evaluation, with those of the run's view."""
        assert self.experiment.options is not None
        config = self.scale.config
        how: dict[str, Any] = {"device": config.device, "dtype": config.dtype, "again": self.again}
        return replace(self.experiment.options(config), **how, **view_options(run.view))

    def check(self, run: PlannedRun) -> None:
        """Raise UserError, before a run is trained, if it cannot be measured."""
        assert self.experiment.evaluation is not None
        runner.check(self.experiment.evaluation, self.options(run), run.config)

    def stored(self, run: PlannedRun) -> dict | None:
        """The measurement of a finished run; None if missing."""
        assert self.experiment.evaluation is not None
        if not run.finished:
            return None
        return runner.stored(self.experiment.evaluation, self.options(run), run.folder)

    def measure(self) -> list[str]:
        """Measure the finished runs; returns a sentence for each failure."""
        failures = []
        for run in self.evaluated():
            assert self.experiment.evaluation is not None
            try:
                if run.finished:
                    runner.measured(self.experiment.evaluation, self.options(run), run.folder)
            except RuntimeError as error:  # such as a GPU's memory, which other runs may not need
                failures.append(f"{run.folder} cannot be evaluated: {first_line(error)}")
        return failures

    def results(self, name: str) -> list[dict]:
        """The measured runs of an entry, one for each seed, as table.json has them."""
        experiment, results = self.experiment, []
        if experiment.compute:
            values, curves = experiment.compute(name)
            made = {"environment": environment(), "evaluation": {"curves": curves}}
            return [{"seed": None, "values": values} | made]
        for seed in self.seeds:
            try:
                run, *others = (self.scale.run(one, seed) for one in (name, *experiment.needs))
            except UserError:  # not chosen, and impossible at this scale: a quarter of two heads
                return []
            if not all(one.finished and not one.difference() for one in (run, *others)):
                continue
            found: dict | None
            if experiment.read:
                values, curves = experiment.read(run, *others)
                found = {"curves": curves}
            elif found := self.stored(run):
                values = experiment.values(found, self.scale.config)
                found |= {"curves": experiment.curves(found)} if experiment.curves else {}
            if found:
                results.append(run.entry(values, found))
        return results
