"""Tasks of lm-evaluation-harness on trained models: LSSAR Tables 2, A1 and A2, or any others.

python -m scripts.downstream RUN [RUN ...] --tasks paper
python -m scripts.downstream RUN --tasks arc_easy,lambada_openai --limit 100
python -m scripts.downstream RUN --tasks my_task --include_path FOLDER_OF_YAML_TASKS

Prints a table beside the paper's values, and draws the accuracies: downstream.png in the run's
folder, or for several runs downstream_by_run_RUN_RUN.png in the folder that contains them (or
--out). RUN/downstream.json is a list of measurements. Each task is saved when it is finished, and
not measured again. Needs requirements-eval.txt and, the first time a task's data are read, a
network.
"""

import difflib
import functools
import hashlib
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from config import Config
from errors import UserError, first_line
from scripts.common import runner
from scripts.common.papers import LSSAR
from scripts.common.plots import add_legend, one_panel
from scripts.common.runner import Evaluation, Run, Store, option
from scripts.common.tables import print_table
from scripts.common.validation import check_lengths, default_lengths
from scripts.export_hf import transformers_model, transformers_tokenizer

TABLES = [LSSAR[name] for name in ("table2", "table_a1", "table_a2")]
# Their columns: (task, metric).
METRICS = list(dict.fromkeys(tuple(c.split()) for table in TABLES for c in table["columns"]))
PAPER_TASKS = tuple(dict.fromkeys(task for task, _ in METRICS))
# (n_layer, n_embd, whether trained on FineWeb-Edu) -> the tables' name for it
SCALES = {
    (6, 512, True): "45m", (12, 768, False): "124m", (12, 768, True): "124m_edu",
    (24, 1024, True): "355m",
}  # fmt: skip
# Metrics that are shares of correct answers, printed in percent and drawn.
SHARES = ("acc", "exact_match")
# The bootstrap is for standard errors without a closed form, such as perplexity's.
HARNESS = {"bootstrap_iters": 1000, "log_samples": False}
# Tokens of a batch: the harness holds their logits, and their log-probabilities, all at once.
BATCH_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Downstream(Evaluation):
    """Scores on tasks of lm-evaluation-harness: LSSAR Tables 2, A1 and A2, or any others."""

    name, unit = "downstream", "tasks"

    tasks: str = option("paper", "such as arc_easy,piqa; paper: those of LSSAR's tables")
    include_path: str | None = option(None, "a folder of more tasks, as YAML files")
    max_length: int | None = option(
        None, "most tokens at once (default: 2x training; learned positions: 1x)", at_least=1
    )
    limit: int | None = option(None, "only this many samples of each task, to try it", at_least=1)

    @property
    def names(self) -> tuple[str, ...]:
        listed = self.tasks.split(",")
        groups = [PAPER_TASKS if name == "paper" else (name.strip(),) for name in listed]
        return tuple(dict.fromkeys(sum(groups, ())))

    def facts(self, config: Config) -> dict:
        length = self.max_length or max(default_lengths([config], (1, 2)))
        check_lengths(config, [length])
        facts = {"max_length": length, "limit": self.limit, "paper": paper_entry(config)}
        return facts | {"include": hash_of(self.include_path) if self.include_path else None}

    def check(self, config: Config) -> None:
        """Raise UserError, before a run is trained, for tasks that could not be measured."""
        self.facts(config)
        load_tasks(self.names, self.include_path)

    def amount(self, config: Config) -> int:
        return len(self.names)

    def select(self, measurement: dict, config: Config) -> dict | None:
        found = runner.select_parts(measurement, "parts", self.names)
        if found is None:
            return None
        versions = {part["lm_eval"] for part in found["parts"].values()}
        return found | {"lm_eval": ", ".join(sorted(versions))}

    def measure(self, run: Run, store: Store) -> None:
        manager, tasks = load_tasks(self.names, self.include_path)
        import lm_eval

        model = harness_model(run, store.facts["max_length"])
        for number, name in enumerate(self.names, 1):
            if name in store.parts:
                continue
            print(f"{run.path}, task {number} of {len(tasks)}: {name}", flush=True)
            try:
                results = lm_eval.simple_evaluate(
                    model, tasks=tasks[name], task_manager=manager, limit=self.limit, **HARNESS
                )
            except (AssertionError, ValueError) as error:  # the harness's own checks
                reason = str(error) or f"an answer has no or over {model.max_length} tokens"
                raise UserError(f"task {name} cannot be evaluated: {reason}") from error
            store.add(name, {"lm_eval": lm_eval.__version__, "scores": readable(results)})


# ---- the harness ----


@functools.cache  # loading takes seconds
def load_tasks(names: tuple[str, ...], folder: str | None) -> tuple[Any, dict[str, list]]:
    """The harness's TaskManager, and each name's tasks, or its group, with their data.

    Raises UserError where the harness is missing, for an unknown name, and for data that cannot be
    read.
    """
    # bootstrap in one process: the default forks one for each core after CUDA has started
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(
            f"tasks need lm-evaluation-harness: pip install -r requirements-eval.txt ({error})"
        ) from error
    manager, tasks = TaskManager(include_path=folder), {}
    for name in names:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f"did you mean {near[0]}?" if near else "`lm-eval ls tasks` lists them"
            raise UserError(f"lm-evaluation-harness has no task {name!r}; {hint}")
    for name in names:
        try:
            loaded = manager.load([name])
        except Exception as error:  # of its YAML file, its data, or a library that it needs
            raise UserError(
                f"task {name} cannot be loaded: {type(error).__name__}: {first_line(error)}; a "
                "machine without a network needs the data in HF_HOME, and HF_HUB_OFFLINE=1"
            ) from error
        groups = loaded["groups"]
        tasks[name] = [groups[name]] if name in groups else [*loaded["tasks"].values()]
    return manager, tasks


def hash_of(folder: str) -> str:
    """Hash of a folder of tasks, so that a changed task is measured again."""
    if not Path(folder).is_dir():
        raise UserError(f"--include_path {folder}: no such folder")
    digest = hashlib.sha256()
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


def harness_model(run: Run, max_length: int) -> Any:
    """The run as the harness's Hugging Face model, which also evaluates an exported run."""
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of each truncated context
    trained = run.config.block_size

    class Model(HFLM):
        """Sequences share a batch only where padding on the right changes nothing.

        Beyond the training length, a RoPE scaling depends on the padded length. Prompts would be
        padded on the left, which this model does not take.
        """

        def _batch_scheduler(self, pos: int, requests: list[tuple]) -> int:
            _, context, continuation = requests[pos]
            tokens = len(context) + len(continuation) - 1
            return 1 if tokens > trained else max(1, BATCH_TOKENS // trained)

        def _detect_batch_size(self, *arguments: Any) -> int:
            return 1

    return Model(
        transformers_model(run),
        backend="causal",
        tokenizer=transformers_tokenizer(run.config),
        add_bos_token=False,
        max_length=max_length,
        batch_size="auto",
        mixed_precision_dtype=None if run.dtype == torch.float32 else run.dtype,
        softmax_dtype="float32",
    )


# ---- results ----


def readable(results: dict) -> dict:
    """Task or group -> samples, few-shot examples, and metric -> value and standard error."""
    tables = {}
    for name, values in results["results"].items():
        metrics = {}
        for key, value in values.items():
            metric, comma, filters = key.partition(",")  # the filter applied to answers, or none
            if comma and not metric.endswith("_stderr"):
                error = values.get(f"{metric}_stderr,{filters}")
                metrics[metric if filters == "none" else key] = {
                    "value": float(value),
                    "stderr": float(error) if isinstance(error, (int, float)) else None,
                }
        tables[name] = {
            "samples": values["sample_len"],
            "num_fewshot": results["n-shot"].get(name),
            "metrics": metrics,
        }
    return tables


def paper_entry(config: Config) -> str | None:
    """The variant and scale in TABLES that a run of this config reproduces, if any."""
    edu = "fineweb_edu" in config.data_dir
    entry = f"{config.variant_name} {SCALES.get((config.n_layer, config.n_embd, edu))}"
    return entry if paper_values(entry) and "fineweb" in config.data_dir else None


def paper_values(entry: str | None) -> dict[tuple[str, str], float]:
    """(task, metric) -> the paper's value, from all TABLES."""
    name, _, scale = (entry or "").partition(" ")
    values = [(table, table["scales"].get(scale, {}).get(name, ())) for table in TABLES]
    pairs = (zip(table["columns"], found, strict=False) for table, found in values)
    return {tuple(column.split()): value for pair in pairs for column, value in pair}


def shown(results: list[dict]) -> Iterator[tuple[str, str, list[dict]]]:
    """Every task and metric to show, with each run's scores on the task."""
    known = {task for task, _ in METRICS}
    for name in results[0]["parts"]:
        scores = [result["parts"][name]["scores"] for result in results]
        # a group has its own score, a tag only those of its tasks
        for task in [name] if name in scores[0] else scores[0]:
            for metric in scores[0][task]["metrics"]:
                if task not in known or (task, metric) in METRICS:
                    yield task, metric, [run_scores[task] for run_scores in scores]


def show(evaluation: Downstream, named: list[tuple[str, dict]]) -> dict[str, Figure]:
    """Print the scores beside the paper's, and draw the shares of correct answers."""
    names, results = zip(*named, strict=True)
    print()
    for name, result in named:
        print(
            f"{name}: step {result['step']}, RoPE scaling {result['rope']}, at most "
            f"{result['max_length']} tokens; lm_eval {result['lm_eval']}"
            + (f"; paper: {result['paper']}" if result["paper"] else "")
        )
    paper = [paper_values(result["paper"]) for result in results]
    table = [["task", "metric", "run", "value", "stderr", "samples"] + ["paper"] * any(paper)]
    shares: dict[str, list[list[float]]] = {}  # by run: value, standard error, the paper's value
    for task, metric, scores in shown(results):
        share = metric.startswith(SHARES)
        for name, score, known in zip(names, scores, paper, strict=True):
            found = score["metrics"][metric]
            error = math.nan if found["stderr"] is None else found["stderr"]
            values = [(100 if share else 1) * x for x in (found["value"], error)]
            values.append(known.get((task, metric), math.nan))
            cells = ["" if math.isnan(x) else f"{x:.2f}" for x in values]
            samples, reference = str(score["samples"]), cells[2:] * any(paper)
            table.append([task, metric, name, *cells[:2], samples, *reference])
            if share:
                shares.setdefault(f"{task}\n{metric}", []).append(values)
    print_table(table, left=3)
    if not shares:
        return {}
    name = "downstream_by_run" if len(named) > 1 else "downstream"
    return {name: draw(shares, names, f"RoPE scaling: {results[0]['rope']}")}


def draw(scores: dict[str, list[list[float]]], names: Sequence[str], title: str) -> Figure:
    """Scores in percent with their standard errors, and the paper's values as bars."""
    figure, axes = one_panel()
    for i, name in enumerate(names):
        values, errors, paper = np.array([found[i] for found in scores.values()]).T
        y, colour = np.arange(len(scores)) + 0.1 * (i + 1), f"C{i % 10}"
        axes.errorbar(values, y, xerr=np.nan_to_num(errors), fmt="o", color=colour, label=name)
        if not np.isnan(paper).all():
            axes.plot(paper, y, "|", markersize=14, color=colour, label=f"{name}, the paper's")
    axes.set_yticks(range(len(scores)), scores)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("correct answers (%), with their standard error")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    add_legend(figure)
    return figure


main = runner.as_command(Downstream, show)

if __name__ == "__main__":
    main()
