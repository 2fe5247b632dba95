"""The batches of each task: what train.py needs to know of the data that it trains on."""

from collections.abc import Callable

import torch

from config import Config
from data.loader import Batching, Loader, TokenLoader
from data.shards import check_tokenizer
from tasks.orbits import OrbitLoader
from tasks.recall import RecallLoader


def open_loader(config: Config, rank: int, world_size: int, device: torch.device) -> Loader:
    """The batches of one rank. Raises UserError where the data do not fit the settings."""
    sequences = config.total_batch_size // config.block_size
    batching = Batching(config.block_size, sequences, config.seed, rank, world_size, device)
    return LOADERS[config.task](config, batching)


def open_language(config: Config, batching: Batching) -> TokenLoader:
    """Batches of the shards in `data_dir`."""
    check_tokenizer(config.data_dir, config.tokenizer)
    return TokenLoader(config.data_dir, batching, config.n_vocab)


def open_orbits(config: Config, batching: Batching) -> OrbitLoader:
    """Batches of simulated planets."""
    return OrbitLoader(config.systems, config.planets, config.bins, batching)


def open_recall(config: Config, batching: Batching) -> RecallLoader:
    """Batches of a recall task."""
    return RecallLoader(config.recall, batching)


# One entry for each value of the setting `task`.
LOADERS: dict[str, Callable[[Config, Batching], Loader]] = {
    "language": open_language,
    "orbits": open_orbits,
    "recall": open_recall,
}
