"""What the tests of retrieval share: their lengths, answers to long prompts, and pictures."""

import argparse
import math
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from matplotlib.figure import Figure

from data.tokenizer import get_tokenizer
from errors import UserError
from runtime.device import autocast
from scripts.common.runs import Run, save_picture

# Room for an answer at the end of every length, in tokens; a number of 7 digits takes at most 8.
ANSWER_TOKENS = 16
# How a model fine-tuned on SQuAD is asked, after the context; a space and the answer follow.
ASK = "\nQuestion: {question}\nAnswer:"
# Tokens of a batch, unless one prompt is longer.
BATCH_TOKENS = 16384


def check_at_least(least: int, arguments: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(arguments, name) < least:
            raise UserError(f"--{name} {getattr(arguments, name)} must be at least {least}")


def batches(items: Iterable, length: int) -> Iterator[list]:
    """Trials of a length, as many at a time as BATCH_TOKENS lets, made when their turn comes."""
    items = iter(items)
    while batch := list(islice(items, max(1, BATCH_TOKENS // length))):
        yield batch


def answer(run: Run, prompts: list[list[int]], never: int | None = None) -> list[str]:
    """Greedy answers to prompts of equal length, each up to end-of-text, if that comes."""
    tokenizer = get_tokenizer(run.config.tokenizer)
    idx = torch.tensor(prompts, device=run.device)
    with autocast(run.device, run.dtype):
        out = run.model.generate(idx, ANSWER_TOKENS, temperature=0, never=never)
    rows = [row + [tokenizer.eot] for row in out[:, idx.shape[1] :].tolist()]
    return [tokenizer.decode(row[: row.index(tokenizer.eot)]) for row in rows]


def first_number(text: str) -> str:
    """The first run of digits; '' if there is none."""
    found = re.search("[0-9]+", text)
    return found[0] if found else ""


def heat_map(path: Path, shares: list[list[float | None]], lengths, depths, title: str) -> None:
    """Draw shares [depths][lengths] of 0 to 1, None where nothing was measured."""
    figure = Figure(figsize=(max(4.8, 2.4 + 0.8 * len(lengths)), 1.6 + 0.32 * len(depths)))
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    values = [[math.nan if share is None else 100 * share for share in row] for row in shares]
    axes.set_facecolor("0.85")
    image = axes.imshow(values, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if not math.isnan(value):
                colour = "black" if value > 60 else "white"
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", color=colour)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), depths)
    axes.set_xlabel("length in tokens")
    axes.set_ylabel("depth")
    axes.set_title(title, fontsize="medium")
    figure.colorbar(image, label="correct (%)")
    save_picture(figure, path)
