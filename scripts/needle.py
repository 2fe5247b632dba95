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

Writes needle.json, with a part for each length and a part with the scores, needle.png (Fig. 6) for
each run, and needle_heads.png (Fig. 7) and needle_scores.png (Fig. 8) for all of them.

The paper leaves open the haystack (here validation tokens from a random offset, documents joined by
line breaks), the cities, the question, and what a length counts (here as in scripts.passkey).
"""

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

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
    check_prompts,
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
        encode = self.tokenizer.encode
        eot = self.tokenizer.eot
        statement = encode(STATEMENT.format(city=city))
        span = encode(f" {number}.")
        line_break = encode("\n")
        question = encode(ASK.format(question=QUESTION.format(city=city)))
        told = [*statement, *span, *line_break]
        room = length - 1 - len(told) - len(question) - ANSWER_TOKENS
        start = int(place * (len(self.tokens) - room + 1))
        hay = self.tokens[start : start + room].astype(np.int64)
        hay = np.where(hay == eot, line_break[0], hay).tolist()
        before = round(depth * room)
        prompt = [eot, *hay[:before], *told, *hay[before:], *question]
        begin = 1 + before + len(statement)
        return Needle(prompt, number, depth, slice(begin, begin + len(span)), city)

    def draws(
        self,
        count: int,
        rng: random.Random,
        length: int,
        depth: float | None = None,
    ) -> Iterator[Needle]:
        """Needles with random cities, numbers and haystacks, at `depth` or at random depths."""
        for _ in range(count):
            city = rng.choice(CITIES)
            number = rng.randint(10**6, 10**7 - 1)
            needle_depth = rng.random() if depth is None else depth
            place = rng.random()
            yield self.hide(city, number, needle_depth, length, place)


@dataclass(frozen=True, kw_only=True)
class NeedleRetrieval(RetrievalEvaluation, TextEvaluation):
    """Needle in a haystack: a city's number in a long text, and the attention that it gets."""

    name = "needle"
    shortest = SHORTEST

    samples: PositiveInt = option(1000, "needles per length and depth")
    score_length: PositiveInt = option(8000, "length for the needle scores")
    score_trials: PositiveInt = option(100, "needles to score")

    @property
    def scores(self) -> str:
        """The name of the chunk with the needle scores."""
        return f"scores of {self.score_trials} needles in {self.score_length} tokens"

    def identify(self, config: Config) -> dict:
        if self.score_length < SHORTEST:
            raise UserError(
                f"--score_length {self.score_length} is too short: a prompt and its answer take up "
                f"to {SHORTEST} tokens"
            )
        lengths = (*self.lengths_of(config), self.score_length)
        check_prompts(config, lengths, SHORTEST)
        available = len(checked_tokens(config))
        longest = max(lengths)
        if longest > available:
            raise UserError(
                f"{config.data_dir}: {available} validation tokens, but a haystack of {longest}"
            )
        return {"samples": self.samples, "sample_seed": self.seed}

    def chunks(self, config: Config) -> dict[str, int | None]:
        """The lengths; the chunk with the needle scores has None instead."""
        return super().chunks(config) | {self.scores: None}

    def measure(self, run: Run, length: int | None) -> dict:
        haystack = haystack_of(run.config)
        if length is None:
            return self.score(run, haystack)
        shares = []
        for depth in DEPTHS:
            rng = random.Random(f"needle {self.seed} {length} {depth}")
            needles = haystack.draws(self.samples, rng, length, depth)
            answers = answered(run, needles, length, never=haystack.tokenizer.eot)
            grades = [grade(needle, text) for needle, text in answers]
            shares.append({name: grades.count(name) / len(grades) for name in GRADES})
        by_depth = [share["correct"] for share in shares]
        return {
            "accuracy": statistics.mean(by_depth),
            "accuracy_by_depth": by_depth,
            "grades_by_depth": shares,
        }

    def score(self, run: Run, haystack: Haystack) -> dict:
        """Needle scores: the top heads at one needle, the top score at each of many."""
        length = self.score_length
        rng = random.Random(f"needle scores {self.seed} {length}")
        fixed_needle = haystack.hide(*FIXED, length, rng.random())
        needles = chain([fixed_needle], haystack.draws(self.score_trials, rng, length))
        trials: list[dict[str, Any]] = []
        for needle, text in answered(run, needles, length, never=haystack.tokenizer.eot):
            scores = needle_scores(run, needle)
            trial = {
                "city": needle.city,
                "number": needle.number,
                "depth": round(needle.depth, 4),
                "answer": text,
                "grade": grade(needle, text),
            }
            if not trials:
                trial["heads"] = top_heads(scores)
            else:
                trial["top_score"] = scores.max().item()
            trials.append(trial)
        return {"length": length, "one needle": trials[0], "trials": trials[1:]}

    def show(self, results: Results) -> dict[str, Figure]:
        """Print every run's accuracy by length; draw Figs. 7 and 8."""
        head_curves = []
        trial_curves: list[Curve] = []
        for name, result in results.items():
            print_accuracies(name, result, "needles")
            scores = result["parts"][self.scores]
            best = [head["score"] for head in scores["one needle"]["heads"]]
            label = f"{name}, {scores['one needle']['grade']}"
            head_curves.append(Curve(label, range(1, len(best) + 1), best))
            trial_curves += curves_by_grade(name, scores["trials"])
        one = f"one needle, {FIXED[2]:.0%} deep in {self.score_length:,} tokens"
        many = f"needles at random depths of {self.score_length:,} tokens"
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


def top_heads(scores: Tensor) -> list[dict]:
    """The heads with the highest of the scores [layers, H]."""
    heads = []
    for layer, layer_scores in enumerate(scores.tolist()):
        for head, value in enumerate(layer_scores):
            heads.append({"layer": layer, "head": head, "score": value})
    return sorted(heads, key=lambda head: -head["score"])[:HEADS]


# ---- the pictures ----


def curves_by_grade(name: str, trials: list[dict]) -> list[Curve]:
    """The top scores of trials by their rank, a curve for each grade that an answer has."""
    ranked = sorted(trials, key=lambda trial: -trial["top_score"])
    curves = []
    for answer_grade in GRADES:
        ranks = [rank for rank, trial in enumerate(ranked, 1) if trial["grade"] == answer_grade]
        if ranks:
            scores = [ranked[rank - 1]["top_score"] for rank in ranks]
            curves.append(Curve(f"{name}, {answer_grade}", ranks, scores))
    return curves


main = as_command(NeedleRetrieval)

if __name__ == "__main__":
    main()
