"""What a run trains on: each task's batches, and what identifies its data.

A new task is a loader and a fingerprint in a file of its own, a branch in `open_loader` and in
`fingerprint_of`, and a value of the setting `task`.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from config import Config
from data import orbits, recall, shards
from data.aligned import AlignedLoader
from data.loader import Batch, Batching, Ints, Loader, TokenLoader
from data.orbits import OrbitLoader
from data.recall import RecallLoader
from data.shards import Fingerprint, check_tokenizer
from data.vocabulary import count_ids
from errors import UserError


def open_loader(config: Config, rank: int, world_size: int, device: torch.device) -> Loader | None:
    """Open the batches of one rank; returns None in a dry run before the shards are made.

    Raises UserError if the data do not fit the settings.
    """
    if "language" in config.tasks:
        check_vocabulary(config)
        if config.dry_run and not Path(config.data_dir).exists():
            return None
    batching = Batching(
        block_size=config.block_size,
        sequences_per_step=config.total_batch_size // config.block_size,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
        device=device,
    )
    if config.task == "orbits":
        return OrbitLoader(config.systems, config.planets, config.bins, batching)
    if config.task == "language":
        return open_text(config, batching)
    recall_loader = RecallLoader(config.recall, batching, first_id=config.text_ids)
    if config.task == "recall":
        return recall_loader
    return AlternatingLoader(open_text(config, batching), recall_loader)


def fingerprint_of(config: Config) -> Fingerprint:
    """Return what identifies the data of a config: a run cannot be resumed with other data.

    Raises UserError if it has no shards, and needs them.
    """
    if config.task == "orbits":
        return orbits.fingerprint_of(config.systems, config.planets, config.bins)
    fingerprint: Fingerprint = {}
    if "language" in config.tasks:
        fingerprint |= shards.fingerprint_of(config.data_dir)
    if "recall" in config.tasks:
        fingerprint |= recall.fingerprint_of(config.recall, first_id=config.text_ids)
    return fingerprint


def check_vocabulary(config: Config) -> None:
    """Raise UserError if the tokenizer has ids that the model lacks: a prompt may contain them."""
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
        loader.documents = loader.measure_documents(config.end_of_text)
    return loader


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
        self.documents = text.documents
        self.cropped = text.cropped
        super().__init__(2 * text.n_sequences, text.batching)

    def open_validation(self, max_tokens: int) -> Callable[[Ints], Batch]:
        return self.text.open_validation(max_tokens)

    def read(self, step: int) -> Batch:
        loader = self.recall if step % 2 else self.text
        return loader.read(step // 2)
