"""Shared by passkey and needle retrieval: prompts in batches, answers, accuracy by depth."""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import torch
from tqdm import tqdm

from data.tokenizer import get_tokenizer
from generation import generate
from runtime.device import autocast
from scripts.common.runner import BATCH_TOKENS, Run
from scripts.common.tables import print_table

# Tokens reserved for the answer within every length; a 7-digit number takes at most 8.
ANSWER_TOKENS = 16
# A question after its context, as in fine-tuning on SQuAD; a space and the answer follow.
ASK = "\nQuestion: {question}\nAnswer:"

T = TypeVar("T")


def batches(trials: Iterable[T], length: int, bar: tqdm) -> Iterator[list[T]]:
    """Trials of one length in batches of up to BATCH_TOKENS tokens, drawn lazily."""
    trials = iter(trials)
    while batch := list(islice(trials, max(1, BATCH_TOKENS // length))):
        yield batch
        bar.update(length * len(batch))


def answer(run: Run, prompts: list[list[int]], never: int | None = None) -> list[str]:
    """Greedy answers to prompts of equal length, each cut at its first end-of-text."""
    tokenizer = get_tokenizer(run.config.tokenizer)
    idx = torch.tensor(prompts, device=run.device)
    with autocast(run.device, run.dtype):
        out = generate(run.model, idx, ANSWER_TOKENS, temperature=0, never=never)
    answers = [ids + [tokenizer.eot] for ids in out[:, idx.shape[1] :].tolist()]
    return [tokenizer.decode(ids[: ids.index(tokenizer.eot)]) for ids in answers]


def first_number(text: str) -> str:
    """The first run of digits, or ''."""
    found = re.search("[0-9]+", text)
    return found[0] if found else ""


def print_found(result: dict, what: str, found: dict[int, float]) -> None:
    """Print the shares found at each length, in percent."""
    print(f"\n{result['variant']}: {what} found (%), RoPE scaling {result['rope']}")
    shares = (f"{100 * share:.1f}" for share in found.values())
    print_table([["length", *map(str, found)], ["found", *shares]])
