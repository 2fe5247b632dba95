"""The lengths at which runs are evaluated, and the validation tokens that are measured there."""

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from config import Config
from data.loader import validation_tokens
from data.shards import check_tokenizer, list_shards
from errors import UserError
from runtime.files import sha256_of
from scripts.common.runner import Evaluation, option


@dataclass(frozen=True, kw_only=True)
class AtLengths(Evaluation):
    """An evaluation at several lengths; the default is multiples of the training length."""

    multiples: ClassVar[tuple[float, ...]] = (1, 2, 4, 8, 16)

    lengths: tuple[int, ...] | None = option(
        None, "in tokens, such as 1024,2048 (default: multiples of the training length)"
    )

    def lengths_of(self, config: Config) -> tuple[int, ...]:
        default = default_lengths([config], self.multiples)
        return default if self.lengths is None else self.lengths


def default_lengths(configs: Sequence[Config], multiples: Sequence[float]) -> tuple[int, ...]:
    """These multiples of the training lengths, up to the end of any run's learned positions."""
    ends = [config.block_size for config in configs if config.positions == "learned"]
    lengths = {int(multiple * config.block_size) for config in configs for multiple in multiples}
    return tuple(sorted(n for n in lengths if n <= min(ends, default=n)))


def check_lengths(config: Config, lengths: Iterable[int]) -> None:
    """Raise UserError where a length is beyond the learned positions of a run with this config."""
    longest = max(lengths)
    if config.positions == "learned" and longest > config.block_size:
        raise UserError(
            f"{config.out_dir}: a length of {longest} is beyond its learned positions, which end "
            f"at block_size = {config.block_size}"
        )


def data_facts(data_dir: str, lengths: Sequence[int], wanted: int, config: Config) -> dict:
    """The validation tokens of a measurement, as facts: the same for all of its lengths.

    They are the most tokens, up to `wanted`, that fill whole windows of every length.
    """
    check_lengths(config, lengths)
    available = len(checked_tokens(data_dir, wanted, config)) - 1
    unit = math.lcm(*lengths)
    if available < unit:
        raise UserError(
            f"{data_dir}: {available} validation tokens, but lengths {list(lengths)} need a "
            f"multiple of {unit} to predict the same tokens in whole windows"
        )
    tokens = available // unit * unit
    return {"data_dir": data_dir, "val_sha256": validation_id(data_dir), "tokens": tokens}


@functools.lru_cache(1)  # an evaluation asks several times
def checked_tokens(data_dir: str, wanted: int, config: Config) -> NDArray[np.uint16]:
    """The first `wanted` validation tokens and a last target, if they are tokens of the run."""
    check_tokenizer(data_dir, config.tokenizer)
    return validation_tokens(data_dir, wanted, config.text_ids)


@functools.cache
def validation_id(data_dir: str) -> str:
    """Hash of the validation shards, so that other data in the same folder is measured anew."""
    shards = list_shards(data_dir, "val")
    return hashlib.sha256("".join(map(sha256_of, shards)).encode()).hexdigest()


def counted(batches: Iterable[tuple[Tensor, Tensor]], bar: tqdm) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches, their tokens added to the progress bar."""
    for x, y in batches:
        yield x, y
        bar.update(x.numel())
