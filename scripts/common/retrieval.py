"""Shared by passkey and needle retrieval: answers to prompts, shares found by length and depth."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

from config import Config
from data.tokenizer import get_tokenizer
from errors import UserError
from generation import generate
from scripts.common.command_line import option
from scripts.common.labels import title_of
from scripts.common.runs import Run, batches
from scripts.common.tables import print_table
from scripts.common.validation import LengthEvaluation, accuracies, check_lengths

# Tokens reserved for the answer within every length; a 7-digit number takes at most 8.
ANSWER_TOKENS = 16
# A question after its context, as in fine-tuning on SQuAD; a space and the answer follow.
ASK = "\nQuestion: {question}\nAnswer:"


@dataclass(frozen=True)
class Trial:
    """A prompt, and the number that it asks for."""

    prompt: list[int]
    number: int
    depth: float  # share of the other text before the number


AnyTrial = TypeVar("AnyTrial", bound=Trial)


@dataclass(frozen=True, kw_only=True)
class RetrievalEvaluation(LengthEvaluation):
    """An evaluation that hides numbers in long texts and asks for them at the end."""

    shortest: ClassVar[int]  # a length that fits a prompt and its answer

    seed: int = option(1337, "seed of the numbers, their texts and their depths")

    def lengths_of(self, *configs: Config) -> tuple[int, ...]:
        """The lengths; by default, multiples of the training length.

        If the training length is too short for a prompt, they are multiples of its first multiple
        that is long enough.
        """
        lengths = super().lengths_of(*configs)
        if self.lengths is not None:
            return lengths
        factor = math.ceil(self.shortest / min(lengths))
        return tuple(factor * length for length in lengths)

    def check_prompts(self, config: Config, lengths: Sequence[int]) -> None:
        """Raise UserError if a length is too long for the model or too short for a prompt.

        Also raised for a model that cannot read the prompts: without an end-of-text token, as
        nanoGPT's character-level models are, or with a tokenizer that has no ids for English text.
        """
        shortest = self.shortest
        if config.longest is not None and config.longest < shortest:
            raise UserError(
                f"{config.out_dir}: a prompt and its answer take up to {shortest} tokens, but the "
                f"model's learned positions end at {config.longest}"
            )
        check_lengths(config, lengths)
        get_tokenizer(config.tokenizer).encode(ASK)
        if config.end_of_text >= config.text_ids:
            raise UserError(
                f"{config.out_dir} has no end-of-text, with which every prompt begins: vocab_size "
                f"= {config.vocab_size} leaves it out"
            )
        if min(lengths) < shortest:
            raise UserError(
                f"length {min(lengths)} is too short: a prompt and its answer take up to "
                f"{shortest} tokens; --lengths {shortest},{2 * shortest},{4 * shortest} are long "
                "enough"
            )


def print_accuracies(name: str, measurement: dict, hidden: str) -> None:
    """Print which share a run found at each length of what was hidden, "needles"."""
    shares = accuracies(measurement)
    print(f"\n{name}: {hidden} found (%), {title_of({name: measurement})}")
    lengths = [str(length) for length in shares]
    print_table([["length", *lengths], ["found", *[f"{share:.1f}" for share in shares.values()]]])


def answered(
    run: Run, trials: Iterable[AnyTrial], length: int, never: int | None = None
) -> Iterator[tuple[AnyTrial, str]]:
    """Trials of one length, each with the greedy answer to its prompt.

    An answer is cut at its first end-of-text; the token `never` is excluded.
    """
    tokenizer = get_tokenizer(run.config.tokenizer)
    for batch in batches(trials, length):
        idx = torch.tensor([trial.prompt for trial in batch], device=run.device)
        with run.autocast():
            out = generate(run.model, idx, ANSWER_TOKENS, temperature=0, never=never)
        answers = out[:, idx.shape[1] :].tolist()
        for trial, answer in zip(batch, answers, strict=True):
            before_end = itertools.takewhile(lambda token: token != tokenizer.eot, answer)
            yield trial, tokenizer.decode(list(before_end))


def first_number(text: str) -> str:
    """The first run of digits, or ''."""
    match = re.search("[0-9]+", text)
    return match.group() if match else ""
