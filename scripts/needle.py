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
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from config import Config
from data.tokenizer import Tokenizer, get_tokenizer
from errors import UserError
from evaluation import attention_weights
from runtime.device import autocast
from scripts.common.plots import Curve, add_legend, draw_curves, panels
from scripts.common.retrieval import ANSWER_TOKENS, ASK, Retrieval, Trial, answered, first_number
from scripts.common.runner import Run, as_command, option
from scripts.common.validation import SHARD, checked_tokens, validation_id

CITIES = (
    "Accra", "Amsterdam", "Ankara", "Athens", "Auckland", "Baghdad", "Bangkok", "Barcelona",
    "Beijing", "Berlin", "Boston", "Brussels", "Budapest", "Buenos Aires", "Cairo", "Cape Town",
    "Chicago", "Copenhagen", "Delhi", "Dublin", "Edinburgh", "Geneva", "Hanoi", "Havana",
    "Helsinki", "Istanbul", "Jakarta", "Kyoto", "Lagos", "Lima", "Lisbon", "London", "Madrid",
    "Melbourne", "Mexico City", "Milan", "Montreal", "Moscow", "Mumbai", "Nairobi", "New York",
    "Osaka", "Oslo", "Paris", "Prague", "Rome", "San Francisco", "Santiago", "Seoul", "Singapore",
    "Stockholm", "Sydney", "Tehran", "Tokyo", "Toronto", "Vancouver", "Vienna", "Warsaw",
)  # fmt: skip
NEEDLE = "\nThe special magic {city} number is:"  # and the scored span: " 8106422."
QUESTION = "What is the special magic {city} number?"
# A length that fits any needle, its question and the answer, at a token a character: 136 of them.
SHORTEST = 160
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
# The number of heads in Fig. 7, and its city, number and depth.
HEADS = 25
FIXED = ("Tokyo", 8106422, 0.5)
# The grades of an answer, and their markers in Fig. 8.
GRADES = {"correct": "o", "first digit": "^", "wrong": "x"}


@dataclass(frozen=True)
class Needle(Trial):
    span: slice  # of the prompt: after the needle's colon, to its end
    city: str


def pieces(tokenizer: Tokenizer, city: str, number: int) -> list[list[int]]:
    """The tokens of the needle up to its colon, of its number, of a line break, of the question."""
    question = ASK.format(question=QUESTION.format(city=city))
    return [tokenizer.encode(t) for t in (NEEDLE.format(city=city), f" {number}.", "\n", question)]


@dataclass(frozen=True)
class Haystack:
    """Needles in stretches of validation tokens."""

    tokens: np.ndarray  # [n]
    tokenizer: Tokenizer

    def hide(self, city: str, number: int, depth: float, length: int, place: float) -> Needle:
        """A prompt of length - ANSWER_TOKENS tokens; `place` in [0, 1) picks the haystack."""
        eot = self.tokenizer.eot
        needle, span, end, question = pieces(self.tokenizer, city, number)
        bare = len([eot, *needle, *span, *end, *question])
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
class Needles(Retrieval):
    """Needle in a haystack: a city's number in a long text, and the attention that it gets."""

    name, what = "needle", "needles"
    depths = tuple(f"{depth:.0%}" for depth in DEPTHS)

    samples: int = option(1000, "per length and depth", at_least=1)
    score_length: int = option(8000, "length for the needle scores", at_least=1)
    score_trials: int = option(100, "needles to score", at_least=1)
    data_dir: str | None = option(None, "shards to take haystacks from (default: the run's own)")

    def haystack(self, config: Config) -> Haystack:
        tokens = checked_tokens(self.data_dir or config.data_dir, SHARD, config)
        return Haystack(tokens, get_tokenizer(config.tokenizer))

    @property
    def scores(self) -> str:
        """The name of the part with the needle scores."""
        return f"scores of {self.score_trials} needles in {self.score_length} tokens"

    def facts(self, config: Config) -> dict:
        lengths, haystack = (*self.lengths_of(config), self.score_length), self.haystack(config)
        data_dir, available = self.data_dir or config.data_dir, len(haystack.tokens)
        self.check_lengths(config, lengths, SHORTEST)
        if max(lengths) > available:
            raise UserError(
                f"{data_dir}: {available} validation tokens are no haystack for length "
                f"{max(lengths)}"
            )
        return {
            "data_dir": data_dir,
            "val_sha256": validation_id(data_dir),
            "samples": self.samples,
            "sample_seed": self.seed,
        }

    def parts(self, config: Config) -> dict[str, int]:
        needles = len(DEPTHS) * self.samples
        lengths = {str(length): length * needles for length in self.lengths_of(config)}
        return lengths | {self.scores: (self.score_trials + 1) * self.score_length}

    def measure_part(self, run: Run, facts: dict, name: str, bar: tqdm) -> dict:
        haystack = self.haystack(run.config)
        if name == self.scores:
            return score(run, self, haystack, bar)
        length, shares = int(name), []
        for depth in DEPTHS:
            rng = random.Random(f"needle {self.seed} {length} {depth}")
            needles = haystack.draws(self.samples, rng, length, depth)
            batches = answered(run, needles, length, bar, never=haystack.tokenizer.eot)
            grades = [grade(*pair) for batch in batches for pair in zip(*batch, strict=True)]
            shares.append({name: grades.count(name) / len(grades) for name in GRADES})
        accuracies = [share["correct"] for share in shares]
        return {
            "accuracy": statistics.mean(accuracies),
            "accuracy_by_depth": accuracies,
            "grades_by_depth": shares,
        }


def grade(needle: Needle, text: str) -> str:
    """The grade of an answer, by its leading digits only, since it cannot end after them."""
    number = str(needle.number)
    digits = first_number(text)[: len(number)]
    if digits == number:
        return "correct"
    return "first digit" if digits[:1] == number[0] else "wrong"


def needle_scores(run: Run, needles: list[Needle]) -> Tensor:
    """Attention from each prompt's last token to its needle's span, [B, layers, H]."""
    idx = torch.tensor([needle.prompt for needle in needles], device=run.device)
    # padded for the answer as in generation, so that RoPE scaling and L see the same length
    last, idx = idx.shape[1] - 1, F.pad(idx, (0, ANSWER_TOKENS))
    inside = torch.zeros(idx.shape, device=run.device)
    for in_prompt, needle in zip(inside, needles, strict=True):
        in_prompt[needle.span] = 1

    def mass(A: Tensor) -> Tensor:  # [B, H, 1, L] -> [B, H, 1]
        return (A * inside[:, None, None]).sum(-1)

    with autocast(run.device, run.dtype):
        layers = attention_weights(run.model, idx, slice(last, last + 1), mass)
    return torch.cat(layers, dim=2).mT.cpu()


def score(run: Run, evaluation: Needles, haystack: Haystack, bar: tqdm) -> dict:
    """Needle scores: the top heads at one needle, the top score at each of many."""
    length, eot = evaluation.score_length, haystack.tokenizer.eot
    rng = random.Random(f"needle scores {evaluation.seed} {length}")
    fixed = haystack.hide(*FIXED, length, rng.random())
    scores = needle_scores(run, [fixed])[0]
    best = scores.flatten().topk(min(HEADS, scores.numel()))
    heads = [
        {"layer": i // scores.shape[1], "head": i % scores.shape[1], "score": value}
        for value, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]
    [(_, [text])] = answered(run, [fixed], length, bar, eot)
    trials = []
    needles = haystack.draws(evaluation.score_trials, rng, length)
    for batch, texts in answered(run, needles, length, bar, eot):
        tops = needle_scores(run, batch).flatten(1).amax(-1).tolist()
        for needle, answer, top in zip(batch, texts, tops, strict=True):
            trials.append(graded(needle, answer) | {"top_score": top})
    return {
        "length": length,
        "one needle": graded(fixed, text) | {"heads": heads},
        "trials": trials,
    }


def graded(needle: Needle, text: str) -> dict:
    """A needle and the answer to it."""
    return {
        "city": needle.city, "number": needle.number, "depth": round(needle.depth, 4),
        "answer": text, "grade": grade(needle, text),
    }  # fmt: skip


def show(evaluation: Needles, runs: list[tuple[str, dict]]) -> dict[str, Figure]:
    """Print every run's accuracy by length; draw Figs. 7 and 8."""
    scores = {name: result["parts"][evaluation.scores] for name, result in runs}
    for _, result in runs:
        evaluation.print_found(result)
    return {"needle_heads": plot_heads(scores), "needle_scores": plot_scores(scores)}


def plot_heads(scores: dict[str, dict]) -> Figure:
    """Fig. 7: the highest needle scores of all heads at one needle."""
    curves = []
    for name, measured in scores.items():
        values = [head["score"] for head in measured["one needle"]["heads"]]
        label = f"{name} ({measured['one needle']['grade']})"
        curves.append(Curve(label, range(1, len(values) + 1), values))
    title = f"one needle, {FIXED[2]:.0%} deep in {measured['length']:,} tokens"
    return draw_curves({title: curves}, "attention head, by needle score", "needle score")


def plot_scores(scores: dict[str, dict]) -> Figure:
    """Fig. 8: the highest needle score of each trial, marked by the answer's grade."""
    figure, (axes,) = panels(1)
    for i, (name, measured) in enumerate(scores.items()):
        trials = sorted(measured["trials"], key=lambda trial: -trial["top_score"])
        for grade_name, marker in GRADES.items():
            places = [n for n, trial in enumerate(trials, 1) if trial["grade"] == grade_name]
            tops, label = [trials[n - 1]["top_score"] for n in places], f"{name}, {grade_name}"
            axes.scatter(places, tops, s=18, color=f"C{i}", marker=marker, label=label)
    axes.set_title(f"needles at random depths of {measured['length']:,} tokens", fontsize="medium")
    axes.set(xlabel="trial, by top needle score", ylabel="top needle score")
    axes.locator_params("x", integer=True)
    axes.grid(alpha=0.3)
    add_legend(figure)
    return figure


main = as_command(Needles, show)

if __name__ == "__main__":
    main()
