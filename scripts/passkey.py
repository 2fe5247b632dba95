"""Passkey retrieval: a number stated once in a long, dull text and asked for at its end.

python -m scripts.passkey RUN [RUN ...] --lengths 1024,1536,2048,4096,8192 --trials 100

LSSAR, section 3.2 and Figs. 2 and A3, with the prompt of landmark attention (Mohtashami & Jaggi
2023): a task description, filler, the key, filler, the question. Key and depth are random, but the
same for all runs with one tokenizer; an answer is correct if its first run of digits is the key.
Prints accuracy by length, writes RUN/passkey.json with every answer, RUN/passkey.png
by depth, and passkey_by_length.png by length, for several runs passkey_by_length_RUN_RUN.png in the
folder that contains them (or --out). Nothing is measured twice.

The paper gives neither its prompt nor its definition of length. Here a length counts the prompt,
with the end-of-text token before it, and ANSWER_TOKENS for the answer, so that a trial of the
training length does not exceed it.
"""

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
from errors import UserError
from scripts.common.plots import Curve, draw_curves, heat_map
from scripts.common.retrieval import ANSWER_TOKENS, answer, batches, first_number, print_found
from scripts.common.runner import Evaluation, Run, as_command, option
from scripts.common.validation import check_lengths, default_lengths

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
KEY = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
LARGEST_KEY = 50000
# Accuracy is also measured by tenths of the filler before the key.
DEPTHS = 10
TENTHS = [f"{10 * i}-{10 * (i + 1)}%" for i in range(DEPTHS)]


@dataclass(frozen=True)
class Trial:
    prompt: list[int]
    key: int
    depth: float  # share of the filler before the key


@dataclass(frozen=True, kw_only=True)
class Passkeys(Evaluation):
    """Passkey retrieval: a number stated once in a long, dull text and asked for at its end."""

    name = "passkey"

    lengths: tuple[int, ...] | None = option(
        None, "in tokens (default: 1, 1.5, 2, 4, 8 training lengths)"
    )
    trials: int = option(100, "per length", at_least=1)
    seed: int = option(1337, "of keys and depths")

    def lengths_of(self, config: Config) -> tuple[int, ...]:
        return self.lengths or default_lengths([config], (1, 1.5, 2, 4, 8))

    def trials_of(self, config: Config, length: int) -> list[Trial]:
        """The trials of a length. Raises UserError where the length is too short."""
        return make_trials(get_tokenizer(config.tokenizer), length, self.trials, self.seed)

    def facts(self, config: Config) -> dict:
        check_lengths(config, self.lengths_of(config))
        for length in self.lengths_of(config):
            self.trials_of(config, length)
        return {"trials": self.trials, "trial_seed": self.seed}

    def parts(self, config: Config) -> dict[str, int]:
        return {str(length): length * self.trials for length in self.lengths_of(config)}

    def measure_part(self, run: Run, facts: dict, name: str, bar: tqdm) -> dict:
        answers: list[str] = []
        trials = self.trials_of(run.config, int(name))
        for batch in batches(trials, int(name), bar):
            answers += answer(run, [trial.prompt for trial in batch])
        return judge(trials, answers)

    def picture(self, path: str | Path, measurement: dict) -> Figure:
        title = f"{measurement['variant']}, passkeys, RoPE scaling {measurement['rope']}"
        lengths = list(found(measurement))
        parts = [measurement["parts"][str(length)]["accuracy_by_depth"] for length in lengths]
        shares = list(zip(*parts, strict=True))
        return heat_map(title, shares, lengths, TENTHS, "passkeys found (%)")


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
    tenths: list[list[bool]] = [[] for _ in range(DEPTHS)]
    for trial, correct in zip(trials, right, strict=True):
        tenths[min(DEPTHS - 1, int(trial.depth * DEPTHS))].append(correct)
    return {
        "accuracy": sum(right) / len(right),
        "accuracy_by_depth": [sum(one) / len(one) if one else None for one in tenths],
        "trials": [
            {"key": trial.key, "depth": round(trial.depth, 4), "answer": text, "correct": correct}
            for trial, text, correct in zip(trials, answers, right, strict=True)
        ],
    }


def found(result: dict) -> dict[int, float]:
    """The share of passkeys found at each length."""
    lengths = sorted(map(int, result["parts"]))
    return {length: result["parts"][str(length)]["accuracy"] for length in lengths}


def show(evaluation: Passkeys, runs: list[tuple[str, dict]]) -> dict[str, Figure]:
    """Print every run's accuracy by length; LSSAR, Fig. 2: a curve for each run."""
    curves = []
    for name, result in runs:
        accuracy = found(result)
        print_found(result, "passkeys", accuracy)
        curves.append(Curve(name, list(accuracy), [100 * share for share in accuracy.values()]))
    ticks = sorted({length for _, result in runs for length in found(result)})
    x, trained = "length in tokens (dotted: training)", {r["trained_length"] for _, r in runs}
    title = f"RoPE scaling: {runs[0][1]['rope']}"
    figure = draw_curves({title: curves}, x, "passkeys found (%)", "x", ticks, marks=trained)
    return {"passkey_by_length": figure}


main = as_command(Passkeys, show)

if __name__ == "__main__":
    main()
