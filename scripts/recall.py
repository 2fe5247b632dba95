"""Recall: whether a model finds an earlier value again, by length and by distance.

python -m scripts.recall RUN [RUN ...] --lengths 64,256,1024,4096

For runs with task = "recall", on the task that they were trained on (data/recall.py). Sequences are
the same for all runs, and none is a training sequence. Longer sequences ask for the same number of
keys, among more noise; with --proportional, only for mqar, the number of pairs grows with the
length. Longer sequences of sort have more symbols. An answer is right if it is the likeliest of all
token ids.

A run with less than 99% right answers at its training length has not learned the task: the table
says so instead of its accuracies at other lengths, unless --window, --p, --attention, --log_base,
--rope_factor or --rope_theta is set. The distance of an answer is the number of tokens from the
token that determines it. For sort a second line has the share of sequences whose answers are all
right.

Writes recall.json, recall.png by length and recall_by_distance.png at the longest length, without
distances of fewer than 30 answers. The dashed line in recall.png is chance: the accuracy of a model
that names the likeliest value in view without matching its key or, in sort, repeats its last
answer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from config import Config, PositiveInt
from data.recall import (
    EVALUATION,
    MQAR_KEYS,
    PAIRS,
    SHORTEST,
    Drawn,
    chance,
    draw,
    hash_sequences,
)
from errors import UserError
from scripts.common.command_line import option
from scripts.common.labels import title_of
from scripts.common.plots import Curve, draw_by_length
from scripts.common.runner import Results, as_command
from scripts.common.runs import Run, batches
from scripts.common.tables import print_table
from scripts.common.validation import (
    LengthEvaluation,
    accuracies,
    check_lengths,
    default_lengths,
)

PERCENT = "answers that are right (%)"
FEWEST = 30  # answers of a distance that is drawn
LEARNED_AT = 99  # percent, at the training length; below it, what a length costs says nothing


@dataclass(frozen=True, kw_only=True)
class Recall(LengthEvaluation):
    """Recall: whether a model finds an earlier value again, by length and by distance."""

    name = "recall"
    task = "recall"
    multiples = (1, 2, 4, 8, 16, 32, 64)

    answers: PositiveInt = option(512, "least number of answers at each length")
    proportional: bool = option(False, "mqar: ask pairs in proportion to the length")

    def pairs(self, config: Config, length: int) -> int:
        """How many keys a sequence of this length asks."""
        if self.proportional:
            return PAIRS * length // config.block_size
        return PAIRS

    def sequences(self, config: Config, length: int) -> int:
        """How many sequences have enough answers; at least 64, as answers within one are alike."""
        first = draw(config.recall, EVALUATION, 0, length, self.pairs(config, length))
        return max(64, math.ceil(self.answers / len(first.answers)))

    def align(self, configs: Sequence[Config]) -> Self:
        """All runs at the same lengths, which include the training lengths."""
        lengths = self.lengths
        if lengths is None:
            multiples = list(self.multiples)
            if self.proportional:
                multiples = [n for n in multiples if PAIRS * n <= MQAR_KEYS]
            lengths = default_lengths(configs, multiples)
        trained = {config.block_size for config in configs}
        return replace(self, lengths=tuple(sorted(trained.union(lengths))))

    def identify(self, config: Config) -> dict:
        lengths = self.lengths_of(config)
        check_lengths(config, lengths)
        if lengths[0] < SHORTEST:
            raise UserError(f"length {lengths[0]} must be at least {SHORTEST}")
        if self.proportional and config.recall != "mqar":
            raise UserError(f"--proportional is for mqar, but {config.out_dir} is {config.recall}")
        fewest = self.pairs(config, lengths[0])
        most = self.pairs(config, lengths[-1])
        if fewest < 1 or most > MQAR_KEYS:
            raise UserError(
                f"--proportional: each length must have 1 to {MQAR_KEYS} pairs, {PAIRS} in every "
                f"{config.block_size} tokens"
            )
        return {
            "answers": self.answers,
            "proportional": self.proportional,
            "recall": config.recall,
            "recall sequences": hash_sequences(config.recall),
        }

    def measure(self, run: Run, length: int) -> dict:
        pairs = self.pairs(run.config, length)
        run.model.document_start = None  # a sequence is one document
        sequences: list[Drawn] = []
        answers: list[NDArray[np.int64]] = []
        for indices in batches(range(self.sequences(run.config, length)), length):
            batch = [draw(run.config.recall, EVALUATION, index, length, pairs) for index in indices]
            sequences += batch
            answers += list(answer(run, batch))
        return judge(sequences, answers)

    def show(self, results: Results) -> dict[str, Figure]:
        """Print and draw the accuracy of runs that have learned, by length and by distance."""
        measurements = list(results.values())
        lengths = list(accuracies(measurements[0]))
        table = [["length", *map(str, lengths), ""]]
        by_length = []
        by_distance = []
        for name, result in results.items():
            table += self.table_rows(name, result)
            if self.is_shown(result):
                by_length.append(Curve(name, lengths, list(accuracies(result).values())))
                by_distance.append(distance_curve(name, result, lengths[-1]))
        tasks = dict.fromkeys(result["recall"] for result in measurements)
        title = ", ".join([*tasks, title_of(results)])
        print(f"\n{title}: {PERCENT}")
        print_table(table)
        if not by_length:
            return {}
        by_length += chance_curves(results)
        x = f"distance at length {lengths[-1]:,}, rounded up to a power of 2,"
        return {
            "recall": draw_by_length(measurements, title, by_length, "length", PERCENT),
            "recall_by_distance": draw_by_length(measurements, title, by_distance, x, PERCENT),
        }

    def is_changed(self) -> bool:
        """Whether an option may lower a run's accuracy at its training length too."""
        opened = (
            self.window,
            self.p,
            self.attention,
            self.rope_factor,
            self.rope_theta,
            self.log_base,
        )
        return any(opened)

    def is_shown(self, result: dict) -> bool:
        """Whether a run has learned its task, or is opened in another way than it was trained."""
        return has_learned(result) or self.is_changed()

    def summarise(self, parts: dict[str, dict]) -> dict:
        return {"changed": self.is_changed()}

    def table_rows(self, name: str, result: dict) -> list[list[str]]:
        """A run's accuracy at each length and, for sort, the authors' measure: whole sequences."""
        shown = self.is_shown(result)
        cells = []
        for length, accuracy in accuracies(result).items():
            if shown or length == result["trained_length"]:
                cells.append(f"{accuracy:.1f}")
            else:
                cells.append("–")
        if not shown:
            return [[name, *cells, f"not learned in {result['step']:,} steps"]]
        rows = [[name, *cells, ""]]
        if result["recall"] == "sort":
            parts = result["parts"]
            exact = [f"{100 * parts[str(length)]['exact']:.1f}" for length in accuracies(result)]
            rows.append(["  all answers of a sequence", *exact, ""])
        return rows


@torch.no_grad()
def answer(run: Run, sequences: Sequence[Drawn]) -> NDArray[np.int64]:
    """The likeliest token at each place of an answer: [sequences, answers]."""
    tokens = torch.from_numpy(np.stack([drawn.tokens for drawn in sequences])).to(run.device)
    places = torch.from_numpy(np.stack([drawn.places for drawn in sequences])).to(run.device)
    with run.autocast():
        hidden = run.model.hidden(tokens + run.config.text_ids)  # [B, L, n_embd]
    logits = run.model.logits(hidden.take_along_dim(places[..., None], 1).float())
    return logits.argmax(-1).cpu().numpy() - run.config.text_ids


def judge(sequences: Sequence[Drawn], answers: Sequence[NDArray[np.int64]]) -> dict:
    """The results of one length, also by distance: up to 1, 2, 4, 8 .. tokens."""
    expected = np.stack([drawn.answers for drawn in sequences])
    right = expected == np.stack(answers)
    distances = np.stack([drawn.places - drawn.sources for drawn in sequences])
    limits = 2 ** np.ceil(np.log2(distances)).astype(int)
    by_distance = {}
    for limit in np.unique(limits):
        here = right[limits == limit]
        by_distance[str(limit)] = {"answers": here.size, "accuracy": float(here.mean())}
    return {
        "accuracy": float(right.mean()),
        "exact": float(right.all(1).mean()),
        "answers": right.size,
        "distances": by_distance,
    }


# ---- the table and the pictures ----


def chance_label(task: str) -> str:
    """What a model does that is right as often as `chance` says."""
    if task == "sort":
        return "repeating the last answer"
    return "a value in view, without matching its key"


def chances(result: dict, lengths: Sequence[int]) -> list[float]:
    """The level of chance in a run's task at these lengths, in percent."""
    percent = []
    for length in lengths:
        pairs = PAIRS
        if result["proportional"]:
            pairs = PAIRS * length // result["trained_length"]
        percent.append(100 * chance(result["recall"], length, pairs))
    return percent


def chance_curves(results: Results) -> list[Curve]:
    """The level of chance by length as a reference line, for each task of these runs."""
    results_of_tasks = {result["recall"]: result for result in results.values()}
    curves = []
    for task, result in results_of_tasks.items():
        label = f"chance: {chance_label(task)}"
        if len(results_of_tasks) > 1:
            label = f"{task}, {label}"
        lengths = list(accuracies(result))
        curves.append(Curve(label, lengths, chances(result, lengths), style="reference"))
    return curves


def has_learned(result: dict) -> bool:
    """Whether the accuracy at the training length is high enough to ask what a length costs."""
    return accuracies(result)[result["trained_length"]] >= LEARNED_AT


def distance_curve(name: str, result: dict, length: int) -> Curve:
    """The accuracy by distance at a length, without distances of too few answers."""
    distances = []
    shares = []
    for distance, judged in result["parts"][str(length)]["distances"].items():
        if judged["answers"] >= FEWEST:
            distances.append(int(distance))
            shares.append(100 * judged["accuracy"])
    return Curve(name, distances, shares)


main = as_command(Recall)

if __name__ == "__main__":
    main()
