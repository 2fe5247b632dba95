"""Recall: whether a model finds an earlier value again, by length and by distance.

python -m scripts.recall RUN [RUN ...] --lengths 64,256,1024,4096

For runs with task = "recall", on their own task (data/recall.py). Sequences are the same for all
runs, and none is a training sequence. As many keys are asked at every length, among more noise;
with --proportional, which is for mqar, the pairs grow with the length, and sort has more symbols.
An answer is right if it is the likeliest of all token ids. A run with less than 99% right answers
at its training length has not learned the task: the table says so in place of its accuracies at
other lengths, unless --window, --p, --attention, --rope_factor or --rope_theta is given.
The distance of an answer is the number of tokens from the token that determines it. For sort a
second line has the share of sequences whose answers are all right.

Writes RUN/recall.json, recall.png by length and recall_by_distance.png at the longest length,
without distances of fewer than 30 answers; for several runs recall_RUN_RUN.png and
recall_by_distance_RUN_RUN.png in the folder that contains them (or --out). Nothing is measured
twice.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

# for a script that is run as a file: the repository's modules are not beside it
sys.path.insert(0, str(Path(__file__).parents[1]))

from config import Config
from data.recall import EVALUATION, MQAR_KEYS, PAIRS, SHORTEST, Drawn, draw
from errors import UserError
from scripts.common.labels import title_of
from scripts.common.options import option
from scripts.common.plots import Curve, draw_by_length
from scripts.common.runner import Evaluation, Results, Run, as_command, batches
from scripts.common.tables import print_table
from scripts.common.validation import LengthOptions, accuracies, check_lengths, default_lengths

PERCENT = "answers that are right (%)"
FEWEST = 30  # answers of a distance that is drawn
LEARNED = 99  # percent, at the training length; below it, what a length costs says nothing


@dataclass(frozen=True, kw_only=True)
class RecallOptions(LengthOptions):
    """Recall: whether a model finds an earlier value again, by length and by distance."""

    task = "recall"
    multiples = (1, 2, 4, 8, 16, 32, 64)

    answers: int = option(512, "at least so many per length", at_least=1)
    proportional: bool = option(False, "mqar: pairs in proportion to the length")

    def pairs(self, config: Config, length: int) -> int:
        """How many keys a sequence of this length asks."""
        return PAIRS * length // config.block_size if self.proportional else PAIRS

    def sequences(self, config: Config, length: int) -> int:
        """How many sequences have enough answers; at least 64, as answers of one are alike."""
        one = draw(config.recall, EVALUATION, 0, length, self.pairs(config, length))
        return max(64, -(-self.answers // len(one.answers)))


def align(options: RecallOptions, configs: Sequence[Config]) -> RecallOptions:
    """All runs at the same lengths, which include the training lengths."""
    multiples = [m for m in options.multiples if not options.proportional or PAIRS * m <= MQAR_KEYS]
    lengths = options.lengths or default_lengths(configs, multiples)
    trained = {config.block_size for config in configs}
    return replace(options, lengths=tuple(sorted(trained.union(lengths))))


def identify(options: RecallOptions, config: Config) -> dict:
    lengths = options.lengths_of(config)
    check_lengths(config, lengths)
    if lengths[0] < SHORTEST:
        raise UserError(f"length {lengths[0]} must be at least {SHORTEST}")
    if options.proportional and config.recall != "mqar":
        raise UserError(f"--proportional is for mqar, but {config.out_dir} is {config.recall}")
    fewest, most = options.pairs(config, lengths[0]), options.pairs(config, lengths[-1])
    if not 0 < fewest <= most <= MQAR_KEYS:
        each = f"{PAIRS} in every {config.block_size} tokens"
        raise UserError(f"--proportional: each length must have 1 to {MQAR_KEYS} pairs, {each}")
    return {
        "answers": options.answers,
        "proportional": options.proportional,
        "recall": config.recall,
    }


def chunks(options: RecallOptions, config: Config) -> dict[str, int]:
    """The lengths."""
    return {str(length): length for length in options.lengths_of(config)}


def measure(options: RecallOptions, run: Run, length: int) -> dict:
    task = run.config.recall
    pairs, drawn, found = options.pairs(run.config, length), [], []
    for batch in batches(range(options.sequences(run.config, length)), length):
        drawn += (these := [draw(task, EVALUATION, i, length, pairs) for i in batch])
        found += list(answer(run, these))
    return judge(drawn, found)


@torch.no_grad()
def answer(run: Run, drawn: Sequence[Drawn]) -> NDArray[np.int64]:
    """The likeliest token at each place of an answer: [sequences, answers]."""
    pairs = zip(*((one.tokens, one.places) for one in drawn), strict=True)
    tokens, places = (torch.from_numpy(np.stack(one)).to(run.device) for one in pairs)
    with run.autocast():
        hidden = run.model.hidden(tokens + run.config.text_ids)  # [B, L, n_embd]
    logits = run.model.logits(hidden.take_along_dim(places[..., None], 1).float())
    return logits.argmax(-1).cpu().numpy() - run.config.text_ids


def judge(drawn: Sequence[Drawn], found: Sequence[NDArray[np.int64]]) -> dict:
    """The results of one length, also by distance: up to 1, 2, 4, 8 .. tokens."""
    right = np.stack([d.answers == f for d, f in zip(drawn, found, strict=True)])
    limits = 2 ** np.ceil(np.log2([d.places - d.sources for d in drawn])).astype(int)
    distances = {}
    for limit in np.unique(limits):
        here = right[limits == limit]
        distances[str(limit)] = {"answers": here.size, "accuracy": float(here.mean())}
    shares = {"accuracy": float(right.mean()), "exact": float(right.all(1).mean())}
    return shares | {"answers": right.size, "distances": distances}


def learned(result: dict) -> bool:
    """Whether the accuracy at the training length is high enough to ask what a length costs."""
    return accuracies(result)[result["trained_length"]] >= LEARNED


def show(e: RecallOptions, results: Results) -> dict[str, Figure]:
    """Print and draw the accuracy of runs that have learned, by length and by distance."""
    measurements = list(results.values())
    tasks = dict.fromkeys(result["recall"] for result in measurements)
    title = ", ".join(filter(None, [*tasks, title_of(measurements)]))
    lengths, by_length, by_distance = list(accuracies(measurements[0])), [], []
    table = [["length", *map(str, lengths), ""]]
    for name, result in results.items():
        shares, trained = accuracies(result), result["trained_length"]
        known = learned(result) or any((e.window, e.p, e.attention, e.rope_factor, e.rope_theta))
        cells = [f"{y:.1f}" if known or n == trained else "–" for n, y in shares.items()]
        note = "" if known else f"not learned in {result['step']:,} steps"
        if known:
            by_length.append(Curve(name, lengths, [*shares.values()]))
            at = result["parts"][str(lengths[-1])]["distances"].items()
            far = {int(n): 100 * d["accuracy"] for n, d in at if d["answers"] >= FEWEST}
            by_distance.append(Curve(name, list(far), list(far.values())))
        table.append([name, *cells, note])
        if result["recall"] == "sort" and not note:  # the authors' measure
            exact = [f"{100 * result['parts'][str(n)]['exact']:.1f}" for n in lengths]
            table.append(["  all answers of a sequence", *exact, ""])
    print(f"\n{title}: {PERCENT}")
    print_table(table)
    if not by_length:
        return {}
    x = f"distance at length {lengths[-1]:,}, up to,"
    return {
        "recall": draw_by_length(measurements, title, by_length, "length", PERCENT),
        "recall_by_distance": draw_by_length(measurements, title, by_distance, x, PERCENT),
    }


RECALL = Evaluation(
    name="recall",
    options=RecallOptions,
    identify=identify,
    chunks=chunks,
    measure=measure,
    show=show,
    align=align,
)
main = as_command(RECALL)

if __name__ == "__main__":
    main()
