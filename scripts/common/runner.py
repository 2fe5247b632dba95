"""What every evaluation of finished runs shares: options, opening a run, its store, its command.

An evaluation is a frozen dataclass whose fields are its options, on the command line and in
scripts.reproduce alike:

    @dataclass(frozen=True, kw_only=True)
    class LikeliestToken(Evaluation):
        \"\"\"Mean probability of the likeliest token.\"\"\"

        name = "likeliest_token"                     # measurements go to RUN/likeliest_token.json
        tokens: int = option(1000, "validation tokens", at_least=1)

        def parts(self, config: Config) -> list[str]:
            return [f"{self.tokens} tokens"]

        def measure_part(self, run: Run, name: str) -> dict:
            return {"probability": ...}

`measured(LikeliestToken(tokens=50), "out/softmax")` measures a run once: a measurement is stored
with the facts that identify it, and found again by them.
"""

import argparse
import functools
import hashlib
import importlib.util
import os
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from filelock import FileLock
from matplotlib.figure import Figure
from tqdm import tqdm

from attention import VARIANTS
from attention_paths.fingerprint import differs
from config import ROOT, Config, choices, names
from errors import UserError, command
from layers.build import build_model
from layers.heads import check_attention, formulas_hash
from layers.rope import Rope
from layers.selfcheck import check_kernels
from model import GPT
from runtime import checkpoint
from runtime.device import autocast, environment, pick_device, pick_dtype
from runtime.files import check_writable, read_json, write_json
from scripts.common.plots import save_picture

# Tokens of an evaluation batch, unless one sequence is longer.
BATCH_TOKENS = 16384
# The longest label of a run, and the longest file name of a picture, in characters.
LONGEST_LABEL, LONGEST_NAME = 40, 59
PICTURES = (".png", ".pdf", ".svg")
# The settings that decide what a run learns.
LEARNED = names("attention", "model", "data", "optimisation")


T = TypeVar("T")


# ---- options ----


def option(
    default: Any, help: str, *, at_least: int | None = None, choices: Collection[str] | None = None
) -> Any:
    """A field that is an option of the command."""
    return field(default=default, metadata={"help": help, "at_least": at_least, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to open a finished run."""

    task: ClassVar[str] = "language"  # of the runs that can be opened

    checkpoint: str = option("latest", "of the run", choices=("latest", "best"))
    rope: str = option("dynamic_ntk", f"RoPE scaling: {', '.join(Rope.SCALINGS)}")
    rope_factor: float | None = option(None, "of the scaling: see layers.rope.Rope")
    rope_theta: float | None = option(None, "another base (SSMax: 500000)")
    window: int | None = option(None, "each query sees so many last keys only", at_least=1)
    attention: str | None = option(None, "another variant; it re-weights only with --p")
    p: float | None = option(None, "another power of the re-weighting")
    device: str = option("auto", "'auto', 'cuda', 'cuda:1', 'mps' or 'cpu'")
    dtype: str = option("auto", "of matrix products", choices=choices("dtype"))
    attention_impl: str = option("auto", "path of attention", choices=choices("attention_impl"))

    @property
    def torch_dtype(self) -> torch.dtype:
        return pick_dtype(self.dtype, pick_device(self.device))

    def applied(self, config: Config) -> Config:
        """A run's config with the attention path, the variant, the window and the p of the options.

        The run's own attention path was chosen for the machine that trained it. Another variant
        re-weights with --p, or with the run's p if it needs p. Raises UserError for a run of
        another task.
        """
        if self.task not in config.tasks:
            found = f"{config.out_dir} has task = {config.task!r}"
            raise UserError(f"{found}, but this command is for task = {self.task!r}")
        options = {"attention": self.attention, "window": self.window, "p": self.p}
        changes: dict[str, Any] = {k: value for k, value in options.items() if value is not None}
        variant = VARIANTS.get(self.attention or "")
        if variant is not None and self.p is None and not variant.needs_p:
            changes["p"] = None
        if self.attention not in (None, config.attention):  # settings of the run's own variant
            changes |= {key: getattr(Config, key) for key in ("s_init", "b_init", "gamma")}
        return config.replace(attention_impl=self.attention_impl, **changes)

    def rope_for(self, config: Config) -> str:
        """The RoPE scaling of a run with this config: "none" for a run without RoPE.

        Raises UserError where a scaling other than the default, a factor or a base is asked of a
        run without RoPE, for an unknown scaling or an invalid factor or base, and for YaRN, which
        scales the scores too, where heads with and without positions share one attention.
        """
        theta = {} if self.rope_theta is None else {"theta": self.rope_theta}
        Rope(2, 1, scaling=self.rope, factor=self.rope_factor, **theta)
        if config.positions == "rope":
            if self.rope == "yarn" and config.nope_share and config.local_window is None:
                raise UserError(
                    "--rope yarn scales the scores of all heads of a layer, but nope_share = "
                    f"{config.nope_share} leaves heads without RoPE"
                )
            return self.rope
        if self.rope_factor or self.rope_theta or self.rope not in ("none", Options.rope):
            raise UserError(
                f"--rope: {config.out_dir} has positions = {config.positions!r}: no RoPE"
            )
        return "none"


@dataclass(frozen=True)
class Run:
    """A finished run, its model on its device, in evaluation mode, with scaled RoPE."""

    path: Path  # its folder
    config: Config
    model: GPT
    device: torch.device
    dtype: torch.dtype  # of matrix products
    facts: dict  # `run_facts`

    def autocast(self) -> torch.autocast:
        return autocast(self.device, self.dtype)


def load_run(path: str | Path, options: Options = Options()) -> Run:
    """Load a run, or the .pt file of a checkpoint, for evaluation.

    Raises UserError where the run or the device is missing.
    """
    device = pick_device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    trained = checkpoint.read_config(path)
    config = options.applied(trained)
    model = build_model(config).to(device)
    check_kernels(model, config, options.torch_dtype)
    model.scale_rope(options.rope_for(config), options.rope_factor, options.rope_theta)
    weights = checkpoint.load_weights(model, path, options.checkpoint)
    facts, folder = run_facts(trained, weights, options), checkpoint.folder_of(path)
    if edited := checkpoint.edited_formulas(folder, trained):
        print(f"warning: {path} was trained with {edited}", file=sys.stderr)
    return Run(folder, config, model.eval(), device, options.torch_dtype, facts)


def run_facts(trained: Config, weights: checkpoint.Found, options: Options) -> dict:
    """What every measurement records about its run, its checkpoint and how the run was opened."""
    config = options.applied(trained)
    other = "" if options.attention is None else f" as {options.attention}"
    return {
        "variant": trained.variant_name + other, "seed": config.seed,
        "checkpoint": options.checkpoint, **weights.id, "trained_length": config.block_size,
        "rope": options.rope_for(config), "rope_factor": options.rope_factor,
        "rope_theta": options.rope_theta, "window": config.window, "p": config.p,
        "dtype": str(options.torch_dtype).removeprefix("torch."),
        "attention_impl": options.attention_impl, "formulas": formulas_hash(config),
    }  # fmt: skip


def batches(items: Iterable[T], length: int) -> Iterator[list[T]]:
    """Items of one length in batches of up to BATCH_TOKENS tokens, drawn lazily."""
    left = iter(tqdm(items, leave=False, disable=None))
    while batch := list(islice(left, max(1, BATCH_TOKENS // length))):
        yield batch


def require(extra: str, *modules: str) -> None:
    """Raise UserError unless these modules of an extra of pyproject.toml are installed."""
    if not all(map(importlib.util.find_spec, modules)):
        raise UserError(f'this needs {" and ".join(modules)}: pip install -e ".[{extra}]"')


# ---- measurements ----


class Store:
    """One measurement in a results file, a JSON list of measurements; `facts` identify it.

    The file is read again for every use, since another process may be adding to it. Each part is
    saved when it is measured, so that an interrupted command continues from there.
    """

    def __init__(self, path: Path, facts: dict, device: str = "auto"):
        self.path, self.facts, self.device = path, facts, device

    @property
    def values(self) -> dict:
        """All values saved so far."""
        return next((m for m in read_measurements(self.path) if self._is(m)), {})

    @property
    def parts(self) -> dict[str, dict]:
        """The parts saved so far."""
        return self.values.get("parts", {})

    def add(self, part: str, value: dict) -> None:
        # a lock of its own: a run may be evaluated while it trains
        with FileLock(self.path.parent / ".results.lock"):
            others = [m for m in read_measurements(self.path) if not self._is(m)]
            code = self.values.get("code", {}) | {part: code_of(self.path.stem)}
            parts = {"parts": self.parts | {part: value}, "code": code}
            own = self.facts | parts | {"environment": environment(self.device)}
            write_json(self.path, [*others, own])

    def _is(self, measurement: dict) -> bool:
        """Whether the facts are the same, as far as the formulas can be compared.

        The same data may lie in several folders: the hash of the shards tells them apart.
        """
        now = {key: self.facts.get(key, "") for key in ("formulas", "data_dir")}
        same = self.facts.items() <= (measurement | now).items()
        return same and not differs(measurement.get("formulas"), now["formulas"])


@functools.cache
def code_of(name: str) -> str:
    """A hash of the code of the model, its attention and the evaluation of this name."""
    model = ("attention.py", "model.py", "generation.py", "attention_paths/**/*.py", "layers/*.py")
    shared = ("scripts/common/retrieval.py", "scripts/common/validation.py")
    code = (*model, "evaluation.py", "data/*.py", *shared, f"scripts/{name}.py")
    files = [file for pattern in code for file in sorted(ROOT.glob(pattern))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Evaluation(Options):
    """A measurement of finished runs: its options as fields, and how its parts are measured."""

    name: ClassVar[str]  # of its results file

    again: bool = option(False, "measure again what has been measured")

    def facts(self, config: Config) -> dict:
        """What identifies the measurement of a run with this config, along with `run_facts`.

        Raises UserError where such a run cannot be measured.
        """
        return {}

    def check(self, config: Config) -> None:
        """Raise UserError, before a run with this config is trained, if it cannot be measured."""
        config = self.applied(config)
        check_attention(config)
        self.rope_for(config)
        self.facts(config)  # last, as it may take a download

    def parts(self, config: Config) -> list[str]:
        """The names of the parts that are measured one after the other."""
        raise NotImplementedError

    def measure_part(self, run: Run, name: str) -> dict:
        """The values of a part."""
        raise NotImplementedError

    def measure(self, run: Run, store: Store) -> None:
        """Measure and store the parts that are missing; with `again`, all."""
        known = {} if self.again else store.parts
        missing = [name for name in self.parts(run.config) if name not in known]
        for name in tqdm(missing, str(run.path), unit="part"):
            store.add(name, self.measure_part(run, name))

    def select(self, measurement: dict, config: Config) -> dict | None:
        """The measurement, reduced to the requested parts; None if one of them is missing."""
        names, known = self.parts(config), measurement.get("parts", {})
        if not known.keys() >= set(names):
            return None
        return measurement | {"parts": {name: known[name] for name in names}}

    def control(self, config: Config) -> "Evaluation | None":
        """Another measurement of a run, which its own is compared with."""
        return None

    def for_runs(self, paths: Sequence[str]) -> "Evaluation":
        """The evaluation of these runs together, which makes their results comparable."""
        return self

    def picture(self, path: str | Path, measurement: dict) -> Figure | None:
        """A picture of one run's measurement, for RUN/NAME.png."""
        return None

    def results_file(self, path: str | Path) -> Path:
        """The results file of a run."""
        return checkpoint.folder_of(path) / f"{self.name}.json"


def measured(evaluation: Evaluation, path: str | Path) -> dict:
    """`stored`, after measuring what is missing."""
    path = checkpoint.find(path, evaluation.checkpoint).path  # a run in training saves newer ones
    found = None if evaluation.again else stored(evaluation, path)
    if found is None:
        run = load_run(path, evaluation)
        facts = run.facts | evaluation.facts(run.config)
        store = Store(evaluation.results_file(path), facts, evaluation.device)
        evaluation.measure(run, store)
        if control := evaluation.control(checkpoint.read_config(path)):
            measured(control, path)
        found = stored(evaluation, path)
        assert found is not None  # all of it has been measured
    code = found.get("code", {})
    if any(code.get(part) != code_of(evaluation.name) for part in found["parts"]):
        print(f"{path}: measured with other code; --again repeats it")
    return found


def stored(evaluation: Evaluation, path: str | Path) -> dict | None:
    """A run's stored measurement, reduced to what the evaluation asks for; None if incomplete.

    The measurement of its control, if there is one, is the entry `control`.
    """
    trained = checkpoint.read_config(path)
    facts = run_facts(trained, checkpoint.find(path, evaluation.checkpoint, quiet=True), evaluation)
    config = evaluation.applied(trained)
    values = Store(evaluation.results_file(path), facts | evaluation.facts(config)).values
    own, control = evaluation.select(values, config), evaluation.control(trained)
    if own is None or control is None:
        return own
    controlled = stored(control, path)
    return controlled and own | {"control": controlled}


def with_controls(results: dict[str, dict]) -> Iterator[tuple[str, dict, bool]]:
    """Labels and measurements, each followed by its control, if there is one."""
    for name, result in results.items():
        yield name, result, False
        if "control" in result:
            yield name, result["control"], True


def title_of(measurements: Iterable[dict]) -> str:
    """How the runs were opened, as far as all agree: "rope yarn, window 512"."""
    first, *others = (m | {"as": m["variant"].partition(" as ")[2] or None} for m in measurements)
    names = ("as", "rope", "rope_factor", "rope_theta", "window", "p")
    shared = [key for key in names if all(other[key] == first[key] for other in others)]
    return ", ".join(f"{key} {first[key]}" for key in shared if first[key] is not None)


def read_measurements(path: Path) -> list[dict]:
    """The measurements in a results file. Raises UserError where it holds something else."""
    return read_json(path, list[dict[str, Any]]) or []


# ---- commands ----


class Parser(argparse.ArgumentParser):
    """Reports a mistake as one sentence."""

    def error(self, message: str) -> NoReturn:
        raise UserError(re.sub(r"^argument (\S+):", r"\1", message))


def picture_file(text: str) -> Path:
    """The file of --out."""
    path, formats = Path(text), ", ".join(PICTURES)
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text} must end in {formats}")
    check_writable(path.parent)
    return path


RUN = {"metavar": "RUN", "help": "a run's folder, or a .pt in it"}
RUNS: dict[str, dict[str, Any]] = {
    "runs": {"nargs": "+"} | RUN,
    "--out": {"metavar": "FILE", "type": picture_file, "help": "of the picture: .png, .pdf, .svg"},
}


def parse(
    kind: type[Any], argv: Sequence[str] | None = None, others: dict[str, dict] = RUNS
) -> tuple[Any, Any]:
    """A dataclass of options from the command line, and the `others`, which are no fields of it.

    Raises UserError where a number is too small.
    """
    parser = Parser(description=(kind.__doc__ or "").split("\n\n")[0])
    for name, how in others.items():
        parser.add_argument(name, **how)
    hints = typing.get_type_hints(kind)
    for one in fields(kind):
        about, (hint, *_) = one.metadata, typing.get_args(hints[one.name]) or (hints[one.name],)
        default = "" if one.default in (None, False) else " (%(default)s)"
        settings: dict[str, Any] = {"default": one.default, "help": about["help"] + default}
        if hint is bool:
            settings["action"] = "store_true"
        else:
            settings["choices"] = about["choices"]
            settings["type"] = lengths_of if hint == tuple[int, ...] else hint
        parser.add_argument(f"--{one.name}", **settings)
    arguments = parser.parse_args(argv)
    values = {one.name: getattr(arguments, one.name) for one in fields(kind)}
    for one in fields(kind):
        value, least = values[one.name], one.metadata["at_least"]
        if None not in (value, least) and not value >= least:
            raise UserError(f"--{one.name} {value} must be at least {least}")
    return kind(**values), arguments


def lengths_of(text: str) -> tuple[int, ...]:
    """Lengths in tokens, such as 1024,2048, in ascending order."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers above 0, as 1024,2048")
    return tuple(sorted(set(map(int, parts))))


Results = dict[str, dict]  # measurements by the labels of their runs
Show = Callable[[Any, Results], dict[str, Figure]]


def as_command(kind: type[Evaluation], show: Show) -> Callable[[], None]:
    """The `main` of an evaluation: measures the runs of the command line, prints and draws them.

    `show(evaluation, results)` prints a table and returns pictures by name.
    """

    @command
    def main() -> None:
        evaluation, arguments = parse(kind)
        evaluation = evaluation.for_runs(arguments.runs)
        check_runs(arguments.runs, evaluation)
        measurements = [measured(evaluation, path) for path in arguments.runs]
        pictures = show(evaluation, dict(zip(run_names(arguments.runs), measurements, strict=True)))
        for path, measurement in zip(arguments.runs, measurements, strict=True):
            if own := evaluation.picture(path, measurement):
                save_picture(own, picture_path([path], evaluation.name))
        for i, (name, figure) in enumerate(pictures.items()):
            file = arguments.out or picture_path(arguments.runs, name)
            if arguments.out and i:
                file = file.with_stem(f"{file.stem}_{name}")
            save_picture(figure, file)
        if arguments.out and not pictures:
            print(f"--out {arguments.out}: there is nothing to draw", file=sys.stderr)

    return main


def check_runs(paths: Sequence[str | Path], evaluation: Evaluation) -> None:
    """Raise UserError, before any work, where a run cannot be measured or its results saved."""
    pick_dtype(evaluation.dtype, pick_device(evaluation.device))
    for path in paths:
        checkpoint.find(path, evaluation.checkpoint, quiet=True)  # load_run reports damaged ones
        read_measurements(evaluation.results_file(path))
        check_writable(checkpoint.folder_of(path))
    check_writable(common_folder(paths))
    for path in paths:
        evaluation.check(checkpoint.read_config(path))


def run_names(paths: Sequence[str | Path]) -> list[str]:
    """Labels for tables and pictures: the settings in which the runs differ, or their paths."""
    configs = [checkpoint.read_config(path) for path in paths]
    differ = [k for k in LEARNED if len({getattr(config, k) for config in configs}) > 1]
    others = [key for key in differ if key not in ("attention", "p")]
    labels = []
    for config in configs:
        variant = [] if differ and others == differ else [config.variant_name]
        settings = [f"{key} {shown(getattr(config, key))}" for key in others]
        labels.append(", ".join(variant + settings))
    if len(set(labels)) == len(labels) and len(max(labels, key=len)) <= LONGEST_LABEL:
        return labels
    folders = [Path(path).resolve() for path in paths]
    return [os.path.relpath(folder, os.path.commonpath(folders)) for folder in folders]


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def common_folder(paths: Sequence[str | Path]) -> Path:
    """Where a picture of these runs goes: the run's folder, or the common parent of several."""
    if len(paths) == 1:
        return checkpoint.folder_of(Path(paths[0]).resolve())
    return Path(os.path.commonpath([Path(path).resolve().parent for path in paths]))


def picture_path(paths: Sequence[str | Path], name: str) -> Path:
    """The file of a picture of these runs, in `common_folder`.

    The name of a picture of several runs, or of a checkpoint's file, contains their paths, so that
    other runs have other pictures.
    """
    folder = common_folder(paths)
    found = [Path(path).resolve().relative_to(folder) for path in paths]  # one run's is empty
    labels = ["-".join(one.parts).removesuffix(".pt") for one in found]
    return folder / f"{shortened('_'.join(filter(None, [name, *labels])))}.png"


def shortened(name: str) -> str:
    """A file name that fits with its suffix: of a longer one its beginning, and a hash."""
    if len(name) <= LONGEST_NAME - len(".png"):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - len('_.png') - len(digest)]}_{digest}"
