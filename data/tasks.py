"""The batches of each task: what train.py needs to know of the data that it trains on."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from config import Config
from data.loader import Batches, Batching, Loader, TokenLoader
from data.orbits import OrbitLoader
from data.recall import RecallLoader
from data.shards import check_tokenizer


def open_loader(config: Config, rank: int, world_size: int, device: torch.device) -> Loader | None:
    """The batches of one rank; None in a dry run before the data are made.

    Raises UserError where the data do not fit the settings.
    """
    if config.dry_run and "language" in config.tasks and not Path(config.data_dir).exists():
        return None
    sequences = config.total_batch_size // config.block_size
    batching = Batching(config.block_size, sequences, config.seed, rank, world_size, device)
    return LOADERS[config.task](config, batching)


def open_text(config: Config, batching: Batching) -> TokenLoader:
    check_tokenizer(config.data_dir, config.tokenizer)
    return TokenLoader(config.data_dir, batching, config.text_ids)


def open_recall(config: Config, batching: Batching) -> RecallLoader:
    return RecallLoader(config.recall, batching, config.text_ids)


class AlternatingLoader(Loader):
    """Text in even steps, recall in odd steps; validation is of text alone.

    Step 2 n is step n of text, step 2 n + 1 is step n of recall. An epoch has each window of text
    once, and as many sequences of recall.
    """

    def __init__(self, text: TokenLoader, recall: RecallLoader) -> None:
        self.text, self.recall = text, recall
        self.source = f"{text.source} and {recall.source} in turn"
        self.tokens, self.val_tokens = 2 * text.tokens, text.val_tokens
        super().__init__(2 * text.n_windows, text.batching)

    def validation_batches(self, max_tokens: int, batch_size: int) -> Batches:
        return self.text.validation_batches(max_tokens, batch_size)

    def _read(self, step: int) -> tuple[Tensor, Tensor]:
        return (self.recall if step % 2 else self.text)._read(step // 2)


# One entry for each value of the setting `task`.
LOADERS: dict[str, Callable[[Config, Batching], Loader]] = {
    "language": open_text,
    "orbits": lambda c, batching: OrbitLoader(c.systems, c.planets, c.bins, batching),
    "recall": open_recall,
    "language+recall": lambda c, b: AlternatingLoader(open_text(c, b), open_recall(c, b)),
}
