"""How the values of a table are made: measured on runs, read from their files, or computed."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from matplotlib.figure import Figure

from config import Config
from errors import UserError, first_line
from runtime.device import environment
from scripts.common import runner
from scripts.common.runner import Evaluation
from scripts.common.validation import TextEvaluation
from scripts.reproduce.entries import VIEWS, Entry, Scale
from scripts.reproduce.planned import PlannedRun, with_bases

# (x, y) by the title of the panel that they are drawn in
Curves = dict[str, tuple[list[float], list[float]]]
Values = tuple[Sequence[float | None], Curves]  # the columns of an entry, and its curves
Pictures = Figure | dict[str, Figure]  # one picture, or several by file name
Multiples = tuple[float, ...]  # of the training length


def in_tokens(multiple: float, config: Config) -> int:
    """Return a multiple of the training length in tokens."""
    return round(multiple * config.block_size)


def all_in_tokens(multiples: Sequence[float], config: Config) -> tuple[int, ...]:
    """Return multiples of the training length in tokens."""
    return tuple(in_tokens(multiple, config) for multiple in multiples)


def up_to_16x(table: dict) -> int:
    """Return the column of the longest length, up to 16 times the training length."""
    return bisect_right(table["multiples"], 16) - 1


@dataclass(frozen=True)
class Experiment:
    """A table or figure: its entries, its columns, where their values come from, its pictures.

    Either `evaluation` measures finished runs, or `read` takes the values from the files of runs,
    or `compute` needs no runs. The columns are first the multiples of the training length, then
    the named columns.
    """

    title: str
    unit: str
    entries: tuple[Entry, ...]
    multiples: Multiples | Callable[[Config], Multiples] = ()  # Config: of the scale
    columns: tuple[str, ...] = ()
    better: str | None | tuple[str | None, ...] = None  # "lower" or "higher"; a tuple: by column
    digits: int = 4
    task: str = "language"  # of the runs

    evaluation: Callable[[Config], Evaluation] | None = None  # Config: of the scale
    # the columns of a run's measurement
    values: Callable[[dict], Sequence[float | None]] = lambda measured: []
    curves: Callable[[dict], Curves] | None = None  # of a run's measurement
    read: Callable[..., Values] | None = None  # of a run, and of the runs of `needs`
    needs: tuple[Entry, ...] = ()  # whose runs are trained too
    compute: Callable[[Entry], Values] | None = None

    draw: Callable[[dict], Pictures] = lambda table: {}  # means over seeds
    draw_first_seed: Callable[[dict], Pictures] | None = None  # of its measurements
    paper: dict | None = None  # the section of papers.json with values for these entries
    paper_scale: str = "124m"  # where the section names no scales
    note: str = ""
    remarks: Callable[[dict], Sequence[str]] = lambda table: ()  # sentences on a table
    baseline: str = ""  # the entry that the others are compared with, seed by seed
    committed: dict | None = None  # a table, with its folder, whose rows are shown too

    def multiples_at(self, config: Config) -> Multiples:
        """The columns that are lengths, in multiples of the training length."""
        if callable(self.multiples):
            return self.multiples(config)
        return self.multiples


@dataclass(frozen=True)
class Work:
    """The work of one command: the chosen entries of an experiment, for each seed."""

    name: str
    experiment: Experiment
    scale: Scale
    chosen: tuple[Entry, ...]
    seeds: Sequence[int]
    again: bool = False  # measure again what has been measured

    def runs(self) -> list[PlannedRun]:
        """List all runs of a seed before the next seed, so that a first table is complete early."""
        if self.experiment.compute:
            return []
        entries = (*self.experiment.needs, *self.chosen)
        runs = [self.scale.run(entry, seed) for seed in self.seeds for entry in entries]
        return with_bases(runs)

    def evaluations(self) -> Iterator[tuple[Evaluation, PlannedRun]]:
        """Yield each evaluation of a run, and the run."""
        for seed in self.seeds:
            for entry in self.chosen:
                evaluation = self.evaluation(entry)
                if evaluation is not None:
                    yield evaluation, self.scale.run(entry, seed)

    def evaluation(self, entry: Entry) -> Evaluation | None:
        """Return the evaluation, if there is one, with the options of the entry's view."""
        if self.experiment.evaluation is None:
            return None
        config = self.scale.config
        evaluation = replace(
            self.experiment.evaluation(config),
            device=config.device,
            dtype=config.dtype,
            attention_impl=config.attention_impl,
            again=self.again,
            **VIEWS[entry.view],
        )
        # the run's own folder may be gone, or have other text
        if isinstance(evaluation, TextEvaluation):
            evaluation = replace(evaluation, data_dir=config.data_dir)
        return evaluation

    def measure(self) -> list[str]:
        """Measure the finished runs; returns a sentence for each failure."""
        failures = []
        for evaluation, run in self.evaluations():
            if not run.finished:
                continue
            try:
                measured = runner.measure_or_load(evaluation, run.folder)
            # such as a GPU's memory, or damaged files, which other runs may not have
            except (RuntimeError, UserError) as error:
                failures.append(f"{run.folder} cannot be evaluated: {first_line(error)}")
                continue
            if measured["step"] != run.step:  # a checkpoint before a damaged one
                failures.append(
                    f"{run.folder}: the checkpoint of step {run.step} cannot be read; `python "
                    f"train.py --resume {run.folder}` trains on from step {measured['step']}"
                )
        return failures

    def results(self, entry: Entry) -> list[dict]:
        """Return the measured runs of an entry, one for each seed, as table.json has them.

        An entry that was not chosen may have runs that cannot be built at this scale (a quarter of
        two heads) or cannot be read (an older version's): they are left out. Raises UserError if a
        run of a chosen entry cannot be read, unless `measure` has reported it.
        """
        if self.experiment.compute:
            values, curves = self.experiment.compute(entry)
            return [
                {
                    "seed": None,
                    "values": values,
                    "environment": environment(torch.device("cpu")),
                    "evaluation": {"curves": curves},
                }
            ]
        results = []
        for seed in self.seeds:
            try:
                result = self.result(entry, self.scale.run(entry, seed))
            except UserError:
                if entry in self.chosen and self.experiment.read:
                    raise
                continue
            if result is not None:
                results.append(result)
        return results

    def result(self, entry: Entry, run: PlannedRun) -> dict | None:
        """Return a run as table.json has it; None where it, or one that it needs, is missing."""
        experiment = self.experiment
        needed = [self.scale.run(other, run.config.seed) for other in experiment.needs]
        for planned in (run, *needed):
            if not planned.finished or planned.difference():
                return None
        if experiment.read:
            values, curves = experiment.read(run, *needed)
            return run.record(values, {"curves": curves})
        evaluation = self.evaluation(entry)
        assert evaluation is not None
        measured = runner.load_stored(evaluation, run.folder)
        if measured is None or measured["step"] != run.step:
            return None
        values = experiment.values(measured)
        if experiment.curves:
            measured["curves"] = experiment.curves(measured)
        return run.record(values, measured)
