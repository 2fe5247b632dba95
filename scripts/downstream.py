"""Tasks of lm-evaluation-harness on a trained model: LSSAR Tables 2, A1 and A2, or any others.

python -m scripts.downstream RUN [RUN ...] --tasks paper
python -m scripts.downstream RUN --tasks arc_easy,lambada_openai --limit 100
python -m scripts.downstream RUN --tasks my_task --include_path FOLDER_OF_YAML_TASKS

Prints a table beside the paper's values, and draws the accuracies: downstream.png in the run's
folder, or for several runs downstream_by_run_RUN_RUN.png in the folder that contains them (or
--out). Writes RUN/downstream.json, a list of measurements, after every task, so that an interrupted
command continues where it stopped; nothing is measured twice. Needs pip install -r
requirements-dev.txt and, the first time a task's data are read, a network.
"""

import argparse
import difflib
import functools
import hashlib
import json
import os
import re
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from config import Config
from data.tokenizer import get_tokenizer
from errors import UserError, command, first_line
from generation import generate
from layers.losses import chunks
from runtime.device import autocast
from scripts.common.arguments import AtLeast, add_runs
from scripts.common.papers import LSSAR
from scripts.common.plots import save_picture
from scripts.common.results import Results, select_parts
from scripts.common.runs import (
    BATCH_TOKENS,
    LoadedRun,
    Request,
    add_options,
    open_run,
    picture_path,
    refuse_early,
    run_names,
)
from scripts.common.tables import print_table
from scripts.common.validation import check_lengths, default_lengths

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
# For standard errors without a closed form, such as that of perplexity.
BOOTSTRAP_SAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class TaskRequest(Request):
    """Scores of tasks of lm-evaluation-harness, over all samples or the first `limit`."""

    script, unit = "downstream", "samples"
    tasks: tuple[str, ...] = PAPER_TASKS
    include_path: str | None = None
    max_length: int | None = None
    limit: int | None = None

    def max_length_of(self, config: Config) -> int:
        return self.max_length or max(default_lengths([config], (1, 2)))

    def facts(self, config: Config) -> dict:
        return {"max_length": self.max_length_of(config), "limit": self.limit}

    def select(self, measurement: dict, config: Config) -> dict | None:
        return select_parts(measurement, "parts", self.tasks)

    def amount(self, config: Config) -> int:
        return count_samples(self.tasks, self.include_path)

    def check(self, config: Config) -> None:
        check_lengths(config, [self.max_length_of(config)])
        count_samples(self.tasks, self.include_path)


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_runs(parser)
    parser.add_argument(
        "--tasks", type=parse_tasks, help="tasks of the harness, or 'paper': LSSAR's (default)"
    )
    parser.add_argument("--include_path", metavar="DIR", help="more tasks, as YAML files")
    parser.add_argument(
        "--max_length", action=AtLeast, at_least=1,
        help="maximum tokens at once (default: 2x training, as in Table 2; learned positions: 1x)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", action=AtLeast, at_least=1, help="only this many samples per task, to try it"
    )
    add_options(parser, TaskRequest)
    arguments = parser.parse_args()
    request, paths = TaskRequest.parse(arguments), arguments.runs
    refuse_early(paths, request)
    harness = import_harness()
    tasks = load_tasks(request.tasks, request.include_path)
    results = [measure(open_run(path, request), request, harness, tasks) for path in paths]
    names = run_names(paths)
    print_scores(names, results)
    if (figure := plot(names, results)) is not None:
        name = "downstream_by_run" if len(results) > 1 else "downstream"
        save_picture(figure, arguments.out or picture_path(paths, name))


def measure(
    run: LoadedRun, request: TaskRequest, harness: ModuleType, tasks: dict[str, dict]
) -> dict:
    """One run's scores on the requested tasks, as in its downstream.json."""
    config, max_length = run.config, request.max_length_of(run.config)
    facts = run.facts | {"lm_eval": harness.__version__}
    facts |= request.facts(config) | {"paper": paper_row(config)}
    results = Results(request.file(run.path), facts)
    for number, (name, loaded) in enumerate(tasks.items(), 1):
        if results.parts.get(name, {}).get("content") == loaded["content"]:
            continue
        print(f"{run.path}, task {number} of {len(tasks)}: {name}", flush=True)
        scores = harness.simple_evaluate(
            model=harness_model(run, max_length),
            tasks=loaded["tasks"],
            task_manager=loaded["manager"],
            limit=request.limit,
            bootstrap_iters=BOOTSTRAP_SAMPLES,
            log_samples=False,
        )
        results.add(name, {"content": loaded["content"], "scores": readable(scores)})
    parts = results.parts
    return facts | {"parts": {name: parts[name] for name in tasks}}


# ---- tasks ----


def parse_tasks(text: str) -> tuple[str, ...]:
    """Task names without repeats; 'paper' stands for PAPER_TASKS."""
    names = map(str.strip, text.split(","))
    groups = [PAPER_TASKS if name == "paper" else (name,) for name in names]
    return tuple(dict.fromkeys(sum(groups, ())))


def import_harness() -> ModuleType:
    try:
        import lm_eval
    except ImportError as error:
        raise UserError(
            f"tasks need lm-evaluation-harness: pip install -r requirements-dev.txt ({error})"
        ) from error
    # bootstrap in one process: the default forks one for each core after CUDA has started
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    return lm_eval


@functools.cache  # loading takes seconds
def load_tasks(names: tuple[str, ...], folder: str | None) -> dict[str, dict]:
    """Each task or group by its name, with its data.

    The values are the `tasks`, or the group, which has its own score; their `manager`; a
    fingerprint of their `content`; and their number of `samples`. Raises UserError for an unknown
    name, and where data are neither cached nor reachable.
    """
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"--include_path {folder}: no such folder")
    manager = open_manager(names, folder)
    for name in names:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f"did you mean {near[0]}?" if near else "`lm-eval ls tasks` lists them"
            raise UserError(f"lm-evaluation-harness has no task {name!r}; {hint}")
    refuse_retries()
    return {name: load_task(manager, name) for name in tqdm(names, desc="tasks", delay=2)}


def open_manager(names: tuple[str, ...], folder: str | None) -> Any:
    """The harness's TaskManager, with all of its tasks only where they are needed.

    Reading its 14,000 YAML files takes 5 s of CPU, searching them for these names 0.5 s.
    """
    from lm_eval import tasks

    own, root = () if folder is None else (folder,), Path(tasks.__file__).parent
    wanted = "|".join(map(re.escape, names))
    defines = re.compile(rf"^(task|group): *[\"']?({wanted})[\"']? *$".encode(), re.MULTILINE)
    files = (path for path in root.rglob("*.yaml") if defines.search(path.read_bytes()))
    folders = {str(root / path.relative_to(root).parts[0]) for path in files}
    some = tasks.TaskManager(include_path=(*sorted(folders), *own), include_defaults=False)

    def complete(name: str | dict) -> bool:
        if isinstance(name, dict):  # of a group: another one with changes, or a group of its own
            return "task" in name and isinstance(name["task"], str) and complete(name["task"])
        entry = some.task_index.get(name)
        members = (entry.cfg or {}).get("task") if entry else None
        inside = members if isinstance(members, list) else []  # a task's is its own name
        return entry is not None and all(map(complete, inside))

    return some if all(map(complete, names)) else tasks.TaskManager(include_path=own)


def count_samples(names: tuple[str, ...], folder: str | None) -> int:
    """Samples of tasks. Raises UserError where the harness, a task or its data are missing."""
    import_harness()
    return sum(task["samples"] for task in load_tasks(names, folder).values())


def refuse_retries() -> None:
    """Without a network, make Hugging Face's libraries use their cache or fail at once."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=5).close()
    except urllib.error.HTTPError:
        pass  # reachable
    except OSError:
        constants.HF_HUB_OFFLINE = True


def load_task(manager: Any, name: str) -> dict:
    try:
        loaded = manager.load([name])
    except ConnectionError as error:
        raise UserError(
            f"task {name}: its data are not on this machine and huggingface.co cannot be reached; "
            "run this once where it can, with HF_HOME on a disk that both share"
        ) from error
    except Exception as error:  # raised by the YAML file or by a library that it needs
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"task {name} cannot be loaded: {reason}") from error
    for task in loaded["tasks"].values():
        if getattr(task, "MULTIMODAL", False) or getattr(task, "UNSAFE_CODE", False):
            raise UserError(f"task {name} needs more than a language model: images, or to run code")
    tasks = [loaded["groups"][name]] if name in loaded["groups"] else [*loaded["tasks"].values()]
    content = fingerprint(loaded["tasks"].values())
    samples = sum(len(task.eval_docs) for task in loaded["tasks"].values())
    return {"tasks": tasks, "manager": manager, "content": content, "samples": samples}


def fingerprint(tasks: Iterable[Any]) -> str:
    """Hash of every task's settings and samples."""
    digest = hashlib.sha256()
    for task in tasks:
        shots = task.fewshot_docs() if task.config.num_fewshot else ()
        for part in (task.dump_config(), *task.eval_docs, *shots):
            digest.update(json.dumps(part, sort_keys=True, default=str).encode())
    return digest.hexdigest()


# ---- the model, as the harness sees it ----


def harness_model(run: LoadedRun, max_length: int) -> Any:
    """The run as a model of the harness.

    As is usual for these, end-of-text comes first only in requests without a context.
    """
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokenizer = get_tokenizer(run.config.tokenizer)

    class Model(TemplateLM):
        eot_token_id = tokenizer.eot

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
        ) -> list[int]:
            return tokenizer.encode(string)

        def _loglikelihood_tokens(
            self, requests: list[tuple], **kwargs: Any
        ) -> list[tuple[float, bool]]:
            return loglikelihoods(run, [request[1:] for request in requests], max_length)

        def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
            windows, texts = [], []
            for number, request in enumerate(requests):
                tokens = tokenizer.encode(request.args[0])
                for window in get_rolling_token_windows(tokens, tokenizer.eot, max_length, 1):
                    windows.append(make_disjoint_window(window))
                    texts.append(number)
            sums, found = [0.0] * len(requests), loglikelihoods(run, windows, max_length)
            for number, (value, _) in zip(texts, found, strict=True):
                sums[number] += value
            return sums

        def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
            prompts = []
            for request in requests:
                context, options = request.args
                options = normalize_gen_kwargs(options)
                if options["do_sample"] or options.get("num_beams", 1) > 1:
                    raise UserError(
                        f"task {request.task_name} asks for sampling or beams ({request.args[1]}); "
                        "here all generation is greedy"
                    )
                new = options["max_gen_toks"]
                if new >= max_length:
                    raise UserError(
                        f"task {request.task_name} generates up to {new} tokens, which leaves none "
                        f"for its prompt: --max_length {max_length} must be larger"
                    )
                prompt = tokenizer.encode(context) or [tokenizer.eot]
                prompts.append((prompt[new - max_length :], new, tuple(options["until"])))
            return continuations(run, prompts)

    return Model()


def batches(requests: list[tuple], free: int) -> Iterator[list[tuple]]:
    """Batches of token ids, the longest first, of BATCH_TOKENS and one length each.

    Lengths up to `free` tokens may be mixed; beyond, a RoPE scaling depends on the padded length.
    """
    batch: list[tuple] = []
    for request in sorted(requests, key=len, reverse=True):
        if batch:
            longest = len(batch[0])
            alike = len(request) == longest or longest <= free
            if not alike or (len(batch) + 1) * longest > BATCH_TOKENS:
                yield batch
                batch = []
        batch.append(request)
    if batch:
        yield batch


@torch.no_grad()
def loglikelihoods(run: LoadedRun, pairs: list, max_length: int) -> list[tuple[float, bool]]:
    """The log-probability in nats of every continuation, and whether greedy decoding gives it.

    `pairs` are (context, continuation) of token ids; contexts are truncated from the left to
    max_length. Raises UserError for a continuation of more than max_length tokens.
    """
    results = [(0.0, True)] * len(pairs)
    # The last token is only predicted, so one-token answers to one question share a sequence.
    readers = defaultdict(list)  # input tokens -> indices of the pairs
    for number, (context, continuation) in enumerate(pairs):
        if len(continuation) > max_length:
            text = get_tokenizer(run.config.tokenizer).decode(continuation[:20])
            raise UserError(
                f"the continuation {text!r}... has {len(continuation)} tokens, more than "
                f"--max_length {max_length}"
            )
        if continuation:
            readers[tuple((*context, *continuation)[-max_length - 1 : -1])].append(number)
    # attention is causal, so padding on the right changes nothing
    free = run.config.block_size
    with tqdm(total=len(pairs), desc="loglikelihoods", unit="req") as bar:
        for batch in batches(list(readers), free):
            idx = torch.zeros(len(batch), len(batch[0]), dtype=torch.long)
            for row, read in zip(idx, batch, strict=True):
                row[: len(read)] = torch.tensor(read)
            with autocast(run.device, run.dtype):
                hidden = run.model.trunk(run.model.wte(idx.to(run.device)))
            numbers, rows, targets, sizes = [], [], [], []
            for x, read in zip(hidden, batch, strict=True):
                for number in readers[read]:
                    continuation = pairs[number][1]
                    numbers.append(number)
                    rows.append(x[len(read) - len(continuation) : len(read)])
                    targets += continuation
                    sizes.append(len(continuation))
            losses, greedy = score(run, torch.cat(rows), torch.tensor(targets, device=run.device))
            parts = zip(numbers, losses.split(sizes), greedy.split(sizes), strict=True)
            for number, loss, best in parts:
                results[number] = (-loss.sum().item(), bool(best.all()))
            bar.update(len(numbers))
    return results


def score(run: LoadedRun, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses in nats of targets [n] given hidden states [n, n_embd], as float64 [n].

    Also whether each target is the likeliest token [n].
    """
    losses, greedy = [], []
    for h, t in chunks(hidden, targets):
        with autocast(run.device, run.dtype):
            logits = run.model.logits(h)
        losses.append(F.cross_entropy(logits.float(), t, reduction="none"))
        greedy.append(logits.argmax(-1) == t)
    return torch.cat(losses).cpu().double(), torch.cat(greedy).cpu()


def continuations(run: LoadedRun, prompts: list) -> list[str]:
    """Greedy continuations, each up to its first end-of-text or stop string.

    `prompts` are (prompt ids, maximum new tokens, stop strings).
    """
    tokenizer = get_tokenizer(run.config.tokenizer)
    results = [""] * len(prompts)

    def text(new: list[int], stops: Sequence[str]) -> tuple[str, bool]:
        """The text of these ids up to its end, and whether it has ended."""
        ended = tokenizer.eot in new
        found = tokenizer.decode(new[: new.index(tokenizer.eot)] if ended else new)
        cut = min((at for stop in stops if stop and (at := found.find(stop)) >= 0), default=None)
        return found[:cut], ended or cut is not None

    groups = defaultdict(list)
    for number, (prompt, new, stops) in enumerate(prompts):
        groups[len(prompt), new, stops].append(number)
    with tqdm(total=len(prompts), desc="generation", unit="req") as bar:
        for (length, new, stops), numbers in sorted(groups.items(), reverse=True):
            size = max(1, BATCH_TOKENS // (length + new))
            for start in range(0, len(numbers), size):
                batch = numbers[start : start + size]
                idx = torch.tensor([prompts[number][0] for number in batch], device=run.device)

                def ended(idx: Tensor, length: int = length, stops: Sequence[str] = stops) -> bool:
                    return all(text(row, stops)[1] for row in idx[:, length:].tolist())

                with autocast(run.device, run.dtype):
                    out = generate(run.model, idx, new, temperature=0, stop=ended)
                for number, row in zip(batch, out[:, length:].tolist(), strict=True):
                    results[number] = text(row, stops)[0]
                bar.update(len(batch))
    return results


# ---- results ----


def readable(scores: dict) -> dict:
    """Task or group -> samples, few-shot examples, and metric -> value and stderr."""
    tables, counts = {}, scores["n-samples"]
    for name, row in scores["results"].items():
        metrics = {}
        for key, value in row.items():
            metric, comma, filters = key.partition(",")  # the filter applied to answers, or none
            if comma and not metric.endswith("_stderr"):
                error = row.get(f"{metric}_stderr,{filters}")
                metrics[metric if filters == "none" else key] = {
                    "value": float(value),
                    "stderr": float(error) if isinstance(error, (int, float)) else None,
                }
        parts = {name, *descendants(scores, name)} & counts.keys()
        tables[name] = {
            "samples": sum(counts[part]["effective"] for part in parts),
            "num_fewshot": scores["n-shot"].get(name),
            "metrics": metrics,
        }
    return tables


def descendants(scores: dict, group: str) -> set[str]:
    """All tasks and groups below a group."""
    children = scores["group_subtasks"].get(group, [])
    return set(children).union(*(descendants(scores, child) for child in children))


def paper_row(config: Config) -> str | None:
    """The row of TABLES and its scale that a run of this config reproduces, if any."""
    edu = "fineweb_edu" in config.data_dir
    row = f"{config.variant_name} {SCALES.get((config.n_layer, config.n_embd, edu))}"
    return row if paper_values(row) and "fineweb" in config.data_dir else None


def paper_values(row: str | None) -> dict[tuple[str, str], float]:
    """The paper's value for every (task, metric) of this row and scale, from all TABLES."""
    if row is None:
        return {}
    name, scale = row.split()
    values = {}
    for table in TABLES:
        for column, value in zip(
            table["columns"], table["scales"].get(scale, {}).get(name, ()), strict=False
        ):
            values[tuple(column.split())] = value
    return values


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


def print_scores(names: list[str], results: list[dict]) -> None:
    print()
    for name, result in zip(names, results, strict=True):
        print(
            f"{name}: step {result['step']}, RoPE scaling {result['rope']}, at most "
            f"{result['max_length']} tokens; lm_eval {result['lm_eval']}"
            + (f"; paper: {result['paper']}" if result["paper"] else "")
        )
    paper = [paper_values(result["paper"]) for result in results]
    header = ["task", "metric", "run", "value", "stderr", "samples"]
    table = [header + ["paper"] * any(paper)]
    for task, metric, scores in shown(results):
        percent = 100 if metric.startswith(SHARES) else 1
        for name, score, reference in zip(names, scores, paper, strict=True):
            value, error = score["metrics"][metric]["value"], score["metrics"][metric]["stderr"]
            error = "" if error is None else f"{percent * error:.2f}"
            known = f"{reference[task, metric]:.2f}" if (task, metric) in reference else ""
            cells = [task, metric, name, f"{percent * value:.2f}", error, f"{score['samples']}"]
            table.append(cells + [known] * any(paper))
    print_table(table, left=3)


def plot(names: list[str], results: list[dict]) -> Figure | None:
    """Bars of the shares of correct answers, by task and run; None where no task has such a share.

    They have their standard errors and the paper's values.
    """
    rows = [row for row in shown(results) if row[1].startswith(SHARES)]
    if not rows:
        return None
    longest = max(len(word) for task, metric, _ in rows for word in (task, metric))
    height = 1.4 + 0.2 * len(names) + (0.3 + 0.15 * len(names)) * len(rows)
    figure = Figure(figsize=(5 + 0.08 * longest, height), layout="constrained")
    axes, thickness, marks = figure.subplots(), 0.8 / len(names), []
    for i, (name, result) in enumerate(zip(names, results, strict=True)):
        positions = [row + (i + 0.5) * thickness - 0.4 for row in range(len(rows))]
        found = [scores[i]["metrics"][metric] for _, metric, scores in rows]
        values = [100 * metric["value"] for metric in found]
        errors = [100 * (metric["stderr"] or 0) for metric in found]
        axes.barh(
            positions, values, thickness, xerr=errors, label=name, color=f"C{i % 10}", ecolor="0.4"
        )
        paper = paper_values(result["paper"])
        for y, (task, metric, _) in zip(positions, rows, strict=True):
            if (task, metric) in paper:
                marks.append((paper[task, metric], y))
    if marks:
        x, y = np.array(marks).T
        half = thickness / 2
        axes.vlines(x, y - half, y + half, color="black", linewidth=2.5, label="the paper's")
    axes.set_yticks(range(len(rows)), [f"{task}\n{metric}" for task, metric, _ in rows])
    axes.tick_params("y", labelsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("correct answers (%), with their standard error")
    axes.set_title(f"RoPE scaling: {results[0]['rope']}", fontsize="medium")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", fontsize="small")
    return figure


if __name__ == "__main__":
    main()
