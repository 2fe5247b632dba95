"""Needle in a haystack: a city's number told once in long text, and the attention that it gets.

python -m scripts.finetune_squad RUN --out_dir TUNED
python -m scripts.needle TUNED [TUNED ...] --lengths 1024,4096,8192 --rope none --rope_theta 500000

SSMax, section 3.3, Fig. 6: "The special magic Tokyo number is: 8106422." at five depths of a
haystack, then a question in the form of the fine-tuning; greedy, but never end-of-text. An answer
is right if the first seven digits of its first run of digits are the number. Section 3.4: a head's
needle score is the attention from the prompt's last token, whose output is the answer's first one,
to the span after the needle's colon up to its end. Fig. 7: the 25 highest scores at one needle, at
half depth of --score_length tokens. Fig. 8: the highest score of each of --score_trials needles at
random depths. For variants whose rows do not sum to 1 a score is no share, but the same sum.

Writes RUN/needle.json, RUN/needle.png (Fig. 6), needle_heads.png (Fig. 7) and needle_scores.png
(Fig. 8), the latter two for several runs once, in the folder that holds them. What was measured
before is not measured again.

The paper leaves open the haystack (here: validation tokens from a random place on, documents joined
by line breaks), the cities, the question, and what a length counts (here as in scripts.passkey).
"""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from data.loader import validation_tokens
from data.shards import read_meta
from data.tokenizer import get_tokenizer
from errors import UserError, command
from evaluation import attention_weights
from runtime.device import autocast
from scripts.common.retrieval import (
    ANSWER_TOKENS,
    ASK,
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

CITIES = (
    "Accra", "Amsterdam", "Ankara", "Athens", "Auckland", "Baghdad", "Bangkok", "Barcelona",
    "Beijing", "Berlin", "Boston", "Brussels", "Budapest", "Buenos Aires", "Cairo", "Cape Town",
    "Chicago", "Copenhagen", "Delhi", "Dublin", "Edinburgh", "Geneva", "Hanoi", "Havana",
    "Helsinki", "Istanbul", "Jakarta", "Kyoto", "Lagos", "Lima", "Lisbon", "London", "Madrid",
    "Melbourne", "Mexico City", "Milan", "Montreal", "Moscow", "Mumbai", "Nairobi", "New York",
    "Osaka", "Oslo", "Paris", "Prague", "Rome", "San Francisco", "Santiago", "Seoul", "Singapore",
    "Stockholm", "Sydney", "Tehran", "Tokyo", "Toronto", "Vancouver", "Vienna", "Warsaw",
)  # fmt: skip
NEEDLE = "\nThe special magic {city} number is:"  # and the span that is scored: " 8106422."
QUESTION = "What is the special magic {city} number?"
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
# Heads that Fig. 7 shows, and its city, number and depth.
HEADS = 25
FIXED = ("Tokyo", 8106422, 0.5)
# What an answer may be, and its mark in Fig. 8.
MARKERS = {"correct": "o", "first digit": "^", "wrong": "x"}


@dataclass(frozen=True)
class Needle:
    prompt: list[int]
    span: slice  # of the prompt: after the needle's colon, to its end
    city: str
    number: int
    depth: float  # share of the haystack before the needle


def texts(tokenizer, city: str, number: int) -> list[list[int]]:
    """The tokens of a needle up to its colon, of the rest, of a line's end, and of the question."""
    asked = ASK.format(question=QUESTION.format(city=city))
    return [tokenizer.encode(t) for t in (NEEDLE.format(city=city), f" {number}.", "\n", asked)]


def bare_length(tokenizer, city: str, number: int) -> int:
    """What a needle, its question and the answer take without a haystack."""
    return 1 + sum(map(len, texts(tokenizer, city, number))) + ANSWER_TOKENS


def shortest(tokenizer) -> int:
    """The length that holds the needle of any city."""
    return max(bare_length(tokenizer, city, 8888888) for city in CITIES)


class Haystack:
    """Needles in stretches of validation tokens."""

    def __init__(self, data_dir: str, tokenizer):
        # 100M tokens, one shard as data.fineweb makes them, are more than any test uses
        self.tokens = validation_tokens(data_dir, 10**8)
        self.data_dir, self.tokenizer = data_dir, tokenizer
        meta = read_meta(data_dir) or {"tokenizer": tokenizer.name}  # published shards have none
        if meta["tokenizer"] != tokenizer.name or self.tokens.max() >= tokenizer.n_vocab:
            raise UserError(
                f"{data_dir}: its tokens are not of the run's tokenizer, {tokenizer.name!r}"
            )

    def hide(self, city: str, number: int, depth: float, length: int, place: float) -> Needle:
        """A prompt of length - ANSWER_TOKENS tokens; place, in [0, 1), picks the haystack.

        Raises UserError where the length has no room for the needle or there is too little text.
        """
        eot = self.tokenizer.eot
        told, span, end, asked = texts(self.tokenizer, city, number)
        bare = bare_length(self.tokenizer, city, number)
        room = length - bare
        if room < 0:
            raise UserError(
                f"length {length} is too short, give --lengths and --score_length: without a "
                f"haystack the needle, its question and the answer take {bare} tokens "
                f"({self.tokenizer.name})"
            )
        if room > len(self.tokens):
            raise UserError(
                f"length {length} needs a haystack of {room} tokens, but {self.data_dir} has "
                f"{len(self.tokens)} validation tokens"
            )
        start = int(place * (len(self.tokens) - room + 1))
        hay = self.tokens[start : start + room].astype(np.int64)
        hay = np.where(hay == eot, end[0], hay).tolist()
        before = round(depth * room)
        prompt = [eot, *hay[:before], *told, *span, *end, *hay[before:], *asked]
        first = 1 + before + len(told)
        return Needle(prompt, slice(first, first + len(span)), city, number, depth)

    def draw(self, rng: random.Random, length: int, depth: float | None = None) -> Needle:
        """A random city, number and haystack, at this depth or a random one."""
        city, number = rng.choice(CITIES), rng.randint(10**6, 10**7 - 1)
        depth = rng.random() if depth is None else depth
        return self.hide(city, number, depth, length, rng.random())


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder, best of finetune_squad")
    parser.add_argument("--lengths", help="in tokens (default: 1x to 16x the training length)")
    parser.add_argument("--samples", type=int, default=1000, help="per length and depth")
    parser.add_argument("--score_length", type=int, default=8000, help="of the needle scores")
    parser.add_argument("--score_trials", type=int, default=100, help="needles to score")
    parser.add_argument("--data_dir", help="shards to take haystacks from (default: the run's own)")
    parser.add_argument("--seed", type=int, default=1337, help="of needles and haystacks")
    add_options(parser)
    arguments = parser.parse_args()
    check_at_least(1, arguments, "samples", "score_length", "score_trials")
    runs = [open_run(path, arguments) for path in arguments.runs]
    plans = [prepare(run, arguments) for run in runs]  # refuses what is wrong before all work
    scores = scores_name(arguments.score_length, arguments.score_trials)
    check_places(arguments.runs)
    for run, plan in zip(runs, plans, strict=True):
        measure(run, *plan, arguments)
        report(plan[-1], scores)
    folder, names = holding_folder(arguments.runs), run_names(arguments.runs)
    of_all_runs = [results.parts[scores] for *_, results in plans]
    plot_heads(names, of_all_runs, folder / "needle_heads.png")
    plot_scores(names, of_all_runs, folder / "needle_scores.png")


def prepare(run: Run, arguments) -> tuple[list[int], Haystack, Results]:
    """The lengths, where the haystacks come from, and the measurement."""
    lengths = parse_lengths(arguments.lengths, run.config)
    data_dir = arguments.data_dir or run.config.data_dir
    haystack = Haystack(data_dir, get_tokenizer(run.config.tokenizer))
    for length in (*lengths, arguments.score_length):
        haystack.hide(max(CITIES, key=len), 8888888, 0.5, length, 0.0)  # refused now, not in hours
    facts = {"data_dir": data_dir, "samples": arguments.samples, "sample_seed": arguments.seed}
    return lengths, haystack, Results(run.path / "needle.json", run.facts | facts)


def measure(run: Run, lengths: list[int], haystack: Haystack, results: Results, arguments) -> None:
    """Accuracy at every length and depth, and needle scores; what the results have is left out."""
    todo = [(n, d) for n in lengths for d in DEPTHS if cell(n, d) not in results.parts]
    scores = scores_name(arguments.score_length, arguments.score_trials)
    scored = scores in results.parts
    total = sum(length for length, _ in todo) * arguments.samples
    total += 0 if scored else arguments.score_length * (arguments.score_trials + 1)
    with tqdm(total=total, unit="tok", unit_scale=True, desc=str(run.path)) as bar:
        for length, depth in todo:
            bar.set_postfix(length=length, depth=depth)
            rng = random.Random(f"needle {arguments.seed} {length} {depth}")
            needles = (haystack.draw(rng, length, depth) for _ in range(arguments.samples))
            grades = []
            for batch in batches(needles, length):
                grades += [grade(*pair) for pair in zip(batch, ask(run, batch), strict=True)]
                bar.update(length * len(batch))
            shares = {name: grades.count(name) / len(grades) for name in MARKERS}
            results.add(cell(length, depth), {"length": length, "depth": depth} | shares)
        if not scored:
            results.add(scores, score(run, haystack, arguments, bar))


def cell(length: int, depth: float) -> str:
    return f"{length} tokens, depth {depth:.0%}"


def scores_name(length: int, trials: int) -> str:
    return f"scores of {trials} needles in {length} tokens"


def ask(run: Run, needles: list[Needle]) -> list[str]:
    """The model's answers, never ended: end-of-text is not taken."""
    eot = get_tokenizer(run.config.tokenizer).eot
    return answer(run, [needle.prompt for needle in needles], never=eot)


def grade(needle: Needle, text: str) -> str:
    """Which of MARKERS an answer is. It cannot end, so that only its first digits are judged."""
    number = str(needle.number)
    digits = first_number(text)[: len(number)]
    if digits == number:
        return "correct"
    return "first digit" if digits[:1] == number[0] else "wrong"


def needle_scores(run: Run, needles: list[Needle]) -> Tensor:
    """Attention from each prompt's last token to its needle's span, [B, layers, H]."""
    idx = torch.tensor([needle.prompt for needle in needles], device=run.device)
    # with the answer's room behind it, as in generation: a RoPE scaling and L see the same length
    last, idx = idx.shape[1] - 1, F.pad(idx, (0, ANSWER_TOKENS))
    inside = torch.zeros(idx.shape, device=run.device)
    for row, needle in zip(inside, needles, strict=True):
        row[needle.span] = 1

    def mass(A: Tensor) -> Tensor:  # [B, H, 1, L] -> [B, H, 1]
        return (A * inside[:, None, None]).sum(-1)

    with autocast(run.device, run.dtype):
        layers = attention_weights(run.model, idx, slice(last, last + 1), mass)
    return torch.cat(layers, dim=2).mT.cpu()


def score(run: Run, haystack: Haystack, arguments, bar) -> dict:
    """Needle scores: the best heads at one needle, the best head of each of many."""
    length = arguments.score_length
    bar.set_postfix(length=length, depth="random")
    rng = random.Random(f"needle scores {arguments.seed} {length}")
    fixed = haystack.hide(*FIXED, length, rng.random())
    scores = needle_scores(run, [fixed])[0]
    best = scores.flatten().topk(min(HEADS, scores.numel()))
    text = ask(run, [fixed])[0]
    result = {
        "length": length,
        "one needle": {
            "answer": text,
            "grade": grade(fixed, text),
            "heads": [
                {"layer": i // scores.shape[1], "head": i % scores.shape[1], "score": value}
                for value, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ],
        },
        "trials": [],
    }
    bar.update(length)
    needles = (haystack.draw(rng, length) for _ in range(arguments.score_trials))
    for batch in batches(needles, length):
        tops = needle_scores(run, batch).flatten(1).amax(-1).tolist()
        for needle, text, top in zip(batch, ask(run, batch), tops, strict=True):
            result["trials"].append(
                {
                    "city": needle.city,
                    "number": needle.number,
                    "depth": round(needle.depth, 4),
                    "answer": text,
                    "grade": grade(needle, text),
                    "top_score": top,
                }
            )
        bar.update(length * len(batch))
    return result


def report(results: Results, scores: str) -> None:
    """Print one run's accuracy by length and depth and its scores, and draw Fig. 6."""
    facts, parts = results.facts, results.parts
    lengths = sorted({part["length"] for part in parts.values() if "depth" in part})
    rows = [[parts.get(cell(n, d), {}).get("correct") for n in lengths] for d in DEPTHS]
    print(f"\n{facts['variant']}: needles found (%), RoPE scaling {facts['rope']}")
    print(f"{'length':>10}" + "".join(f"{length:>8}" for length in lengths))
    names = [f"{depth:.0%}" for depth in DEPTHS]
    for name, row in zip(names, rows, strict=True):
        cells = ["" if share is None else f"{100 * share:.1f}" for share in row]
        print(f"{name:>10}" + "".join(f"{text:>8}" for text in cells))
    tops = [trial["top_score"] for trial in parts[scores]["trials"]]
    print(f"{scores}: mean of each needle's highest {sum(tops) / len(tops):.4f}")
    title = f"{facts['variant']}, needles, RoPE scaling {facts['rope']}"
    heat_map(results.path.with_suffix(".png"), rows, lengths, names, title)


def plot_heads(names: list[str], runs: list[dict], path: Path) -> None:
    """Fig. 7: the highest needle scores of all heads at one needle."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, scores in zip(names, runs, strict=True):
        one = scores["one needle"]
        values = [head["score"] for head in one["heads"]]
        label = f"{name} ({one['grade']})"
        axes.plot(range(1, len(values) + 1), values, marker=".", label=label)
    axes.locator_params("x", integer=True)
    axes.set_xlabel("attention head, by needle score")
    axes.set_ylabel("needle score")
    length = f"{runs[0]['length']:,}"
    axes.set_title(f"one needle, {FIXED[2]:.0%} deep in {length} tokens", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    save_picture(figure, path)


def plot_scores(names: list[str], runs: list[dict], path: Path) -> None:
    """Fig. 8: the highest needle score of each trial, marked by what the model answered."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for i, (name, scores) in enumerate(zip(names, runs, strict=True)):
        trials = sorted(scores["trials"], key=lambda trial: -trial["top_score"])
        axes.plot([], [], color=f"C{i}", label=name)
        for answered, marker in MARKERS.items():
            ranks = [n for n, trial in enumerate(trials, 1) if trial["grade"] == answered]
            tops = [trials[n - 1]["top_score"] for n in ranks]
            axes.scatter(ranks, tops, s=18, color=f"C{i}", marker=marker)
    for answered, marker in MARKERS.items():
        axes.scatter([], [], color="0.3", marker=marker, label=answered)
    axes.locator_params("x", integer=True)
    axes.set_xlabel("trial, by top needle score")
    axes.set_ylabel("top needle score")
    length = f"{runs[0]['length']:,}"
    axes.set_title(f"needles at random depths of {length} tokens", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    save_picture(figure, path)


if __name__ == "__main__":
    main()
