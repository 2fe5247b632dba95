"""Tasks of lm-evaluation-harness on trained models: LSSAR Tables 2, A1 and A2, or any others.

python -m scripts.downstream RUN [RUN ...] --tasks paper
python -m scripts.downstream RUN --tasks arc_easy,lambada_openai --limit 100

For custom tasks and the harness's other options, use `lm_eval --model hf` on an exported run
(scripts.export_hf).

Prints the harness's table of each run. RUN/downstream.json is a list of measurements with the
harness's results: each task is saved when it is finished, and not measured again. The paper's
values, in percent, are in the tables of `python -m scripts.reproduce`: table2, table_a1 and
table_a2. The command needs requirements-eval.txt and, the first time that it reads a task's data, a
network.
"""

import functools
import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure

from config import Config, PositiveInt
from errors import UserError, first_line
from scripts.common.command_line import option, require
from scripts.common.labels import title_of
from scripts.common.papers import LSSAR
from scripts.common.runner import NO_TEXT, Evaluation, Results, as_command
from scripts.common.runs import Run
from scripts.common.validation import check_lengths, default_lengths
from scripts.export_hf import transformers_model, transformers_tokenizer

# The columns of the paper's tables are tasks with a metric, such as "piqa acc_norm".
COLUMNS = [
    *LSSAR["table2"]["columns"],
    *LSSAR["table_a1"]["columns"],
    *LSSAR["table_a2"]["columns"],
]
PAPER_TASKS = tuple(dict.fromkeys(column.split()[0] for column in COLUMNS))
# What is kept of the harness's results, by the name of a task or group: what its table is made of.
KEPT = ("results", "versions", "n-shot", "higher_is_better", "group_subtasks")
# Samples for standard errors without a closed form, such as perplexity's.
BOOTSTRAP_ITERS = 1000
# Tokens of a batch: the harness holds their logits, and their log-probabilities, all at once.
BATCH_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Downstream(Evaluation):
    """Scores on tasks of lm-evaluation-harness: LSSAR Tables 2, A1 and A2, or any others."""

    name = "downstream"

    tasks: str = option("paper", "tasks, such as arc_easy,piqa; paper: the tasks of LSSAR's tables")
    max_length: PositiveInt | None = option(None, "longest input in tokens (default: 2x training)")
    limit: PositiveInt | None = option(None, "at most this many samples of each task, for a test")

    @property
    def names(self) -> tuple[str, ...]:
        if self.tasks == "paper":
            return PAPER_TASKS
        return tuple(self.tasks.split(","))

    def longest(self, config: Config) -> int:
        """The most tokens at once."""
        return self.max_length or max(default_lengths([config], (1, 2)))

    def identify(self, config: Config) -> dict:
        length = self.longest(config)
        check_lengths(config, [length])
        load_tasks(self.names)  # before a run is trained, for tasks that cannot be measured
        import lm_eval

        return NO_TEXT | {
            "lm_eval": lm_eval.__version__,
            "max_length": length,
            "limit": self.limit,
            "bootstrap_iters": BOOTSTRAP_ITERS,
        }

    def chunks(self, config: Config) -> dict[str, str]:
        """The tasks."""
        return {name: name for name in self.names}

    def measure(self, run: Run, name: str) -> dict:
        manager, tasks = load_tasks(self.names)
        import lm_eval

        model = harness_model(run, self.longest(run.config))
        try:
            results = lm_eval.simple_evaluate(
                model,
                tasks=tasks[name],
                task_manager=manager,
                limit=self.limit,
                bootstrap_iters=BOOTSTRAP_ITERS,
                log_samples=False,
            )
        except (AssertionError, ValueError) as error:  # the harness's own checks
            print(file=sys.stderr)  # the harness's progress bar has no end of line
            reason = str(error) or f"an answer has no tokens or over {model.max_length}"
            raise UserError(f"task {name} cannot be evaluated: {reason}") from error
        return {key: results[key] for key in KEPT}

    def show(self, results: Results) -> dict[str, Figure]:
        """Print the harness's table of each run; there is no picture."""
        from lm_eval.utils import make_table

        for name, result in results.items():
            how = [f"step {result['step']}", title_of({name: result})]
            for key in ("max_length", "limit", "lm_eval"):
                if result[key] is not None:
                    how.append(f"{key} {result[key]}")
            print(f"\n{name}: {', '.join(how)}")
            of_all_tasks: dict[str, dict] = {}
            for key in KEPT:
                of_all_tasks[key] = {}
                for part in result["parts"].values():
                    of_all_tasks[key] |= part[key]
            print(make_table(of_all_tasks))
        return {}


# ---- the harness ----


@functools.cache  # loading takes seconds
def load_tasks(names: tuple[str, ...]) -> tuple[Any, dict[str, list]]:
    """The harness's TaskManager, and each name's tasks, or its group, with their data.

    Raises UserError if the harness is missing, for an unknown name, and for data that cannot be
    read.
    """
    # bootstrap in one process: the default forks one for each core after CUDA has started
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    require("eval", "lm_eval")
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    tasks = {}
    for name in names:
        try:
            loaded = manager.load([name])
        except Exception as error:  # its name, its YAML file, its data, or a library that it needs
            raise UserError(
                f"task {name} cannot be loaded: {type(error).__name__}: {first_line(error)}; "
                "lm_eval ls tasks lists all tasks, and a machine without a network needs the data "
                "in HF_HOME, and HF_HUB_OFFLINE=1"
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
    # Beyond the training length a RoPE scaling depends on the length, and the harness pads the
    # shorter sequences of a batch on the right without a mask.
    batch_size = 1 if max_length > trained else max(1, BATCH_TOKENS // trained)
    return HFLM(
        transformers_model(run),
        "causal",
        tokenizer=transformers_tokenizer(run.config),
        add_bos_token=False,
        max_length=max_length,
        batch_size=batch_size,
        softmax_dtype="float32",
        mixed_precision_dtype=None if run.dtype == torch.float32 else run.dtype,
    )


main = as_command(Downstream)

if __name__ == "__main__":
    main()
