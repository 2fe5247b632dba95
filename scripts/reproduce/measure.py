"""How the numbers of a table are measured, on finished runs or as the cost of a step."""

import argparse
import functools
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from config import MAY_CHANGE_ON_RESUME, Config
from errors import EXIT_MISTAKE, UserError
from model import GPT, KVCache, Trunk
from runtime import checkpoint
from runtime.device import autocast, environment, pick_compile, pick_device, pick_dtype
from runtime.files import read_json, write_json
from scripts import benchmark, finetune_squad
from scripts.common.papers import LSSAR
from scripts.common.planned import PlannedRun, call, call_when_free
from scripts.common.results import matches, read_results
from scripts.common.runs import Request, run_facts
from scripts.reproduce.training import Work, find_row

# Settings that affect neither the time nor the memory of a step.
UNTIMED = MAY_CHANGE_ON_RESUME - {"attention_impl", "batch_size", "device", "dtype", "compile"}


def at(multiple: float, config: Config) -> int:
    """A multiple of the training length, in tokens."""
    return round(multiple * config.block_size)


def stretched(multiples: tuple, prompt: int, config: Config) -> tuple:
    """The multiples times the smallest integer at which the training length fits a prompt.

    Names are unchanged.
    """
    factor = -(-prompt // config.block_size)
    return tuple(m if isinstance(m, str) else m * factor for m in multiples)


def options(config: Config, rope: str = "dynamic_ntk", theta: float | None = None) -> dict:
    """How to open the runs of a scale, as keywords of a request."""
    return {"rope": rope, "rope_theta": theta, "device": config.device, "dtype": config.dtype}


@dataclass(frozen=True)
class Evaluation:
    """How the numbers of a table are measured: one request for each run, and its columns."""

    keys: tuple  # columns: multiples of the training length, or names
    request: Callable[[Config], Request]  # at this scale
    values: Callable[[dict, Config], list[float]]  # columns of what `Request.select` returns
    better: str | tuple[str | None, ...] | None = "lower"  # a tuple: for each column
    digits: int = 4
    finetuned: bool = False  # on SQuAD before measuring
    prompt: Callable[[Config], int] = lambda config: 1  # the shortest length that fits it
    control: Callable[[Any, Config], Request | None] = lambda request, config: None
    views: Mapping[str, dict] = field(default_factory=dict)  # changes of the request, by name
    refuse: Callable[[Config], object] = lambda config: None  # may raise UserError

    trained, compare = True, "difference"

    def columns(self, config: Config) -> tuple:
        """The keys at this scale."""
        return stretched(self.keys, self.prompt(config), config)

    def notes(self, config: Config) -> tuple[str, ...]:
        factor, *_ = stretched((1,), self.prompt(config), config)
        if factor == 1:
            return ()
        return (
            f"The paper's lengths begin at the training length. Here they begin at {factor} times "
            f"that, and are all {factor} times as long, since the prompt takes "
            f"{self.prompt(config)} tokens.",
        )

    def request_of(self, run: PlannedRun) -> Request:
        """The request for a row, which may name a view, as softmax:yarn does."""
        changes = self.views[run.view] if run.view else {}
        return replace(self.request(run.config), **changes)

    def command(self, request: Request) -> list[str]:
        return [sys.executable, "-m", f"scripts.{request.script}", *request.arguments()]

    def check(self, work: Work) -> None:
        """Raise UserError for anything that would be refused after training."""
        if self.finetuned and not (work.squad or importlib.util.find_spec("datasets")):
            raise UserError(
                "SQuAD needs a library: pip install datasets, or give --squad its train-v2.0.json"
            )
        if self.finetuned and work.squad and not Path(work.squad).is_file():
            raise UserError(f"--squad {work.squad}: no such file")
        if work.missing_shards or not all(self.find(run) for run in work.runs):
            self.refuse(work.scale.config)
            if not work.planning:
                self.request(work.scale.config).check(work.scale.config)
        for run in work.runs if self.finetuned else ():
            if problem := tuning_difference(run, work):
                raise UserError(
                    f"{self.folder(run)} was fine-tuned with {problem}; move it away to fine-tune "
                    "again, or request the same as before"
                )

    def plan(self, work: Work) -> str:
        config, epochs = work.scale.config, finetune_squad.EPOCHS
        request = self.request(config)
        try:
            left = [run for run in work.runs if self.find(run) is None]
            if not left:
                return "to evaluate: 0 runs"
            total = sum(
                one.amount(run.config)
                for run in left
                for one in (self.request_of(run), self.control(self.request_of(run), run.config))
                if one
            )
            amount = f"{len(left)} runs, {total:,} {request.unit} in all"
        except UserError as error:
            if not work.planning:
                raise
            amount = f"{len(work.runs)} runs at most, {request.unit} unknown ({error})"
        tuning = f"fine-tuned for {epochs} epochs of SQuAD, then " if self.finetuned else ""
        shown = " ".join(["python", *self.command(request)[1:]])
        return f"to evaluate: {amount}, each {tuning}with {shown}"

    def measure(self, work: Work) -> list[str]:
        """Measure the finished runs where needed; returns a sentence for each failure."""
        failures = []
        for run in work.runs:
            if not run.finished or self.find(run):
                continue
            code, what = 0, f"-m scripts.finetune_squad {run.folder}"
            if self.finetuned:
                tuning = functools.partial(finetune, run, work.squad)
                code = call_when_free(self.folder(run), tuning)
            if not code:
                command = [*self.command(self.request_of(run)), str(self.folder(run))]
                code, what = call(command), " ".join(command[1:])
            if code == EXIT_MISTAKE:
                raise UserError(f"{run.folder} cannot be evaluated; the message is above")
            if code:
                failures.append(f"python {what} ended with exit code {code}")
        return failures

    def folder(self, run: PlannedRun) -> Path:
        return run.folder / "squad" if self.finetuned else run.folder

    def find(self, run: PlannedRun) -> dict | None:
        """The finished run's measurement, reduced to what the table needs; None without it.

        That of the control, if the table has one, is in `control`.
        """
        folder, request = self.folder(run), self.request_of(run)
        weights = checkpoint.newest(folder)
        if weights is None or not run.finished or (self.finetuned and not finetuned(run)):
            return None
        # the saved config, as the script sees it: data_dir may be another path to the same data
        config = checkpoint.read_config(folder)
        measured = find_measurement(request, folder, weights, config)
        control = self.control(request, config)
        if measured is None or control is None:
            return measured
        other = find_measurement(control, folder, weights, config)
        return other and measured | {"control": other}

    def results(self, work: Work, row: str) -> list[dict]:
        """The entries of table.json for the finished and measured runs of a row."""
        results = []
        for run in (work.scale.run(row, seed) for seed in work.seeds):
            if not run.finished or run.disagreement():
                continue
            if self.finetuned and tuning_difference(run, work):
                continue
            if measured := self.find(run):
                evaluation = measured | {"folder": str(self.folder(run))}
                results.append(run.entry(self.values(measured, run.config), evaluation))
        return results


@dataclass(frozen=True)
class WithCosts(Evaluation, ABC):
    """The same with more columns: what the rows cost, measured once for each row and machine."""

    costs: ClassVar[tuple[str, ...]]  # the columns
    what: ClassVar[str]
    rounds: ClassVar[int]

    @abstractmethod
    def time(self, work: Work, left: list[str]) -> dict[str, dict]:
        """The figures of the rows that are left, and of those measured before."""

    @abstractmethod
    def cost(self, figures: dict) -> list[float]:
        """The columns of a row's figures."""

    def columns(self, config: Config) -> tuple:
        return super().columns(config) + self.costs

    def file(self, work: Work) -> Path:
        return work.folder / "costs.json"

    def timed(self, work: Work) -> dict[str, dict]:
        """The figures of rows that were measured on this machine with these settings."""
        saved = read_json(self.file(work))
        return saved["rows"] if saved and not timed_otherwise(saved, work.scale.config) else {}

    def left(self, work: Work) -> list[str]:
        """The rows to time; a view of a row costs what the row does."""
        rows = dict.fromkeys(row.partition(":")[0] for row in work.rows)
        return [row for row in rows if row not in self.timed(work)]

    def plan(self, work: Work) -> str:
        left = self.left(work)
        rest = f"\nto time: {self.what} of {len(left)} rows" if left else ""
        return super().plan(work) + rest

    def measure(self, work: Work) -> list[str]:
        failures = super().measure(work)
        if left := self.left(work):
            rows = self.time(work, left)
            work.folder.mkdir(parents=True, exist_ok=True)
            threads = torch.get_num_threads()
            made = {"environment": environment(), "threads": threads, "rounds": self.rounds}
            settings = timed_settings(work.scale.config)
            write_json(self.file(work), made | {"settings": settings, "rows": rows})
        return failures

    def results(self, work: Work, row: str) -> list[dict]:
        if (timed := self.timed(work).get(row.partition(":")[0])) is None:
            return []
        costs, results = self.cost(timed), super().results(work, row)
        return [result | {"values": result["values"] + costs} for result in results]


@dataclass(frozen=True)
class WithDecoding(WithCosts):
    """The size of a row's cache, and the time of a token."""

    cached: float = 1.0  # multiples of the training length that are in the cache

    costs = "cache (kB per token)", "generation (ms per token)"
    what, rounds = "a generated token", 50

    def notes(self, config: Config) -> tuple[str, ...]:
        return (
            *super().notes(config),
            f"Generation: one more token of one sequence, of which {at(self.cached, config) - 1:,} "
            f"are cached; the rows take turns, and it is the fastest of {self.rounds} rounds, as "
            "other jobs can only slow one down. The cache is that of all layers.",
        )

    def time(self, work: Work, left: list[str]) -> dict[str, dict]:
        """All of them anew, as models of the cached length: their rounds are interleaved."""
        length = at(self.cached, work.scale.config)
        sizes = {"block_size": length, "batch_size": 1, "total_batch_size": length}
        names = [*self.timed(work), *left]
        rows = {row: work.scale.run(row, work.seeds[0]).config.replace(**sizes) for row in names}
        figures = benchmark.measure(rows, self.rounds, phases=("decode",))
        for row, config in rows.items():
            figures[row]["cache_bytes"] = cache_bytes(config)
        return figures

    def cost(self, figures: dict) -> list[float]:
        return [figures["cache_bytes"] / 1000, figures["decode_ms_spread"][0]]


@dataclass(frozen=True)
class WithSteps(WithCosts):
    """The number of parameters, and the time and memory of a training step over softmax's."""

    costs = "parameters (M)", "time of a step", "memory of a step"
    what, rounds = "a training step", 20

    def notes(self, config: Config) -> tuple[str, ...]:
        return (
            *super().notes(config),
            "Time and memory are of a training step with one micro-batch, over those of softmax, "
            f"with which the row takes turns: medians of {self.rounds} rounds.",
        )

    def time(self, work: Work, left: list[str]) -> dict[str, dict]:
        def config_of(row: str) -> Config:
            return work.scale.run(row, work.seeds[0]).config

        found = self.timed(work)
        softmax = config_of("softmax")
        for row in left:
            pair = {"softmax": softmax, row: config_of(row)}
            figures = benchmark.measure(pair, self.rounds, phases=("train",))
            with torch.device("meta"):
                parameters = GPT(pair[row]).count_parameters()
            found[row] = {
                "parameters": parameters,
                "ms": figures[row]["train_ms"] / figures["softmax"]["train_ms"],
                "mb": figures[row]["train_mb"] / figures["softmax"]["train_mb"],
                "softmax": figures["softmax"],
                "row": figures[row],
            }
        return found

    def cost(self, figures: dict) -> list[float]:
        return [figures["parameters"] / 1e6, figures["ms"], figures["mb"]]


def timed_settings(config: Config) -> dict[str, Any]:
    """The settings that the cost of a step may depend on, with the dtype that "auto" stands for."""
    dtype = pick_dtype(config.dtype, pick_device(config.device))
    settings = config.as_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    return {key: value for key, value in settings.items() if key not in UNTIMED}


def timed_otherwise(saved: dict, config: Config) -> str | None:
    """How the machine or a setting of saved costs differs from those here; None if none does.

    Costs without settings, as they once were saved, differ.
    """
    machine, here = saved["environment"]["machine"], environment()["machine"]
    if machine != here:
        return f"{machine}, not {here}"
    settings = saved.get("settings", {})
    for key, value in timed_settings(config).items():
        if settings.get(key) != value:
            return f"{key} = {settings.get(key)!r}, not {value!r}"
    return None


@torch.no_grad()
def cache_bytes(config: Config) -> int:
    """The bytes that all layers cache of a token, from those of one layer."""
    device = pick_device(config.device)
    trunk, cache = Trunk(config.replace(n_layer=1)).to(device), KVCache(1)
    with autocast(device, pick_dtype(config.dtype, device)):
        trunk(torch.zeros(1, 1, config.n_embd, device=device), cache)
    return config.n_layer * cache.nbytes


def find_measurement(
    request: Request, folder: Path, weights: checkpoint.Found, config: Config
) -> dict | None:
    """The saved measurement of these weights that answers a request, reduced to it."""
    facts = run_facts(config, weights, request) | request.facts(config)
    measurements = [m for m in read_results(request.file(folder)) if matches(m, facts)]
    selected = (request.select(measurement, config) for measurement in measurements)
    return next((m for m in selected if m is not None), None)


def machine(config: Config) -> list[str]:
    """The options that select the device and dtype of training, unless they are automatic."""
    settings = {"device": config.device, "dtype": config.dtype}
    return [f"--{key}={value}" for key, value in settings.items() if value != "auto"]


def finetuned(run: PlannedRun) -> bool:
    folder = run.folder / "squad"
    step = checkpoint.step(folder)
    return step is not None and step >= checkpoint.read_config(folder).max_iters


@functools.cache
def squad_digest(path: str, config: Config) -> str:
    """Hash of the examples that the runs of a scale are fine-tuned on."""
    examples, _ = finetune_squad.encode_all(finetune_squad.read_squad(path), config, path)
    return finetune_squad.digest(examples)


def tuning_difference(run: PlannedRun, work: Work) -> str | None:
    """How the existing fine-tuned run differs from the one requested; None if it does not.

    That is its questions, its initial weights, or a setting, with both values.
    """
    folder = run.folder / "squad"
    if checkpoint.step(folder) is None:
        return None
    facts = finetune_squad.read_facts(folder)
    requested = {
        "began_with": checkpoint.checkpoint_id(run.folder),
        **finetune_squad.recipe(run.config, facts["examples"] if facts else 0),
    }
    if work.squad:
        requested["sha256"] = squad_digest(work.squad, work.scale.config)
    else:
        requested["squad"] = finetune_squad.DATASET
    saved = dict(facts or {}) | checkpoint.read_config(folder).as_dict()
    for key, value in requested.items():
        if saved.get(key) != value:
            return f"{key} = {saved.get(key)!r}, not {value!r}"
    return None


def finetune(run: PlannedRun, squad: str | None) -> list[str] | None:
    """The command that fine-tunes a run, or the rest of it; None if nothing is left."""
    if finetuned(run):
        return None
    folder = run.folder / "squad"
    command = [sys.executable, "-m", "scripts.finetune_squad", str(run.folder)]
    command += [f"--out_dir={folder}", *([f"--squad={squad}"] if squad else [])]
    command += machine(run.config)
    return command + (["--resume"] if checkpoint.step(folder) is not None else [])


class Benchmark:
    """LSSAR Table A7: the cost of a step, with rows measured in turns; nothing is trained."""

    keys = tuple(LSSAR["table_a7"]["columns"])
    better, digits, trained = "lower", 1, False
    compare = "ratio"

    def check(self, work: Work) -> None:
        pass

    def columns(self, config: Config) -> tuple:
        """The paper's columns, and the same of the path that training takes here."""
        return self.keys + tuple(f"{config.attention_impl} {key}" for key in self.keys)

    def notes(self, config: Config) -> tuple[str, ...]:
        compiled = pick_compile(config.compile, pick_device(config.device))
        return (
            "The first four columns are of the paper's setting: standard PyTorch functions, one "
            "after the other, without torch.compile, and all logits at once. The others are of "
            f"what train.py and the evaluations use: attention_impl = {config.attention_impl}, "
            f"{'compiled' if compiled else 'not compiled'}.",
        )

    def file(self, work: Work) -> Path:
        return work.folder / "benchmark.json"

    def arguments(self, work: Work) -> dict:
        """The options of scripts.benchmark, by name."""
        return {
            "configs": [str(find_row(row).file) for row in LSSAR["table_a7"]["rows"]],
            "scale": next(iter(work.scale.files), None),
            "set": [setting.removeprefix("--") for setting in work.scale.settings],
            "impls": f"unfused,{work.scale.config.attention_impl}",
        }

    def difference(self, work: Work) -> str | None:
        """How the existing measurement differs from the one requested; None if it does not."""
        saved = read_json(self.file(work))
        requested = argparse.Namespace(**self.arguments(work), lengths=None, nanogpt=None)
        rows, _ = benchmark.parse_rows(requested)
        if difference := timed_otherwise(saved, next(iter(rows.values()))):
            return difference
        if missing := rows.keys() - saved["rows"].keys():
            return f"no {', '.join(sorted(missing))}"
        return None

    def plan(self, work: Work) -> str:
        steps = "steps in python -m scripts.benchmark, minutes"
        if not self.file(work).exists():
            return f"to measure: {steps}"
        if difference := self.difference(work):
            return f"to measure again: {steps}; {self.file(work)} has {difference}"
        return f"measured before: {self.file(work)}; delete it to measure again"

    def measure(self, work: Work) -> list[str]:
        if self.file(work).exists() and not self.difference(work):
            return []
        work.folder.mkdir(parents=True, exist_ok=True)
        options = self.arguments(work)
        command = [sys.executable, "-m", "scripts.benchmark", *options["configs"]]
        command += [f"--scale={options['scale']}"] if options["scale"] else []
        command += [f"--set={setting}" for setting in options["set"]]
        command += [f"--impls={options['impls']}", f"--out={self.file(work)}"]
        if code := call(command):
            raise UserError(f"scripts.benchmark ended with exit code {code}; its message is above")
        return []

    def results(self, work: Work, row: str) -> list[dict]:
        measured, impls = read_json(self.file(work)), self.arguments(work)["impls"].split(",")
        values = [measured["rows"][f"{row} {impl}"][key] for impl in impls for key in self.keys]
        environment = measured["environment"]
        wanted = ("shape", "dtype", "rounds")
        how = {key: measured["settings"].get(key) for key in wanted}
        how["environment"] = environment
        return [{"seed": None, "values": values, "environment": environment, "evaluation": how}]
