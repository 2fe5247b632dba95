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
that contains them; with --out FILE.png as FILE.png and FILE_needle_scores.png. Nothing is measured
twice.

The paper leaves open the haystack (here validation tokens from a random offset, documents joined by
line breaks), the cities, the question, and what a length counts (here as in scripts.passkey).
"""

import functools
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
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
from data.loader import validation_tokens
from data.shards import check_ids, check_tokenizer
from data.tokenizer import Tokenizer, get_tokenizer
from errors import UserError
from evaluation import attention_weights
from runtime.device import autocast
from scripts.common.plots import Curve, add_legend, draw_curves, heat_map, panels
from scripts.common.retrieval import ANSWER_TOKENS, ASK, answer, batches, first_number, print_found
from scripts.common.runner import Evaluation, Run, as_command, option
from scripts.common.validation import check_lengths, default_lengths, validation_id

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
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
# The number of heads in Fig. 7, and its city, number and depth.
HEADS = 25
FIXED = ("Tokyo", 8106422, 0.5)
# The grades of an answer, and their markers in Fig. 8.
GRADES = {"correct": "o", "first digit": "^", "wrong": "x"}


@dataclass(frozen=True)
class Needle:
    prompt: list[int]
    span: slice  # of the prompt: after the needle's colon, to its end
    city: str
    number: int
    depth: float  # share of the haystack before the needle


def texts(tokenizer: Tokenizer, city: str, number: int) -> list[list[int]]:
    """The tokens of the needle up to its colon, of its number, of a line break, of the question."""
    question = ASK.format(question=QUESTION.format(city=city))
    return [tokenizer.encode(t) for t in (NEEDLE.format(city=city), f" {number}.", "\n", question)]


def bare_length(tokenizer: Tokenizer, city: str, number: int) -> int:
    """Tokens of a needle, its question and the answer, without a haystack."""
    return 1 + sum(map(len, texts(tokenizer, city, number))) + ANSWER_TOKENS


def shortest(tokenizer: Tokenizer) -> int:
    """The shortest length that fits a needle of any city and number, one token a character."""
    longest = max(bare_length(tokenizer, city, 8888888) for city in CITIES)
    return longest + len(" 8888888.") - len(tokenizer.encode(" 8888888."))


class Haystack:
    """Needles in stretches of validation tokens."""

    def __init__(self, data_dir: str, tokenizer: str, n_vocab: int):
        # 100M tokens, one shard of data.fineweb, are more than any measurement uses
        check_tokenizer(data_dir, tokenizer)
        self.tokens = validation_tokens(data_dir, 10**8)
        check_ids(data_dir, self.tokens, n_vocab)
        self.data_dir, self.tokenizer = data_dir, get_tokenizer(tokenizer)

    def check(self, lengths: Sequence[int]) -> None:
        """Raise UserError where a length is too short for a needle, or the text for a length."""
        if min(lengths) < (enough := shortest(self.tokenizer)):
            raise UserError(
                f"length {min(lengths)} is too short, give --lengths and --score_length: without a "
                f"haystack the needle, its question and the answer take up to {enough} tokens "
                f"({self.tokenizer.name})"
            )
        if max(lengths) > len(self.tokens):
            raise UserError(
                f"length {max(lengths)} needs a haystack of as many tokens, but {self.data_dir} "
                f"has {len(self.tokens)} validation tokens"
            )

    def hide(self, city: str, number: int, depth: float, length: int, place: float) -> Needle:
        """A prompt of length - ANSWER_TOKENS tokens; `place` in [0, 1) picks the haystack."""
        eot = self.tokenizer.eot
        needle, span, end, question = texts(self.tokenizer, city, number)
        room = length - bare_length(self.tokenizer, city, number)
        start = int(place * (len(self.tokens) - room + 1))
        hay = self.tokens[start : start + room].astype(np.int64)
        hay = np.where(hay == eot, end[0], hay).tolist()
        before = round(depth * room)
        prompt = [eot, *hay[:before], *needle, *span, *end, *hay[before:], *question]
        begin = 1 + before + len(needle)
        return Needle(prompt, slice(begin, begin + len(span)), city, number, depth)

    def draws(
        self, count: int, rng: random.Random, length: int, depth: float | None = None
    ) -> Iterator[Needle]:
        """Needles with random cities, numbers and haystacks, at `depth` or at random depths."""
        for _ in range(count):
            city, number = rng.choice(CITIES), rng.randint(10**6, 10**7 - 1)
            needle_depth = rng.random() if depth is None else depth
            yield self.hide(city, number, needle_depth, length, rng.random())


open_haystack = functools.cache(Haystack)  # one for all runs with these tokens


@dataclass(frozen=True, kw_only=True)
class Needles(Evaluation):
    """Needle in a haystack: a city's number in a long text, and the attention that it gets."""

    name = "needle"

    lengths: tuple[int, ...] | None = option(
        None, "in tokens (default: 1x to 16x the training length)"
    )
    samples: int = option(1000, "per length and depth", at_least=1)
    score_length: int = option(8000, "length for the needle scores", at_least=1)
    score_trials: int = option(100, "needles to score", at_least=1)
    data_dir: str | None = option(None, "shards to take haystacks from (default: the run's own)")
    seed: int = option(1337, "of needles and haystacks")

    def lengths_of(self, config: Config) -> tuple[int, ...]:
        return self.lengths or default_lengths([config])

    def haystack(self, config: Config) -> Haystack:
        return open_haystack(self.data_dir or config.data_dir, config.tokenizer, config.n_vocab)

    def cells(self, config: Config) -> dict[str, tuple[int, float]]:
        """The lengths and depths of the accuracies, by the name of their part."""
        return {cell(n, depth): (n, depth) for n in self.lengths_of(config) for depth in DEPTHS}

    @property
    def scores(self) -> str:
        """The name of the part with the needle scores."""
        return f"scores of {self.score_trials} needles in {self.score_length} tokens"

    def facts(self, config: Config) -> dict:
        lengths, data_dir = self.lengths_of(config), self.data_dir or config.data_dir
        check_lengths(config, (*lengths, self.score_length))
        self.haystack(config).check((*lengths, self.score_length))
        return {
            "data_dir": data_dir,
            "val_sha256": validation_id(data_dir),
            "samples": self.samples,
            "sample_seed": self.seed,
        }

    def parts(self, config: Config) -> dict[str, int]:
        cells = {name: length * self.samples for name, (length, _) in self.cells(config).items()}
        return cells | {self.scores: (self.score_trials + 1) * self.score_length}

    def measure_part(self, run: Run, facts: dict, name: str, bar: tqdm) -> dict:
        haystack = self.haystack(run.config)
        if name == self.scores:
            return score(run, self, haystack, bar)
        length, depth = self.cells(run.config)[name]
        grades: list[str] = []
        rng = random.Random(f"needle {self.seed} {length} {depth}")
        for batch in batches(haystack.draws(self.samples, rng, length, depth), length, bar):
            grades += [grade(*pair) for pair in zip(batch, ask(run, batch), strict=True)]
        shares = {name: grades.count(name) / len(grades) for name in GRADES}
        return {"length": length, "depth": depth} | shares

    def picture(self, path: str | Path, measurement: dict) -> Figure:
        title = f"{measurement['variant']}, needles, RoPE scaling {measurement['rope']}"
        lengths = sorted(found(measurement["parts"]))
        shares = [
            [measurement["parts"][cell(length, depth)]["correct"] for length in lengths]
            for depth in DEPTHS
        ]
        depths = [f"{depth:.0%}" for depth in DEPTHS]
        return heat_map(title, shares, lengths, depths, "needles found (%)")


def cell(length: int, depth: float) -> str:
    return f"{length} tokens, depth {depth:.0%}"


def ask(run: Run, needles: list[Needle]) -> list[str]:
    """The model's answers, with end-of-text excluded."""
    eot = get_tokenizer(run.config.tokenizer).eot
    return answer(run, [needle.prompt for needle in needles], never=eot)


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
    length = evaluation.score_length
    rng = random.Random(f"needle scores {evaluation.seed} {length}")
    fixed = haystack.hide(*FIXED, length, rng.random())
    scores = needle_scores(run, [fixed])[0]
    best = scores.flatten().topk(min(HEADS, scores.numel()))
    heads = [
        {"layer": i // scores.shape[1], "head": i % scores.shape[1], "score": value}
        for value, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]
    one_needle = graded(fixed, ask(run, [fixed])[0]) | {"heads": heads}
    bar.update(length)
    trials = []
    for batch in batches(haystack.draws(evaluation.score_trials, rng, length), length, bar):
        tops = needle_scores(run, batch).flatten(1).amax(-1).tolist()
        for needle, text, top in zip(batch, ask(run, batch), tops, strict=True):
            trials.append(graded(needle, text) | {"top_score": top})
    return {"length": length, "one needle": one_needle, "trials": trials}


def graded(needle: Needle, text: str) -> dict:
    """A needle and the answer to it."""
    return {
        "city": needle.city, "number": needle.number, "depth": round(needle.depth, 4),
        "answer": text, "grade": grade(needle, text),
    }  # fmt: skip


def show(evaluation: Needles, runs: list[tuple[str, dict]]) -> dict[str, Figure]:
    """Print every run's accuracy by length and its scores."""
    for _, result in runs:
        print_found(result, "needles", found(result["parts"]))
        trials = result["parts"][evaluation.scores]["trials"]
        mean = statistics.mean(trial["top_score"] for trial in trials)
        print(f"{evaluation.scores}: mean of each needle's highest {mean:.4f}")
    names, scores = [name for name, _ in runs], [r["parts"][evaluation.scores] for _, r in runs]
    return {"needle_heads": plot_heads(names, scores), "needle_scores": plot_scores(names, scores)}


def found(parts: dict[str, dict]) -> dict[int, float]:
    """The share of needles found at each length, the mean over depths."""
    lengths = {part["length"] for part in parts.values() if "depth" in part}
    return {
        n: statistics.mean(parts[cell(n, depth)]["correct"] for depth in DEPTHS)
        for n in sorted(lengths)
    }


def plot_heads(names: list[str], runs: list[dict]) -> Figure:
    """Fig. 7: the highest needle scores of all heads at one needle."""
    curves = []
    for name, scores in zip(names, runs, strict=True):
        values = [head["score"] for head in scores["one needle"]["heads"]]
        label = f"{name} ({scores['one needle']['grade']})"
        curves.append(Curve(label, range(1, len(values) + 1), values))
    title = f"one needle, {FIXED[2]:.0%} deep in {runs[0]['length']:,} tokens"
    return draw_curves({title: curves}, "attention head, by needle score", "needle score")


def plot_scores(names: list[str], runs: list[dict]) -> Figure:
    """Fig. 8: the highest needle score of each trial, marked by the answer's grade."""
    figure, (axes,) = panels(1)
    for i, (name, scores) in enumerate(zip(names, runs, strict=True)):
        trials = sorted(scores["trials"], key=lambda trial: -trial["top_score"])
        axes.plot([], [], color=f"C{i}", label=name)
        for grade_name, marker in GRADES.items():
            places = [n for n, trial in enumerate(trials, 1) if trial["grade"] == grade_name]
            tops = [trials[n - 1]["top_score"] for n in places]
            axes.scatter(places, tops, s=18, color=f"C{i}", marker=marker)
    for grade_name, marker in GRADES.items():
        axes.scatter([], [], color="0.3", marker=marker, label=grade_name)
    axes.set_title(f"needles at random depths of {runs[0]['length']:,} tokens", fontsize="medium")
    axes.set(xlabel="trial, by top needle score", ylabel="top needle score")
    axes.locator_params("x", integer=True)
    axes.grid(alpha=0.3)
    add_legend(figure)
    return figure


main = as_command(Needles, show)

if __name__ == "__main__":
    main()
