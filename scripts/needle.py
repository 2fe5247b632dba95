"""Needle in a haystack: a city's number stated once in a long text, and the attention it gets.

python -m scripts.finetune_squad RUN --out_dir TUNED
python -m scripts.needle TUNED [TUNED ...] --lengths 1024,4096,8192 --rope none --rope_theta 500000

SSMax, section 3.3, Fig. 6: "The special magic Tokyo number is: 8106422." at five depths of a
haystack, then a question formatted as in fine-tuning; decoding is greedy, with end-of-text
excluded. An answer is correct if the first seven digits of its first run of digits are the number.
Section 3.4: a head's needle score is the attention from the prompt's last token, which predicts the
answer's first token, to the span from the needle's colon to its end. Fig. 7: the 25 highest scores
at one needle, at half depth of --score_length tokens. Fig. 8: the highest score of each of
--score_trials needles at random depths. For variants whose rows do not sum to 1 the score is the
same sum, but not a share.

Writes RUN/needle.json, RUN/needle.png (Fig. 6), needle_heads.png (Fig. 7) and needle_scores.png
(Fig. 8), the latter two once for several runs, as needle_heads_RUN_RUN.png and so on in the folder
that contains them; with --out FILE.png as FILE.png and FILE_needle_scores.png. The JSON has a part
for each length and a part with the scores. Nothing is measured twice.

The paper leaves open the haystack (here validation tokens from a random offset, documents joined by
line breaks), the cities, the question, and what a length counts (here as in scripts.passkey).
"""

import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

# for a script that is run as a file: the repository's modules are not beside it
sys.path.insert(0, str(Path(__file__).parents[1]))

from config import Config
from data.tokenizer import Tokenizer, get_tokenizer
from errors import UserError
from evaluation import attention_weights
from scripts.common.labels import title_of
from scripts.common.options import option
from scripts.common.plots import Curve, draw_curves, heat_map
from scripts.common.retrieval import (
    ANSWER_TOKENS,
    ASK,
    RetrievalOptions,
    Trial,
    answered,
    check_prompts,
    first_number,
    print_accuracies,
)
from scripts.common.runner import Evaluation, Results, Run, as_command
from scripts.common.validation import TextOptions, accuracies, checked_tokens

CITIES = (
    "Accra", "Amsterdam", "Ankara", "Athens", "Auckland", "Baghdad", "Bangkok", "Barcelona",
    "Beijing", "Berlin", "Boston", "Brussels", "Budapest", "Buenos Aires", "Cairo", "Cape Town",
    "Chicago", "Copenhagen", "Delhi", "Dublin", "Edinburgh", "Geneva", "Hanoi", "Havana",
    "Helsinki", "Istanbul", "Jakarta", "Kyoto", "Lagos", "Lima", "Lisbon", "London", "Madrid",
    "Melbourne", "Mexico City", "Milan", "Montreal", "Moscow", "Mumbai", "Nairobi", "New York",
    "Osaka", "Oslo", "Paris", "Prague", "Rome", "San Francisco", "Santiago", "Seoul", "Singapore",
    "Stockholm", "Sydney", "Tehran", "Tokyo", "Toronto", "Vancouver", "Vienna", "Warsaw",
)  # fmt: skip
STATEMENT = "\nThe special magic {city} number is:"  # and the scored span: " 8106422."
QUESTION = "What is the special magic {city} number?"
# A length that fits any needle, its question and the answer, at a token a character: 136 of them.
SHORTEST = 160
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
# The number of heads in Fig. 7, and its city, number and depth.
HEADS = 25
FIXED = ("Tokyo", 8106422, 0.5)
GRADES = ("correct", "first digit", "wrong")


@dataclass(frozen=True)
class Needle(Trial):
    span: slice  # of the prompt: after the needle's colon, to its end
    city: str


@dataclass(frozen=True)
class Haystack:
    """Needles in stretches of validation tokens."""

    tokens: np.ndarray  # [n]
    tokenizer: Tokenizer

    def hide(self, city: str, number: int, depth: float, length: int, place: float) -> Needle:
        """A prompt of length - ANSWER_TOKENS tokens; `place` in [0, 1) picks the haystack."""
        asked = ASK.format(question=QUESTION.format(city=city))
        texts = (STATEMENT.format(city=city), f" {number}.", "\n", asked)
        needle, span, end, question = map(self.tokenizer.encode, texts)
        bare, eot = 1 + sum(map(len, (needle, span, end, question))), self.tokenizer.eot
        room = length - bare - ANSWER_TOKENS
        start = int(place * (len(self.tokens) - room + 1))
        hay = self.tokens[start : start + room].astype(np.int64)
        hay = np.where(hay == eot, end[0], hay).tolist()
        before = round(depth * room)
        prompt = [eot, *hay[:before], *needle, *span, *end, *hay[before:], *question]
        begin = 1 + before + len(needle)
        return Needle(prompt, number, depth, slice(begin, begin + len(span)), city)

    def draws(
        self, count: int, rng: random.Random, length: int, depth: float | None = None
    ) -> Iterator[Needle]:
        """Needles with random cities, numbers and haystacks, at `depth` or at random depths."""
        for _ in range(count):
            city, number = rng.choice(CITIES), rng.randint(10**6, 10**7 - 1)
            needle_depth = rng.random() if depth is None else depth
            yield self.hide(city, number, needle_depth, length, rng.random())


@dataclass(frozen=True, kw_only=True)
class NeedleOptions(RetrievalOptions, TextOptions):
    """Needle in a haystack: a city's number in a long text, and the attention that it gets."""

    samples: int = option(1000, "per length and depth", at_least=1)
    score_length: int = option(8000, "length for the needle scores", at_least=1)
    score_trials: int = option(100, "needles to score", at_least=1)

    @property
    def scores(self) -> str:
        """The name of the chunk with the needle scores."""
        return f"scores of {self.score_trials} needles in {self.score_length} tokens"


def haystack_of(config: Config) -> Haystack:
    return Haystack(checked_tokens(config), get_tokenizer(config.tokenizer))


def identify(options: NeedleOptions, config: Config) -> dict:
    lengths = (*options.lengths_of(config), options.score_length)
    check_prompts(config, lengths, SHORTEST)
    available, longest = len(checked_tokens(config)), max(lengths)
    if longest > available:
        raise UserError(
            f"{config.data_dir}: {available} validation tokens, but a haystack of {longest}"
        )
    return {"samples": options.samples, "sample_seed": options.seed}


def chunks(options: NeedleOptions, config: Config) -> dict[str, int | None]:
    """The lengths; the chunk with the needle scores has None instead."""
    lengths: dict[str, int | None] = {str(n): n for n in options.lengths_of(config)}
    return lengths | {options.scores: None}


def measure(options: NeedleOptions, run: Run, length: int | None) -> dict:
    haystack = haystack_of(run.config)
    if length is None:
        return score(run, options, haystack)
    shares = []
    for depth in DEPTHS:
        rng = random.Random(f"needle {options.seed} {length} {depth}")
        needles = haystack.draws(options.samples, rng, length, depth)
        answers = answered(run, needles, length, never=haystack.tokenizer.eot)
        grades = [grade(needle, text) for needle, text in answers]
        shares.append({name: grades.count(name) / len(grades) for name in GRADES})
    by_depth = [share["correct"] for share in shares]
    return {
        "accuracy": statistics.mean(by_depth),
        "accuracy_by_depth": by_depth,
        "grades_by_depth": shares,
    }


def grade(needle: Needle, text: str) -> str:
    """The grade of an answer, by its leading digits only, since it cannot end after them."""
    number = str(needle.number)
    digits = first_number(text)[: len(number)]
    if digits == number:
        return "correct"
    return "first digit" if digits[:1] == number[0] else "wrong"


def needle_scores(run: Run, needle: Needle) -> Tensor:
    """Attention from the prompt's last token to the needle's span, [layers, H]."""
    # padded for the answer as in generation, so that RoPE scaling and L see the same length
    idx = torch.tensor([needle.prompt + [0] * ANSWER_TOKENS], device=run.device)
    last = slice(len(needle.prompt) - 1, len(needle.prompt))
    with run.autocast():
        layers = attention_weights(run.model, idx, last, lambda A: A[..., needle.span].sum(-1))
    return torch.cat(layers)[..., 0].cpu()  # of [1, H, 1] each


def score(run: Run, options: NeedleOptions, haystack: Haystack) -> dict:
    """Needle scores: the top heads at one needle, the top score at each of many."""
    length, eot = options.score_length, haystack.tokenizer.eot
    rng = random.Random(f"needle scores {options.seed} {length}")
    fixed = haystack.hide(*FIXED, length, rng.random())
    needles = chain([fixed], haystack.draws(options.score_trials, rng, length))
    (first, scores), *others = (
        ({"city": needle.city, "number": needle.number, "depth": round(needle.depth, 4),
          "answer": text, "grade": grade(needle, text)}, needle_scores(run, needle))
        for needle, text in answered(run, needles, length, eot)
    )  # fmt: skip
    H, values = scores.shape[1], scores.flatten().tolist()  # [layers * H]
    heads = [{"layer": i // H, "head": i % H, "score": x} for i, x in enumerate(values)]
    best = sorted(heads, key=lambda head: -head["score"])[:HEADS]
    trials = [trial | {"top_score": scores.max().item()} for trial, scores in others]
    return {"length": length, "one needle": first | {"heads": best}, "trials": trials}


def draw_run(options: NeedleOptions, path: str | Path, measurement: dict) -> Figure:
    """Fig. 6: the share of needles found at each length and depth."""
    lengths, chunks = list(accuracies(measurement)), measurement["parts"]
    by_depth = zip(*(chunks[str(n)]["accuracy_by_depth"] for n in lengths), strict=True)
    shares = dict(zip(map("{:.0%}".format, DEPTHS), by_depth, strict=True))
    title = f"{measurement['variant']}, {title_of([measurement])}"
    return heat_map(title, shares, [f"{n:,}" for n in lengths], "needles found (%)")


def show(options: NeedleOptions, results: Results) -> dict[str, Figure]:
    """Print every run's accuracy by length; draw Figs. 7 and 8."""
    heads, tops = [], []
    for name, result in results.items():
        print_accuracies(result, "needles")
        scores = result["parts"][options.scores]
        best = [head["score"] for head in scores["one needle"]["heads"]]
        label = f"{name}, {scores['one needle']['grade']}"
        heads.append(Curve(label, range(1, len(best) + 1), best))
        trials = sorted(scores["trials"], key=lambda trial: -trial["top_score"])
        for kind in GRADES:
            points = [(i, t["top_score"]) for i, t in enumerate(trials, 1) if t["grade"] == kind]
            tops += [Curve(f"{name}, {kind}", *zip(*points, strict=True))] if points else []
    one = f"one needle, {FIXED[2]:.0%} deep in {options.score_length:,} tokens"
    many = f"needles at random depths of {options.score_length:,} tokens"
    return {
        "needle_heads": draw_curves({one: heads}, "attention head, by score", "needle score"),
        "needle_scores": draw_curves({many: tops}, "trial, by top score", "top needle score"),
    }


NEEDLE = Evaluation(
    name="needle",
    options=NeedleOptions,
    identify=identify,
    chunks=chunks,
    measure=measure,
    show=show,
    draw_run=draw_run,
)
main = as_command(NEEDLE)

if __name__ == "__main__":
    main()
