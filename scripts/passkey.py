"""Passkey retrieval: a number stated once in a long, dull text and asked for at its end.

python -m scripts.passkey RUN [RUN ...] --lengths 1024,1536,2048,4096,8192 --trials 100

LSSAR, section 3.2 and Figs. 2 and A3, with the prompt of landmark attention (Mohtashami & Jaggi
2023): a task description, filler, the key, filler, the question. Key and depth are random, but the
same for all runs with one tokenizer; an answer is correct if its first run of digits is the key.
Prints accuracy by length and by depth, writes RUN/passkey.json and RUN/passkey.png, and for several
runs passkey_by_length_RUN_RUN.png in the folder that contains them (or --out). Nothing is measured
twice.

The paper gives neither its prompt nor its definition of length. Here a length counts the prompt,
with the end-of-text token before it, and ANSWER_TOKENS for the answer, so that a trial of the
training length does not exceed it.
"""

import argparse
import functools
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from tqdm import tqdm

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from config import Config
from data.tokenizer import Tokenizer, get_tokenizer
from errors import UserError, command
from scripts.common.arguments import AtLeast, Lengths, add_runs
from scripts.common.plots import (
    add_legend,
    heat_maps,
    length_axis,
    one_panel,
    save_picture,
    show_equal_curves,
)
from scripts.common.results import Results, select_parts
from scripts.common.retrieval import ANSWER_TOKENS, answer, batches, first_number
from scripts.common.runs import (
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

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
KEY = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
LARGEST_KEY = 50000
# Rows of the heat map: tenths of the filler.
DEPTHS = 10


@dataclass(frozen=True)
class Trial:
    prompt: list[int]
    key: int
    depth: float  # share of the filler before the key


@dataclass(frozen=True, kw_only=True)
class PasskeyRequest(Request):
    """The share of passkeys found in `trials` prompts of each length."""

    script = "passkey"
    lengths: tuple[int, ...] | None = None
    trials: int = 100
    seed: int = 1337

    def lengths_of(self, config: Config) -> tuple[int, ...]:
        return self.lengths or default_lengths([config], (1, 1.5, 2, 4, 8))

    def trials_of(self, config: Config) -> dict[int, list[Trial]]:
        """The trials of each length. Raises UserError where a length is too short."""
        tokenizer = get_tokenizer(config.tokenizer)
        lengths = self.lengths_of(config)
        return {n: make_trials(tokenizer, n, self.trials, self.seed) for n in lengths}

    def facts(self, config: Config) -> dict:
        return {"trials": self.trials, "trial_seed": self.seed}

    def select(self, measurement: dict, config: Config) -> dict | None:
        return select_parts(measurement, "parts", [str(n) for n in self.lengths_of(config)])

    def amount(self, config: Config) -> int:
        return self.trials * sum(self.lengths_of(config))

    def check(self, config: Config) -> None:
        check_lengths(config, self.lengths_of(config))
        self.trials_of(config)


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_runs(parser)
    parser.add_argument(
        "--lengths", action=Lengths, help="in tokens (default: 1, 1.5, 2, 4, 8 training lengths)"
    )
    parser.add_argument("--trials", action=AtLeast, at_least=1, help="per length (%(default)s)")
    parser.add_argument("--seed", type=int, help="seed of keys and depths")
    parser.add_argument(
        "--show",
        action=AtLeast,
        at_least=0,
        default=0,
        metavar="N",
        help="print N trials per length",
    )
    add_options(parser, PasskeyRequest)
    arguments = parser.parse_args()
    request, paths = PasskeyRequest.parse(arguments), arguments.runs
    refuse_early(paths, request)
    results = []
    for path in paths:
        run = open_run(path, request)
        results.append(measure(run, request))
        show(run, request, results[-1], arguments.show)
        report(results[-1])
    if len(paths) > 1 or arguments.out:
        figure = plot(run_names(paths), results)
        save_picture(figure, arguments.out or picture_path(paths, "passkey_by_length"))


def measure(run: LoadedRun, request: PasskeyRequest) -> Results:
    """Generate and judge the answers at lengths where that has not been done."""
    results = Results(request.file(run.path), run.facts | request.facts(run.config))
    trials = request.trials_of(run.config)
    todo = {length: trials[length] for length in trials if str(length) not in results.parts}
    total = sum(length * len(todo[length]) for length in todo)
    with tqdm(total=total, unit="tok", unit_scale=True, desc=str(run.path)) as bar:
        for length in todo:
            bar.set_postfix(length=length)
            answers: list[str] = []
            for batch in batches(todo[length], length):
                answers += answer(run, [trial.prompt for trial in batch])
                bar.update(length * len(batch))
            results.add(str(length), judge(todo[length], answers))
    return results


@functools.cache
def shortest(tokenizer: Tokenizer) -> int:
    """The shortest length that fits any trial: the longest key, without filler."""
    keys = (tokenizer.encode(KEY.format(key=key)) for key in range(1, LARGEST_KEY + 1))
    task, question = tokenizer.encode(TASK), tokenizer.encode(QUESTION)
    return 1 + len(task) + max(map(len, keys)) + len(question) + ANSWER_TOKENS


@functools.cache
def make_trials(tokenizer: Tokenizer, length: int, count: int, seed: int) -> list[Trial]:
    """Trials with prompts of length - ANSWER_TOKENS tokens; a larger count only appends to them."""
    rng = random.Random(f"passkey {seed} {length}")
    task, question = [tokenizer.eot, *tokenizer.encode(TASK)], tokenizer.encode(QUESTION)
    filler = tokenizer.encode(" ".join([FILLER] * (length // len(tokenizer.encode(FILLER)) + 1)))
    trials = []
    for _ in range(count):
        key, depth = rng.randint(1, LARGEST_KEY), rng.random()
        key_tokens = tokenizer.encode(KEY.format(key=key))
        bare = len(task) + len(key_tokens) + len(question) + ANSWER_TOKENS
        room = length - bare
        if room < 0:
            raise UserError(
                f"length {length} is too short, give --lengths: without filler a passkey prompt "
                f"and its answer take {bare} tokens ({tokenizer.name})"
            )
        before = int(depth * (room + 1))
        prompt = [*task, *filler[:before], *key_tokens, *filler[: room - before], *question]
        trials.append(Trial(prompt, key, before / max(1, room)))
    return trials


def judge(trials: list[Trial], answers: list[str]) -> dict:
    """The results of one length: accuracy over all trials and by tenths of depth, every answer."""
    right = [
        first_number(text) == str(trial.key) for trial, text in zip(trials, answers, strict=True)
    ]
    rows: list[list[bool]] = [[] for _ in range(DEPTHS)]
    for trial, correct in zip(trials, right, strict=True):
        rows[min(DEPTHS - 1, int(trial.depth * DEPTHS))].append(correct)
    return {
        "accuracy": sum(right) / len(right),
        "accuracy_by_depth": [sum(row) / len(row) if row else None for row in rows],
        "trials": [
            {"key": trial.key, "depth": round(trial.depth, 4), "answer": text, "correct": correct}
            for trial, text, correct in zip(trials, answers, right, strict=True)
        ],
    }


def show(run: LoadedRun, request: PasskeyRequest, results: Results, count: int) -> None:
    """Print the first `count` prompts of each length and their answers."""
    tokenizer, parts = get_tokenizer(run.config.tokenizer), results.parts
    for length, trials in request.trials_of(run.config).items():
        judgements = parts[str(length)]["trials"][:count]
        for trial, judged in zip(trials[:count], judgements, strict=True):
            mark = "right" if judged["correct"] else "wrong"
            print(f"{tokenizer.decode(trial.prompt)}\n-> {judged['answer']!r} ({mark})")
            print("-" * 80)


def report(results: Results) -> None:
    """Print one run's accuracy by length and depth, and draw it."""
    facts, saved = results.facts, results.parts
    lengths = sorted(map(int, saved))
    parts = [saved[str(length)] for length in lengths]
    print(f"\n{facts['variant']}: passkeys found (%), RoPE scaling {facts['rope']}")
    depths = [f"{100 * i // DEPTHS}-{100 * (i + 1) // DEPTHS}%" for i in range(DEPTHS)]
    rows = [[part["accuracy_by_depth"][i] for part in parts] for i in range(DEPTHS)]
    table = [["length", *map(str, lengths)]]
    for name, row in (
        ("all", [part["accuracy"] for part in parts]), *zip(depths, rows, strict=True)
    ):  # fmt: skip
        table.append([name, *("" if share is None else f"{100 * share:.0f}" for share in row)])
    print_table(table)
    title = f"{facts['variant']}, passkeys, RoPE scaling {facts['rope']}"
    figure = heat_maps({title: rows}, lengths, depths, "passkeys found (%)")
    save_picture(figure, results.path.with_suffix(".png"))


def plot(names: list[str], runs: list[Results]) -> Figure:
    """LSSAR, Fig. 2: accuracy by length, one line for each run."""
    figure, axes = one_panel()
    all_parts = [results.parts for results in runs]
    for name, parts in zip(names, all_parts, strict=True):
        lengths = sorted(map(int, parts))
        accuracy = [100 * parts[str(length)]["accuracy"] for length in lengths]
        axes.plot(lengths, accuracy, marker="o", label=name)
    lengths = sorted({int(length) for parts in all_parts for length in parts})
    length_axis(axes, "length in tokens", {r.facts["trained_length"] for r in runs}, lengths)
    axes.set_ylim(-3, 103)
    axes.set_ylabel("passkeys found (%)")
    axes.set_title(f"RoPE scaling: {runs[0].facts['rope']}", fontsize="medium")
    show_equal_curves(axes)
    add_legend(figure)
    return figure


if __name__ == "__main__":
    main()
