"""The lengths at which runs are evaluated, and the validation tokens that are measured there."""

import functools
import hashlib
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from config import Config
from data.loader import validation_tokens
from data.shards import check_ids, check_tokenizer, list_shards
from errors import UserError
from runtime.files import sha256_of


def default_lengths(
    configs: Sequence[Config], multiples: Sequence[float] = (1, 2, 4, 8, 16)
) -> tuple[int, ...]:
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
    """The validation tokens of a measurement at these lengths, as facts: see `shared_tokens`."""
    tokens = shared_tokens(data_dir, tuple(lengths), wanted, config)
    return {"data_dir": data_dir, "val_sha256": validation_id(data_dir), "tokens": tokens}


@functools.cache
def shared_tokens(data_dir: str, lengths: tuple[int, ...], wanted: int, config: Config) -> int:
    """The most validation tokens, up to `wanted`, that fill whole windows of every length."""
    available = count_tokens(data_dir, lengths, wanted, config) - 1
    unit = math.lcm(*lengths)
    if available < unit:
        raise UserError(
            f"{data_dir}: {available} validation tokens, but lengths {list(lengths)} need a "
            f"multiple of {unit} to predict the same tokens in whole windows"
        )
    return available // unit * unit


@functools.cache
def sampled_sequences(data_dir: str, length: int, wanted: int, config: Config) -> int:
    """The number of random sequences to measure: `wanted`, or as many as lie side by side."""
    tokens = count_tokens(data_dir, (length,), sys.maxsize - 1, config)
    available = (tokens - 1) // length
    if not available:
        raise UserError(
            f"{data_dir}: {tokens} validation tokens have no sequence of {length} and a target"
        )
    return min(wanted, available)


def count_tokens(data_dir: str, lengths: tuple[int, ...], wanted: int, config: Config) -> int:
    """The number of the first `wanted` validation tokens and a last target, checked for the run."""
    check_lengths(config, lengths)
    check_tokenizer(data_dir, config.tokenizer)
    tokens = validation_tokens(data_dir, wanted)
    check_ids(data_dir, tokens, config.n_vocab)
    return len(tokens)


def validation_id(data_dir: str) -> str:
    """Hash of the validation shards, so that other data in the same folder is measured anew."""
    shards = list_shards(data_dir, "val")
    return _hash(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in shards))


@functools.cache
def _hash(shards: tuple[tuple[Path, int, int], ...]) -> str:
    """SHA-256 of the files' SHA-256; their sizes and times are there for the cache."""
    return hashlib.sha256("".join(sha256_of(path) for path, *_ in shards).encode()).hexdigest()


def counted(batches: Iterable[tuple[Tensor, Tensor]], bar: tqdm) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches, their tokens added to the progress bar."""
    for x, y in batches:
        yield x, y
        bar.update(x.numel())
