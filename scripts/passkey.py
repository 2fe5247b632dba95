"""Passkey retrieval: a number stated once in a long, dull text and asked for at its end.

python -m scripts.passkey RUN [RUN ...] --lengths 1024,1536,2048,4096,8192 --trials 100

LSSAR, section 3.2 and Figs. 2 and A3, with the prompt of landmark attention (Mohtashami & Jaggi
2023): a task description, filler, the key, filler, the question. Key and depth are random, but the
same for all runs with one tokenizer; an answer is correct if its first run of digits is the key.
Prints accuracy by length, and writes passkey.json with every answer and passkey.png by length.

The paper gives neither its prompt nor its definition of length. Here a length counts the prompt,
with the end-of-text token before it, and ANSWER_TOKENS for the answer, so that a trial of the
training length does not exceed it.
"""

import random
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from config import Config, PositiveInt
from data.tokenizer import Tokenizer, get_tokenizer
from scripts.common.command_line import option
from scripts.common.labels import title_of
from scripts.common.plots import Curve, draw_by_length
from scripts.common.retrieval import (
    ANSWER_TOKENS,
    RetrievalEvaluation,
    Trial,
    answered,
    first_number,
    print_accuracies,
)
from scripts.common.runner import NO_TEXT, Results, as_command
from scripts.common.runs import Run
from scripts.common.validation import accuracies

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
KEY = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
LARGEST_KEY = 50000
# A length that fits any trial: one token for end-of-text, and at most one for each character.
SHORTEST = 1 + len(TASK) + len(KEY.format(key=LARGEST_KEY)) + len(QUESTION) + ANSWER_TOKENS


@dataclass(frozen=True, kw_only=True)
class PasskeyRetrieval(RetrievalEvaluation):
    """Passkey retrieval: a number stated once in a long, dull text and asked for at its end."""

    name = "passkey"
    multiples = (1, 1.5, 2, 4, 8)
    shortest = SHORTEST

    trials: PositiveInt = option(100, "trials per length")

    def identify(self, config: Config) -> dict:
        self.check_prompts(config, self.lengths_of(config))
        return NO_TEXT | {"trials": self.trials, "trial_seed": self.seed}

    def measure(self, run: Run, length: int) -> dict:
        tokenizer = get_tokenizer(run.config.tokenizer)
        trials = make_trials(tokenizer, length, self.trials, self.seed)
        return judge(answered(run, trials, length))

    def show(self, results: Results) -> dict[str, Figure]:
        """Print every run's accuracy by length; LSSAR, Fig. 2: a curve for each run."""
        curves = []
        for name, result in results.items():
            print_accuracies(name, result, "passkeys")
            shares = accuracies(result)
            curves.append(Curve(name, list(shares), list(shares.values())))
        title = title_of(results)
        figure = draw_by_length(results.values(), title, curves, "length", "passkeys found (%)")
        return {"passkey": figure}


def make_trials(tokenizer: Tokenizer, length: int, count: int, seed: int) -> list[Trial]:
    """Trials with prompts of length - ANSWER_TOKENS tokens; a larger count only appends to them.

    The length is at least SHORTEST.
    """
    rng = random.Random(f"passkey {seed} {length}")
    task = [tokenizer.eot, *tokenizer.encode(TASK)]
    question = tokenizer.encode(QUESTION)
    # a repeat after the first may have fewer tokens
    repeats = 2 + 2 * length // len(tokenizer.encode(FILLER))
    filler = tokenizer.encode(" ".join([FILLER] * repeats))
    trials = []
    for _ in range(count):
        key = rng.randint(1, LARGEST_KEY)
        depth = rng.random()
        statement = tokenizer.encode(KEY.format(key=key))
        room = length - len(task) - len(statement) - len(question) - ANSWER_TOKENS
        before = int(depth * (room + 1))
        prompt = [*task, *filler[:before], *statement, *filler[: room - before], *question]
        trials.append(Trial(prompt, key, before / max(1, room)))
    return trials


def judge(answers: Iterable[tuple[Trial, str]]) -> dict:
    """The results of one length: the accuracy, and every answer."""
    trials: list[dict[str, Any]] = []
    for trial, text in answers:
        trials.append(
            {
                "key": trial.number,
                "depth": round(trial.depth, 4),
                "answer": text,
                "correct": first_number(text) == str(trial.number),
            }
        )
    accuracy = statistics.fmean(values["correct"] for values in trials)
    return {"accuracy": accuracy, "trials": trials}


main = as_command(PasskeyRetrieval)

if __name__ == "__main__":
    main()
