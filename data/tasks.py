"""What a run trains on: each task's batches, and what they ask of the model.

A new task is a loader and an identity in a file of its own, an entry of TASKS, and a value of the
setting `task`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from config import Config
from data import orbits, recall, shards
from data.aligned import AlignedLoader
from data.loader import Batch, Batching, Ints, Loader, TokenLoader
from data.orbits import OrbitLoader
from data.recall import RecallLoader
from data.shards import Identity, check_tokenizer
from data.vocabulary import count_ids
from errors import UserError


@dataclass(frozen=True)
class Task:
    """How the batches of a task are opened, and their form."""

    open: Callable[[Config, Batching], Loader]
    identity: Callable[[Config], Identity]  # what identifies the data, wherever they lie
    reads_shards: bool = False  # from data_dir; otherwise sequences are made as they are needed
    varied_lengths: bool = False  # batches are shorter than block_size in some steps


def open_loader(config: Config, rank: int, world_size: int, device: torch.device) -> Loader | None:
    """Open the batches of one rank; returns None in a dry run before the shards are made.

    Raises UserError if the data do not fit the settings.
    """
    task = TASKS[config.task]
    if task.reads_shards:
        check_vocabulary(config)
    if config.dry_run and task.reads_shards and not Path(config.data_dir).exists():
        return None
    batching = Batching(
        block_size=config.block_size,
        sequences_per_step=config.total_batch_size // config.block_size,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
        device=device,
    )
    return task.open(config, batching)


def identity_of(config: Config) -> Identity:
    """Return what identifies the data of a config: a run cannot be resumed with other data.

    Raises UserError if it has no shards, and needs them.
    """
    return TASKS[config.task].identity(config)


def check_vocabulary(config: Config) -> None:
    """Raise UserError if the tokenizer has ids that the model does not have, as in prompts."""
    ids = count_ids(config.tokenizer)
    if config.text_ids < ids:
        raise UserError(
            f"vocab_size = {config.text_ids} is less than the {ids} ids of tokenizer = "
            f"{config.tokenizer!r}; ids of your own need a tokenizer.json: docs/data.md"
        )


def open_text(config: Config, batching: Batching) -> TokenLoader:
    check_tokenizer(config.data_dir, config.tokenizer)
    arguments = (config.data_dir, batching, config.text_ids)
    loader: TokenLoader
    if config.align_documents:
        loader = AlignedLoader(*arguments, config.end_of_text)
    else:
        loader = TokenLoader(*arguments)
    if config.document_mask:
        loader.documents_per_sequence = loader.count_documents(config.end_of_text)
    return loader


def identity_of_text(config: Config) -> Identity:
    return shards.identity_of(config.data_dir)


def open_orbits(config: Config, batching: Batching) -> OrbitLoader:
    return OrbitLoader(config.systems, config.planets, config.bins, batching)


def identity_of_orbits(config: Config) -> Identity:
    return orbits.identity_of(config.systems, config.planets, config.bins)


def open_recall(config: Config, batching: Batching) -> RecallLoader:
    return RecallLoader(config.recall, batching, first_id=config.text_ids)


def identity_of_recall(config: Config) -> Identity:
    return recall.identity_of(config.recall, first_id=config.text_ids)


def open_text_and_recall(config: Config, batching: Batching) -> "AlternatingLoader":
    return AlternatingLoader(open_text(config, batching), open_recall(config, batching))


def identity_of_text_and_recall(config: Config) -> Identity:
    return identity_of_text(config) | identity_of_recall(config)


class AlternatingLoader(Loader):
    """Text in even steps, recall in odd steps; validation is on text alone.

    Step 2 n is step n of text, and step 2 n + 1 is step n of recall. An epoch visits each sequence
    of text once, and as many sequences of recall.
    """

    def __init__(self, text: TokenLoader, recall: RecallLoader) -> None:
        self.text = text
        self.recall = recall
        self.source = f"{text.source} and {recall.source} in turn"
        self.tokens = 2 * text.tokens
        self.val_tokens = text.val_tokens
        self.documents_per_sequence = text.documents_per_sequence
        self.cropped = text.cropped
        super().__init__(2 * text.n_sequences, text.batching)

    def open_validation(self, max_tokens: int) -> Callable[[Ints], Batch]:
        return self.text.open_validation(max_tokens)

    def read(self, step: int) -> Batch:
        loader = self.recall if step % 2 else self.text
        return loader.read(step // 2)


# One entry for each value of the setting `task`.
TASKS = {
    "language": Task(open_text, identity_of_text, reads_shards=True),
    "orbits": Task(open_orbits, identity_of_orbits),
    "recall": Task(open_recall, identity_of_recall, varied_lengths=True),
    "language+recall": Task(
        open_text_and_recall,
        identity_of_text_and_recall,
        reads_shards=True,
        varied_lengths=True,
    ),
}
