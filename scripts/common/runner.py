"""Evaluations of finished runs: their definition, their stored measurements, their commands.

An evaluation is a class: its fields are its options on the command line and in scripts.reproduce,
and its methods say what to measure, measure it and show it. A command, `python FILE.py RUN` in the
repository's folder, is a file with

    from dataclasses import dataclass

    import torch

    from config import PositiveInt
    from scripts.common.command_line import option
    from scripts.common.runner import as_command
    from scripts.common.validation import TextEvaluation, stretches, windows


    @dataclass(frozen=True, kw_only=True)
    class LikeliestToken(TextEvaluation):
        \"\"\"Mean probability of the likeliest token.\"\"\"

        name = "likeliest_token"  # measurements go to RUN/likeliest_token.json

        tokens: PositiveInt = option(1000, "validation tokens")

        def chunks(self, config):
            return {f"{self.tokens} tokens": self.tokens}

        def measure(self, run, tokens):
            length = run.config.block_size
            text = stretches((length,), tokens, run.config)
            means = []
            with torch.no_grad(), run.autocast():
                for x, _ in windows(text, length, run.device):
                    means.append(run.model(x).softmax(-1).amax(-1).mean())
            return {"probability": torch.stack(means).mean().item()}

        def show(self, results):
            for name, result in results.items():
                for chunk, values in result["parts"].items():
                    print(f"{name}, {chunk}: {values['probability']:.4f}")
            return {}  # pictures by name


    main = as_command(LikeliestToken)

    if __name__ == "__main__":
        main()

`measure_or_load(LikeliestToken(tokens=50), "out/softmax")` measures a run only once: a measurement
is stored with the facts that identify it, and looked up by them. These are the run's checkpoint and
how it was opened, the formulas of its attention, its validation shards, and what `identify` adds.
If a file of its class or of its base classes has changed since, a message says so. An option that
changes the numbers must be in the chunk's name, as `tokens` above, or in what `identify` returns:
otherwise a measurement with one value is reused for another value.
"""

import ast
import functools
import hashlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from matplotlib.figure import Figure
from tqdm import tqdm

from config import Config
from errors import UserError, command
from layers.heads import check_attention
from runtime.device import environment, pick_device
from runtime.files import check_writable, is_writable, locked, read_json, write_json
from runtime.hf_config import PRETRAINED
from scripts.common.command_line import option, parse, require
from scripts.common.hf_loading import scaled_config
from scripts.common.hf_models import (
    AnyRun,
    ModelConfig,
    find_weights,
    folder_of,
    hash_text,
    path_of,
    read_config,
    read_model,
)
from scripts.common.labels import common_folder, label_runs, picture_path
from scripts.common.options import Options
from scripts.common.plots import save_picture
from scripts.common.runs import Run, load_run, model_facts, model_on_meta, run_facts

COMMON = Path(__file__).resolve().parent
# What identifies the measurement of an evaluation that reads no validation text.
NO_TEXT = {"data_dir": None, "val_sha256": None}
# Options that models of transformers do not take.
RUN_ONLY = ("attention", "p", "log_base", "attention_impl")

Results = dict[str, dict]  # measurements by the labels of their runs


# ---- what an evaluation is ----


@dataclass(frozen=True, kw_only=True)
class Evaluation(Options, ABC):
    """A measurement of finished runs; its fields are its options on the command line.

    The config that a method gets is the run's with the options applied, but for `align` and
    `control` it is the config that the run was trained with.
    """

    name: ClassVar[str]  # measurements go to RUN/NAME.json
    # Whether models of transformers can be measured too: `config` is then a ModelConfig, run.model
    # a CausalLM.
    takes_models: ClassVar[bool] = False

    again: bool = option(False, "measure again what has been measured")

    @abstractmethod
    def chunks(self, config: Config) -> dict[str, Any]:
        """The chunks, which are measured one after the other, each stored when it is done.

        Maps the name of each chunk, its key in the measurement's `parts`, to the argument `chunk`
        of `measure`.
        """

    @abstractmethod
    def measure(self, run: Run, chunk: Any) -> dict:
        """The values of a chunk."""

    @abstractmethod
    def show(self, results: Results) -> dict[str, Figure]:
        """Print a table of the results; returns pictures by name."""

    def identify(self, config: Config) -> dict:
        """Facts that identify a measurement, besides the run, how it is opened and the text.

        Raises UserError if a run with this config cannot be measured.
        """
        return {}

    def align(self, configs: Sequence[Config]) -> Self:
        """The evaluation with the options that make the results of several runs comparable."""
        return self

    def control(self, config: Config) -> Self | None:
        """The evaluation with the options of the control measurement, or None."""
        return None

    def summarise(self, parts: dict[str, dict]) -> dict:
        """Values that a measurement has besides its parts, computed from them."""
        return {}

    def draw_run(self, run: AnyRun, result: dict) -> Figure | None:
        """A picture of one run's measurement, for RUN/NAME.png."""
        return None


def check_evaluation(evaluation: Evaluation, trained: Config) -> None:
    """Raise UserError, before a run with this config is trained, if it cannot be measured."""
    code_hash(evaluation)  # of the code that this process runs, which may be edited later
    environment_at_start(evaluation.device)
    check_opening(evaluation, trained)
    identity(evaluation, evaluation.apply_to(trained))  # last, as it may take a download


def check_opening(options: Options, trained: Config) -> None:
    """Raise UserError if a run with this config cannot be opened with these options."""
    config = options.apply_to(trained)
    try:
        check_attention(config)
    except UserError as error:
        raise UserError(f"{config.out_dir}: {error}") from error
    options.check_rope(config)


def identity(evaluation: Evaluation, config: Config) -> dict:
    """Return the facts that, with `run_facts`, identify a measurement of a run with this config.

    New validation shards mean a new measurement, unless `identify` returns NO_TEXT.
    """
    facts = {"tokenizer": config.tokenizer_id}
    evaluation_facts = evaluation.identify(config)
    if evaluation.task == "language" and "val_sha256" not in evaluation_facts:
        facts |= {"data_dir": config.data_dir, "val_sha256": hash_text(config)}
    return facts | evaluation_facts


def code_hash(evaluation: Evaluation) -> str:
    """A hash of the code in the files of an evaluation: of `measure`, its class and its bases.

    Files of scripts.common and of Python do not count, nor do comments, docstrings and formatting.
    """
    sources = [inspect.getsourcefile(evaluation.measure)]
    for kind in type(evaluation).__mro__:
        if kind.__module__ not in sys.stdlib_module_names:
            sources.append(getattr(sys.modules.get(kind.__module__), "__file__", None))
    hashes = {}
    for source in sources:
        if source is None:
            raise UserError(f"{evaluation.name}: its class must be in a file")
        file = Path(source).resolve()
        if file.parent != COMMON:
            hashes[file] = hash_code(file)
    if len(hashes) == 1:
        return hashes.popitem()[1]
    return hashlib.sha256("".join(hashes.values()).encode()).hexdigest()[:16]


@functools.cache  # a process runs the code as it was at its start
def hash_code(file: Path) -> str:
    structure = syntax(ast.parse(file.read_bytes()))
    return hashlib.sha256(repr(structure).encode()).hexdigest()[:16]


def syntax(node: object) -> object:
    """Return a syntax tree without docstrings, in a form that Python 3.11 to 3.13 give alike."""
    if isinstance(node, list):
        return [syntax(item) for item in node if not is_docstring(item)]
    if isinstance(node, ast.AST):
        # versions differ in which of the fields that are empty exist
        fields = [item for item in ast.iter_fields(node) if item[1] not in (None, [])]
        return type(node).__name__, [(name, syntax(value)) for name, value in fields]
    return node


def is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@functools.cache  # as hash_code
def environment_at_start(device: str) -> dict[str, Any]:
    return environment(pick_device(device))


# ---- measuring a run once ----


def measure_or_load(evaluation: Evaluation, run: AnyRun, file: Path | None = None) -> dict:
    """Return a run's measurement; measure what is missing first.

    `file` is the results file, by default in the run's folder.
    """
    file = file or results_file(evaluation, run)
    # a run in training saves newer checkpoints: its control is measured with the same one
    run = find_weights(run)
    result = None if evaluation.again else load_stored(evaluation, run, file)
    if result is None:
        measure_missing(evaluation, load_run(run, evaluation), file)
        control = evaluation.control(read_config(run))
        if control is not None:
            measure_or_load(control, run, file)
        result = load_stored(evaluation, run, file)
        assert result is not None  # all of it has been measured
    control_result = result.get("control")
    if has_outdated_code(evaluation, result) or has_outdated_code(evaluation, control_result):
        print(f"{folder_of(run)}: measured with other code; --again repeats it")
    return result


def has_outdated_code(evaluation: Evaluation, result: dict | None) -> bool:
    """Whether a part of a measurement was made by another version of the evaluation."""
    if result is None:
        return False
    now = code_hash(evaluation)
    return any(result["code"][name] != now for name in result["parts"])


def measure_missing(
    evaluation: Evaluation,
    run: Run,
    file: Path,
) -> None:
    """Measure and store the chunks that are missing; with --again, all."""
    facts = run.facts | identity(evaluation, run.config)
    chunks = evaluation.chunks(run.config)
    code = code_hash(evaluation)
    environment = environment_at_start(evaluation.device)
    known = find_measurement(read_measurements(file), facts).get("parts", {})
    missing = [name for name in chunks if evaluation.again or name not in known]
    label = f"{run.path}: {evaluation.name}"
    if evaluation.window is not None:
        label += f", window {evaluation.window}"
    if missing and not sys.stderr.isatty():  # where tqdm shows no bar
        print(label, file=sys.stderr, flush=True)
    for name in tqdm(missing, label, unit="chunk", disable=None):
        values = evaluation.measure(run, chunks[name])
        store(file, facts, name, values, code, environment)


def load_stored(evaluation: Evaluation, run: AnyRun, file: Path | None = None) -> dict | None:
    """A run's stored measurement, reduced to the requested chunks; None if it is incomplete.

    The measurement of its control, if there is one, is the entry `control`.
    """
    trained = read_config(run)
    config = evaluation.apply_to(trained)
    weights = find_weights(run)
    if isinstance(weights, ModelConfig):
        facts = model_facts(weights, evaluation)
    else:
        facts = run_facts(trained, weights, evaluation, model_on_meta(config, evaluation.window))
    facts |= identity(evaluation, config)
    file = file or results_file(evaluation, run)
    result = find_measurement(read_measurements(file), facts)
    known = result.get("parts", {})
    chunks = {}
    for name in evaluation.chunks(config):
        if name not in known:
            return None
        chunks[name] = known[name]
    result |= {"parts": chunks, "trained_length": trained.block_size}
    result |= evaluation.summarise(chunks)
    control = evaluation.control(trained)
    if control is None:
        return result
    control_result = load_stored(control, weights, file)
    return None if control_result is None else result | {"control": control_result}


# ---- results files: RUN/NAME.json, a list of measurements ----


def results_file(evaluation: Evaluation, run: AnyRun, out: Path | None = None) -> Path:
    """The results file of a run: in its folder or, if that is read-only, beside the picture."""
    folder = folder_of(run)
    if out is None or is_writable(folder):
        return folder / f"{evaluation.name}.json"
    return out.with_suffix(f".{evaluation.name}.json")


def read_measurements(file: Path) -> list[dict]:
    """The measurements in a results file. Raises UserError if it holds something else."""
    return read_json(file, list[dict[str, Any]]) or []


def find_measurement(measurements: list[dict], facts: dict) -> dict:
    """The newest measurement that these facts identify; empty if there is none."""
    # the same data may lie in several folders: the hash tells them apart
    keys = facts.keys() - {"data_dir"}
    for measurement in reversed(measurements):
        if all(measurement.get(key) == facts[key] for key in keys):
            return measurement
    return {}


def store(file: Path, facts: dict, name: str, values: dict, code: str, environment: dict) -> None:
    """Add a chunk to the measurement that these facts identify.

    An interrupted command continues after it. The lock lets other processes add to the same file.
    """
    # a lock of its own: a run may be evaluated while it trains
    with locked(file.parent / ".results.lock", "storing results"):
        measurements = read_measurements(file)
        measurement = find_measurement(measurements, facts)
        others = [other for other in measurements if other is not measurement]
        updated = {
            **facts,
            "parts": measurement.get("parts", {}) | {name: values},
            "code": measurement.get("code", {}) | {name: code},
            "environment": environment,
        }
        write_json(file, [*others, updated])


def with_controls(results: Results) -> Iterator[tuple[str, dict, bool]]:
    """Labels and measurements, each followed by its control, if there is one."""
    for name, result in results.items():
        yield name, result, False
        if "control" in result:
            yield name, result["control"], True


# ---- commands ----


def as_command(kind: type[Evaluation]) -> Callable[[], None]:
    """The `main` of an evaluation: measures the runs of the command line, prints and draws them.

    Measurements go to RUN/NAME.json, and what that file has is not measured again. The pictures of
    a single run go to its folder. Those of several runs go to the folder that contains them, and
    are called PICTURE_RUN_RUN.png. --out FILE puts pictures elsewhere.
    """

    @command
    def main() -> None:
        evaluation, arguments = parse(kind)
        out = arguments.out
        runs: dict[str, AnyRun]  # by label
        if any(name.startswith(PRETRAINED) for name in arguments.runs):
            evaluation, runs = read_models(evaluation, arguments.runs)
        else:
            runs = dict(label_runs(arguments.runs))
        evaluation = evaluation.align([read_config(run) for run in runs.values()])
        runs = check_runs(evaluation, runs, out)
        results = {}
        for name, run in runs.items():
            file = results_file(evaluation, run, out)
            file.parent.mkdir(parents=True, exist_ok=True)
            results[name] = measure_or_load(evaluation, run, file)
        pictures = evaluation.show(results)
        for name, run in runs.items():
            figure = evaluation.draw_run(run, results[name])
            if figure is not None and out is None:
                save_picture(figure, picture_path([path_of(run)], evaluation.name))
            elif figure is not None:
                pictures[f"{evaluation.name}_{name}".replace("/", "-")] = figure
        if out and not pictures:
            print(f"--out {out}: there is nothing to draw", file=sys.stderr)
        save_pictures(pictures, [path_of(run) for run in runs.values()], out)

    return main


def read_models(
    evaluation: Evaluation, names: Sequence[str]
) -> tuple[Evaluation, dict[str, AnyRun]]:
    """The evaluation as it measures models of transformers, and the models by their names.

    --window becomes what evaluations call the training length. Raises UserError for runs among
    them, and for what cannot be measured of such a model.
    """
    if not evaluation.takes_models:
        raise UserError(
            f"{evaluation.name} measures runs of this repository; eval_length, copying and "
            "attention_maps measure models of transformers too"
        )
    for name in names:
        if not name.startswith(PRETRAINED):
            raise UserError(f"{name} is a run: measure runs and {PRETRAINED} models separately")
    for name in RUN_ONLY:
        if getattr(evaluation, name) != getattr(Options, name):
            raise UserError(f"--{name} is for runs of this repository, not for {names[0]}")
    require("eval", "transformers")
    trained_length = evaluation.window
    evaluation = replace(evaluation, window=None, rope=evaluation.rope or "none")
    models: dict[str, AnyRun] = {}
    for name in names:
        model = read_model(name, trained_length)
        if model.longest is not None and model.block_size > model.longest:
            raise UserError(
                f"--window {model.block_size}: {name}'s learned positions end at {model.longest}"
            )
        scaled_config(model, evaluation)
        has_control = evaluation.control(model) is not None
        models[name] = replace(model, has_control=has_control)
    return evaluation, models


def save_pictures(
    pictures: dict[str, Figure],
    runs: Sequence[str | Path],
    out: Path | None,
) -> None:
    """Save pictures of these runs under their names.

    With --out, the first in that file, each other with its name appended to the stem.
    """
    for i, (name, figure) in enumerate(pictures.items()):
        if out is None:
            file = picture_path(runs, name)
        elif i == 0:
            file = out
        else:
            file = out.with_stem(f"{out.stem}_{name}")
        save_picture(figure, file)


def check_runs(
    evaluation: Evaluation,
    runs: dict[str, AnyRun],
    out: Path | None,
) -> dict[str, AnyRun]:
    """The runs with the weights that they have now, from `find_weights`.

    Raises UserError, before any work, where a run cannot be measured or its results saved.
    """
    pick_device(evaluation.device)
    hint = "; --out FILE.png puts the picture and the measurements elsewhere"
    runs_with_weights: dict[str, AnyRun] = {}
    for name, run in runs.items():
        runs_with_weights[name] = find_weights(run)
        file = results_file(evaluation, run, out)
        read_measurements(file)
        check_writable(file.parent, hint)
    if out is None:
        check_writable(common_folder([path_of(run) for run in runs.values()]), hint)
    for run in runs.values():
        check_evaluation(evaluation, read_config(run))
    return runs_with_weights
