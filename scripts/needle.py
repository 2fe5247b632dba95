"""Needle in a haystack: a city's number stated once in a long text, and the attention it gets.

python -m scripts.finetune_squad RUN --out_dir TUNED
python -m scripts.needle TUNED [TUNED ...] --lengths 1024,4096,8192 --rope none --rope_theta 500000

SSMax, section 3.3, Fig. 6: "The special magic Tokyo number is: 8106422." at five depths of a
haystack, then a question formatted as in fine-tuning; decoding is greedy, with end-of-text
excluded. An answer is correct if the first seven digits of its first run of digits are the number.
Section 3.4: a head's needle score is the attention from the prompt's last token, which predicts the
answer's first token, to the span from the needle's colon to its end. Scores are taken at
--score_length tokens: by default at 8,000, as in the paper, or at the longest of --lengths if that
is shorter. Fig. 7: the 25 highest scores at one needle, at half depth. Fig. 8: the highest score of
each of --score_trials needles at random depths. For variants whose rows do not sum to 1 the score
is the same sum, but not a share.

Writes needle.json, with a part for each length and a part with the scores of all heads, needle.png
(Fig. 6) for each run, and needle_heads.png (Fig. 7) and needle_scores.png (Fig. 8) for all of them.

The paper leaves open the haystack (here validation tokens from a random offset, documents joined by
line breaks), the cities, the question, and what a length counts (here as in scripts.passkey).
"""

import itertools
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from config import Config, PositiveInt
from data.tokenizer import Tokenizer, get_tokenizer
from errors import UserError
from evaluation import layer_attention_weights
from scripts.common.command_line import option
from scripts.common.hf_models import AnyRun
from scripts.common.labels import title_of
from scripts.common.plots import Curve, draw_curves, heat_map
from scripts.common.retrieval import (
    ANSWER_TOKENS,
    ASK,
    RetrievalEvaluation,
    Trial,
    answered,
    first_number,
    print_accuracies,
)
from scripts.common.runner import Results, as_command
from scripts.common.runs import Run
from scripts.common.validation import (
    TextEvaluation,
    accuracies,
    checked_tokens,
)

CITIES = (
    "Accra, Amsterdam, Ankara, Athens, Auckland, Baghdad, Bangkok, Barcelona, Beijing, Berlin, "
    "Boston, Brussels, Budapest, Buenos Aires, Cairo, Cape Town, Chicago, Copenhagen, Delhi, "
    "Dublin, Edinburgh, Geneva, Hanoi, Havana, Helsinki, Istanbul, Jakarta, Kyoto, Lagos, Lima, "
    "Lisbon, London, Madrid, Melbourne, Mexico City, Milan, Montreal, Moscow, Mumbai, Nairobi, "
    "New York, Osaka, Oslo, Paris, Prague, Rome, San Francisco, Santiago, Seoul, Singapore, "
    "Stockholm, Sydney, Tehran, Tokyo, Toronto, Vancouver, Vienna, Warsaw"
).split(", ")
STATEMENT = "\nThe special magic {city} number is:"  # and the scored span: " 8106422."
QUESTION = "What is the special magic {city} number?"
# A length that fits any needle, its question and the answer, at a token a character: 136 of them.
SHORTEST = 160
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
# The number of heads in Fig. 7, and its city, number and depth.
HEADS = 25
FIXED = ("Tokyo", 8106422, 0.5)
# The length of the scores in Figs. 7 and 8.
SCORE_LENGTH = 8000
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

    def hide(self, city: str, number: int, depth: float, length: int, offset: float) -> Needle:
        """A prompt of length - ANSWER_TOKENS tokens; `offset` in [0, 1) picks the haystack."""
        encode = self.tokenizer.encode
        eot = self.tokenizer.eot
        statement = encode(STATEMENT.format(city=city))
        span = encode(f" {number}.")
        line_break = encode("\n")
        question = encode(ASK.format(question=QUESTION.format(city=city)))
        needle = [*statement, *span, *line_break]
        room = length - 1 - len(needle) - len(question) - ANSWER_TOKENS
        start = int(offset * (len(self.tokens) - room + 1))
        hay = self.tokens[start : start + room].astype(np.int64)
        hay = np.where(hay == eot, line_break[0], hay).tolist()
        before = round(depth * room)
        prompt = [eot, *hay[:before], *needle, *hay[before:], *question]
        begin = 1 + before + len(statement)
        return Needle(prompt, number, depth, slice(begin, begin + len(span)), city)

    def needles(
        self,
        count: int,
        rng: random.Random,
        length: int,
        depth: float | None = None,
    ) -> Iterator[Needle]:
        """Draw needles with random cities, numbers and haystacks, at `depth` or random depths."""
        for _ in range(count):
            city = rng.choice(CITIES)
            number = rng.randint(10**6, 10**7 - 1)
            needle_depth = rng.random() if depth is None else depth
            offset = rng.random()
            yield self.hide(city, number, needle_depth, length, offset)


@dataclass(frozen=True, kw_only=True)
class NeedleRetrieval(RetrievalEvaluation, TextEvaluation):
    """Needle in a haystack: a city's number in a long text, and the attention that it gets."""

    name = "needle"
    shortest = SHORTEST

    samples: PositiveInt = option(1000, "needles per length and depth")
    score_length: PositiveInt | None = option(
        None,
        f"length for the needle scores (default: {SCORE_LENGTH}, or the longest length if shorter)",
    )
    score_trials: PositiveInt = option(100, "needles to score")

    def score_length_of(self, lengths: Iterable[int]) -> int:
        """The length for the needle scores of runs measured at these lengths."""
        return self.score_length or min(SCORE_LENGTH, max(lengths))

    def scores_at(self, length: int) -> str:
        """The name of the chunk with the needle scores."""
        return f"scores of all heads, {self.score_trials} needles in {length} tokens"

    def identify(self, config: Config) -> dict:
        lengths = self.lengths_of(config)
        score_length = self.score_length_of(lengths)
        if self.score_length is not None and score_length < SHORTEST:
            raise UserError(
                f"--score_length {score_length} is too short: a prompt and its answer take up to "
                f"{SHORTEST} tokens"
            )
        lengths = (*lengths, score_length)
        self.check_prompts(config, lengths)
        available = len(checked_tokens(config))
        longest = max(lengths)
        if longest > available:
            raise UserError(
                f"{config.data_dir}: {available} validation tokens, but a haystack of {longest}"
            )
        return {"samples": self.samples, "sample_seed": self.seed}

    def align(self, configs: Sequence[Config]) -> Self:
        """All runs at the same lengths.

        Raises UserError if the runs would be measured on different text.
        """
        super().align(configs)
        return replace(self, lengths=self.lengths_of(*configs))

    def chunks(self, config: Config) -> dict[str, int | None]:
        """The lengths; the chunk with the needle scores has None instead."""
        score_length = self.score_length_of(self.lengths_of(config))
        return super().chunks(config) | {self.scores_at(score_length): None}

    def measure(self, run: Run, length: int | None) -> dict:
        haystack = haystack_of(run.config)
        if length is None:
            return self.score(run, haystack, self.score_length_of(self.lengths_of(run.config)))
        shares = []
        for depth in DEPTHS:
            rng = random.Random(f"needle {self.seed} {length} {depth}")
            needles = haystack.needles(self.samples, rng, length, depth)
            answers = answered(run, needles, length, never=haystack.tokenizer.eot)
            grades = [grade(needle, text) for needle, text in answers]
            shares.append({name: grades.count(name) / len(grades) for name in GRADES})
        by_depth = [share["correct"] for share in shares]
        return {
            "accuracy": statistics.mean(by_depth),
            "accuracy_by_depth": by_depth,
            "grades_by_depth": shares,
        }

    def score(self, run: Run, haystack: Haystack, length: int) -> dict:
        """The needle scores of all heads, at one needle at half depth and at many others."""
        rng = random.Random(f"needle scores {self.seed} {length}")
        fixed_needle = haystack.hide(*FIXED, length, rng.random())
        needles = itertools.chain([fixed_needle], haystack.needles(self.score_trials, rng, length))
        trials: list[dict[str, Any]] = []
        for needle, text in answered(run, needles, length, never=haystack.tokenizer.eot):
            trials.append(
                {
                    "city": needle.city,
                    "number": needle.number,
                    "depth": round(needle.depth, 4),
                    "answer": text,
                    "grade": grade(needle, text),
                    "scores": needle_scores(run, needle).tolist(),  # [layers][heads]
                }
            )
        return {"length": length, "one needle": trials[0], "trials": trials[1:]}

    def show(self, results: Results) -> dict[str, Figure]:
        """Print every run's accuracy by length; draw Figs. 7 and 8."""
        head_curves = []
        trial_curves: list[Curve] = []
        for name, result in results.items():
            print_accuracies(name, result, "needles")
            length = self.score_length_of(accuracies(result))
            scored = result["parts"][self.scores_at(length)]
            best = highest_first(scored["one needle"])[:HEADS]
            label = f"{name}, {scored['one needle']['grade']}"
            head_curves.append(Curve(label, range(1, len(best) + 1), best))
            trial_curves += curves_by_grade(name, scored["trials"])
        one = f"one needle, {FIXED[2]:.0%} deep in {length:,} tokens"
        many = f"needles at random depths of {length:,} tokens"
        heads = draw_curves({one: head_curves}, "attention head, by score", "needle score")
        trials = draw_curves({many: trial_curves}, "trial, by top score", "top needle score")
        return {"needle_heads": heads, "needle_scores": trials}

    def draw_run(self, run: AnyRun, result: dict) -> Figure:
        """Fig. 6: the share of needles found at each length and depth."""
        lengths = [*accuracies(result)]
        parts = [result["parts"][str(length)] for length in lengths]
        shares = {}
        for i, depth in enumerate(DEPTHS):
            shares[f"{depth:.0%}"] = [part["accuracy_by_depth"][i] for part in parts]
        opened = title_of({"": result})
        title = f"{result['variant']}, {opened}"
        return heat_map(title, shares, [f"{length:,}" for length in lengths], "needles found (%)")


def haystack_of(config: Config) -> Haystack:
    return Haystack(checked_tokens(config), get_tokenizer(config.tokenizer))


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
    idx = torch.tensor([needle.prompt + needle.prompt[-1:] * ANSWER_TOKENS], device=run.device)
    last = slice(len(needle.prompt) - 1, len(needle.prompt))
    with run.autocast():
        layers = layer_attention_weights(
            run.model, idx, last, lambda A: A[..., needle.span].sum(-1)
        )
    return torch.cat(layers)[..., 0].cpu()  # of [1, H, 1] each


def highest_first(trial: dict) -> list[float]:
    """The needle scores of a trial in descending order, of all layers and heads."""
    return sorted(itertools.chain.from_iterable(trial["scores"]), reverse=True)


# ---- the pictures ----


def curves_by_grade(name: str, trials: list[dict]) -> list[Curve]:
    """The top scores of trials by their rank, a curve for each grade that an answer has."""
    graded = [(highest_first(trial)[0], trial["grade"]) for trial in trials]
    graded.sort(reverse=True)
    curves = []
    for answer_grade in GRADES:
        ranks = []
        scores = []
        for rank, (score, trial_grade) in enumerate(graded, start=1):
            if trial_grade == answer_grade:
                ranks.append(rank)
                scores.append(score)
        if ranks:
            curves.append(Curve(f"{name}, {answer_grade}", ranks, scores))
    return curves


main = as_command(NeedleRetrieval)

if __name__ == "__main__":
    main()
