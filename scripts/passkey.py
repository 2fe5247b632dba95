"""Passkey retrieval: a number told once in a long, dull text and asked for at its end.

python -m scripts.passkey RUN [RUN ...] --lengths 1024,1536,2048,4096,8192 --trials 100

LSSAR, section 3.2 and Figs. 2 and A3, with the prompt of landmark attention (Mohtashami & Jaggi
2023): a task description, filler, the key, filler, the question. Key and place are random, the same
for every run with that tokenizer; an answer is right if its first run of digits is the key. Prints
accuracy by length and by depth, writes RUN/passkey.json and RUN/passkey.png, and for several runs
passkey_by_length.png in the folder that holds them. What was measured before is not measured again.

The paper does not give its prompt, nor what a length counts. Here it counts the prompt's tokens,
end-of-text in front of them included, and ANSWER_TOKENS for the answer, so that the training length
is not exceeded by a trial of that length.
"""

import argparse
import functools
import random
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from tqdm import tqdm

from data.tokenizer import get_tokenizer
from errors import UserError, command
from scripts.common.retrieval import (
    ANSWER_TOKENS,
    answer,
    batches,
    check_at_least,
    first_number,
    heat_map,
)
from scripts.common.runs import (
    Results,
    Run,
    add_options,
    check_places,
    holding_folder,
    open_run,
    run_names,
    save_picture,
)
from scripts.eval_length import parse_lengths

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


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that train.py made")
    parser.add_argument("--lengths", help="in tokens (default: 1, 1.5, 2, 4, 8 training lengths)")
    parser.add_argument("--trials", type=int, default=100, help="per length")
    parser.add_argument("--seed", type=int, default=1337, help="of keys and places")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N trials a length")
    add_options(parser)
    arguments = parser.parse_args()
    check_at_least(1, arguments, "trials")
    check_at_least(0, arguments, "show")
    runs = [open_run(path, arguments) for path in arguments.runs]
    plans = [prepare(run, arguments) for run in runs]  # refuses what is wrong before all work
    check_places(arguments.runs)
    for run, (trials, results) in zip(runs, plans, strict=True):
        measure(run, trials, results)
        show(run, trials, results, arguments.show)
        report(results)
    if len(runs) > 1:
        path = holding_folder(arguments.runs) / "passkey_by_length.png"
        plot(run_names(arguments.runs), [results for _, results in plans], path)


def prepare(run: Run, arguments) -> tuple[dict[int, list[Trial]], Results]:
    """The trials of each length, and the measurement they are for."""
    block = run.config.block_size
    usual = ",".join(str(block * halves // 2) for halves in (2, 3, 4, 8, 16))
    lengths = parse_lengths(arguments.lengths or usual, run.config)
    tokenizer = get_tokenizer(run.config.tokenizer)
    trials = {n: make_trials(tokenizer, n, arguments.trials, arguments.seed) for n in lengths}
    facts = {"trials": arguments.trials, "trial_seed": arguments.seed}
    return trials, Results(run.path / "passkey.json", run.facts | facts)


def measure(run: Run, trials: dict[int, list[Trial]], results: Results) -> None:
    """Judge the answers at every length; lengths that the results have are left out."""
    todo = {length: trials[length] for length in trials if str(length) not in results.parts}
    total = sum(length * len(todo[length]) for length in todo)
    with tqdm(total=total, unit="tok", unit_scale=True, desc=str(run.path)) as bar:
        for length in todo:
            bar.set_postfix(length=length)
            answers = []
            for batch in batches(todo[length], length):
                answers += answer(run, [trial.prompt for trial in batch])
                bar.update(length * len(batch))
            results.add(str(length), judge(todo[length], answers))


@functools.cache
def shortest(tokenizer) -> int:
    """The length that holds any trial: no filler, and the key that takes most tokens."""
    keys = (tokenizer.encode(KEY.format(key=key)) for key in range(1, LARGEST_KEY + 1))
    task, question = tokenizer.encode(TASK), tokenizer.encode(QUESTION)
    return 1 + len(task) + max(map(len, keys)) + len(question) + ANSWER_TOKENS


def make_trials(tokenizer, length: int, count: int, seed: int) -> list[Trial]:
    """Trials whose prompts have length - ANSWER_TOKENS tokens; the first of many are the same."""
    rng = random.Random(f"passkey {seed} {length}")
    task, question = [tokenizer.eot, *tokenizer.encode(TASK)], tokenizer.encode(QUESTION)
    filler = tokenizer.encode(" ".join([FILLER] * (length // len(tokenizer.encode(FILLER)) + 1)))
    trials = []
    for _ in range(count):
        key, place = rng.randint(1, LARGEST_KEY), rng.random()
        told = tokenizer.encode(KEY.format(key=key))
        bare = len(task) + len(told) + len(question) + ANSWER_TOKENS
        room = length - bare
        if room < 0:
            raise UserError(
                f"length {length} is too short, give --lengths: without filler a passkey prompt "
                f"and its answer take {bare} tokens ({tokenizer.name})"
            )
        before = int(place * (room + 1))
        prompt = [*task, *filler[:before], *told, *filler[: room - before], *question]
        trials.append(Trial(prompt, key, before / max(1, room)))
    return trials


def judge(trials: list[Trial], answers: list[str]) -> dict:
    """What is saved of a length: accuracy, over all trials and by tenths of depth; every answer."""
    right = [
        first_number(text) == str(trial.key) for trial, text in zip(trials, answers, strict=True)
    ]
    rows = [[] for _ in range(DEPTHS)]
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


def show(run: Run, trials: dict[int, list[Trial]], results: Results, count: int) -> None:
    """Print the first prompts of each length and what was answered."""
    tokenizer = get_tokenizer(run.config.tokenizer)
    for length in trials:
        judgements = results.parts[str(length)]["trials"][:count]
        for trial, judged in zip(trials[length][:count], judgements, strict=True):
            mark = "right" if judged["correct"] else "wrong"
            print(f"{tokenizer.decode(trial.prompt)}\n-> {judged['answer']!r} ({mark})")
            print("-" * 80)


def report(results: Results) -> None:
    """Print one run's accuracy by length and depth, and draw it."""
    lengths = sorted(results.parts, key=int)
    facts, parts = results.facts, [results.parts[length] for length in lengths]
    print(f"\n{facts['variant']}: passkeys found (%), RoPE scaling {facts['rope']}")
    print(f"{'length':>10}" + "".join(f"{length:>8}" for length in lengths))
    print(f"{'all':>10}" + "".join(f"{100 * part['accuracy']:8.0f}" for part in parts))
    names = [f"{100 * i // DEPTHS}-{100 * (i + 1) // DEPTHS}%" for i in range(DEPTHS)]
    rows = [[part["accuracy_by_depth"][i] for part in parts] for i in range(DEPTHS)]
    for name, row in zip(names, rows, strict=True):
        cells = ["" if share is None else f"{100 * share:.0f}" for share in row]
        print(f"{name:>10}" + "".join(f"{cell:>8}" for cell in cells))
    title = f"{facts['variant']}, passkeys, RoPE scaling {facts['rope']}"
    heat_map(results.path.with_suffix(".png"), rows, list(map(int, lengths)), names, title)


def plot(names: list[str], runs: list[Results], path: Path) -> None:
    """LSSAR, Fig. 2: accuracy by length, a line a run."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, results in zip(names, runs, strict=True):
        lengths = sorted(map(int, results.parts))
        accuracy = [100 * results.parts[str(length)]["accuracy"] for length in lengths]
        axes.plot(lengths, accuracy, marker="o", label=name)
    lengths = sorted({int(length) for results in runs for length in results.parts})
    for trained in {results.facts["trained_length"] for results in runs}:
        axes.axvline(trained, color="0.6", linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_ylim(-3, 103)
    axes.set_xlabel("length in tokens (dotted: training length)")
    axes.set_ylabel("passkeys found (%)")
    axes.set_title(f"RoPE scaling: {runs[0].facts['rope']}", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    save_picture(figure, path)


if __name__ == "__main__":
    main()
