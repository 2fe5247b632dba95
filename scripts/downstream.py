"""Tasks of lm-evaluation-harness on trained models: LSSAR Tables 2, A1 and A2, or any others.

python -m scripts.downstream RUN [RUN ...] --tasks paper
python -m scripts.downstream RUN --tasks arc_easy,lambada_openai --limit 100

For custom tasks and the harness's other options, use `lm_eval --model hf` on an exported run
(scripts.export_hf).

Prints a table. RUN/downstream.json is a list of measurements: each task is saved when it is
finished, and not measured again. The paper's values are in the tables of
`python -m scripts.reproduce`: table2, table_a1 and table_a2. The command needs
requirements-eval.txt and, the first time that it reads a task's data, a network.
"""

import difflib
import functools
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure

from config import Config, PositiveInt
from errors import UserError, first_line
from scripts.common.command_line import option
from scripts.common.options import EvaluationOptions
from scripts.common.papers import LSSAR
from scripts.common.runner import NO_TEXT, Evaluation, Results, Run, as_command, require
from scripts.common.tables import print_table
from scripts.common.validation import check_lengths, default_lengths
from scripts.export_hf import transformers_model, transformers_tokenizer

# The columns of the paper's tables are tasks with a metric, such as "piqa acc_norm".
COLUMNS = [
    *LSSAR["table2"]["columns"],
    *LSSAR["table_a1"]["columns"],
    *LSSAR["table_a2"]["columns"],
]
PAPER_TASKS = tuple(dict.fromkeys(column.split()[0] for column in COLUMNS))
# Metrics that are shares of correct answers, printed in percent.
SHARES = ("acc", "exact_match")
# Tokens of a batch: the harness holds their logits, and their log-probabilities, all at once.
BATCH_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class DownstreamOptions(EvaluationOptions):
    """Scores on tasks of lm-evaluation-harness: LSSAR Tables 2, A1 and A2, or any others."""

    tasks: str = option("paper", "tasks, such as arc_easy,piqa; paper: the tasks of LSSAR's tables")
    max_length: PositiveInt | None = option(None, "longest input in tokens (default: 2x training)")
    limit: PositiveInt | None = option(None, "at most this many samples of each task, for a test")

    @property
    def names(self) -> tuple[str, ...]:
        if self.tasks == "paper":
            return PAPER_TASKS
        return tuple(self.tasks.split(","))


def longest(options: DownstreamOptions, config: Config) -> int:
    """The most tokens at once."""
    return options.max_length or max(default_lengths([config], (1, 2)))


def identify(options: DownstreamOptions, config: Config) -> dict:
    length = longest(options, config)
    check_lengths(config, [length])
    load_tasks(options.names)  # before a run is trained, for tasks that cannot be measured
    return NO_TEXT | {"max_length": length, "limit": options.limit}


def chunks(options: DownstreamOptions, config: Config) -> dict[str, str]:
    """The tasks."""
    return {name: name for name in options.names}


def measure(options: DownstreamOptions, run: Run, name: str) -> dict:
    manager, tasks = load_tasks(options.names)
    import lm_eval

    model = harness_model(run, longest(options, run.config))
    try:
        results = lm_eval.simple_evaluate(
            model,
            tasks=tasks[name],
            task_manager=manager,
            limit=options.limit,
            bootstrap_iters=1000,  # for standard errors without a closed form, as perplexity's
            log_samples=False,
        )
    except (AssertionError, ValueError) as error:  # the harness's own checks
        reason = str(error) or f"an answer has no or over {model.max_length} tokens"
        raise UserError(f"task {name} cannot be evaluated: {reason}") from error
    return {"lm_eval": lm_eval.__version__, "scores": readable(results)}


def summarise(parts: dict[str, dict]) -> dict:
    """The versions of the harness."""
    versions = {part["lm_eval"] for part in parts.values()}
    return {"lm_eval": ", ".join(sorted(versions))}


# ---- the harness ----


@functools.cache  # loading takes seconds
def load_tasks(names: tuple[str, ...]) -> tuple[Any, dict[str, list]]:
    """The harness's TaskManager, and each name's tasks, or its group, with their data.

    Raises UserError where the harness is missing, for an unknown name, and for data that cannot be
    read.
    """
    # bootstrap in one process: the default forks one for each core after CUDA has started
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    require("eval", "lm_eval")
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    for name in names:
        if name not in manager.task_index:
            near = ", ".join(difflib.get_close_matches(name, manager.all_tasks)) or "none"
            raise UserError(f"lm-evaluation-harness has no task {name!r}; similar names: {near}")
    tasks = {}
    for name in names:
        try:
            loaded = manager.load([name])
        except Exception as error:  # of its YAML file, its data, or a library that it needs
            raise UserError(
                f"task {name} cannot be loaded: {type(error).__name__}: {first_line(error)}; a "
                "machine without a network needs the data in HF_HOME, and HF_HUB_OFFLINE=1"
            ) from error
        if name in loaded["groups"]:
            tasks[name] = [loaded["groups"][name]]
        else:  # a task, or the tasks of a tag
            tasks[name] = list(loaded["tasks"].values())
    return manager, tasks


def harness_model(run: Run, max_length: int) -> Any:
    """The run as the harness's Hugging Face model, which also evaluates an exported run."""
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of each truncated context
    trained = run.config.block_size

    class Model(HFLM):
        """Sequences whose likelihood is asked share a batch up to the training length.

        Beyond it a RoPE scaling depends on the length, and the harness pads them on the right
        without a mask.
        """

        def _batch_scheduler(self, pos: int, requests: list[tuple]) -> int:
            _, context, continuation = requests[pos]
            tokens = len(context) + len(continuation) - 1
            if tokens > trained:
                return 1
            return max(1, BATCH_TOKENS // trained)

        def _detect_batch_size(self, *arguments: Any) -> int:  # of prompts to continue
            return max(1, BATCH_TOKENS // max_length)

    return Model(
        transformers_model(run),
        "causal",
        tokenizer=transformers_tokenizer(run.config),
        add_bos_token=False,
        max_length=max_length,
        batch_size="auto",
        softmax_dtype="float32",
        mixed_precision_dtype=None if run.dtype == torch.float32 else run.dtype,
    )


# ---- results ----


def readable(results: dict) -> dict:
    """Task or group -> samples, few-shot examples, and metric -> value and standard error."""
    tables = {}
    for name, values in results["results"].items():
        tables[name] = {
            "samples": values["sample_len"],
            "num_fewshot": results["n-shot"].get(name),
            "metrics": readable_metrics(values),
        }
    return tables


def readable_metrics(values: dict) -> dict[str, dict]:
    """Metric -> value and standard error, if it has one, from entries such as "acc,none"."""
    metrics = {}
    for key, value in values.items():
        metric, comma, filters = key.partition(",")  # the filter applied to answers, or none
        if not comma or metric.endswith("_stderr"):
            continue
        error = values.get(f"{metric}_stderr,{filters}")
        metrics[metric if filters == "none" else key] = {
            "value": float(value),
            "stderr": float(error) if isinstance(error, (int, float)) else None,
        }
    return metrics


def show(options: DownstreamOptions, results: Results) -> dict[str, Figure]:
    """Print all scores; there is no picture."""
    for name, result in results.items():
        how = [f"{key} {result[key]}" for key in ("step", "rope", "max_length", "lm_eval")]
        print(f"{name}: {', '.join(how)}")
    table = [["task", "metric", "run", "value", "stderr", "samples"]]
    first = next(iter(results.values()))
    for name, part in first["parts"].items():
        scores = part["scores"]
        # a group has a score, a tag has only the scores of its tasks
        tasks = [name] if name in scores else scores
        for task in tasks:
            for metric in scores[task]["metrics"]:
                for run, result in results.items():
                    score = result["parts"][name]["scores"][task]
                    table.append([task, metric, run, *score_cells(score, metric)])
    print_table(table, left=3)
    return {}


def score_cells(score: dict, metric: str) -> list[str]:
    """A metric's value, standard error and number of samples; shares are in percent."""
    factor = 100 if metric.startswith(SHARES) else 1
    value = score["metrics"][metric]["value"]
    error = score["metrics"][metric]["stderr"]
    return [
        f"{factor * value:.2f}",
        "" if error is None else f"{factor * error:.2f}",
        str(score["samples"]),
    ]


DOWNSTREAM = Evaluation(
    name="downstream",
    options=DownstreamOptions,
    identify=identify,
    chunks=chunks,
    measure=measure,
    show=show,
    summarise=summarise,
)
main = as_command(DOWNSTREAM)

if __name__ == "__main__":
    main()
