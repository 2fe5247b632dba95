"""The validation tokens that an evaluation measures: how many, and at which lengths."""

import functools
import math
from collections.abc import Iterable, Iterator

from torch import Tensor
from tqdm import tqdm

from config import Config
from data.loader import validation_tokens
from data.shards import check_ids, check_tokenizer
from data.tokenizer import get_tokenizer
from errors import UserError


def default_lengths(config: Config) -> tuple[int, ...]:
    """1x to 16x the training length."""
    return tuple(config.block_size * 2**i for i in range(5))


@functools.cache
def shared_tokens(data_dir: str, lengths: tuple[int, ...], wanted: int, config: Config) -> int:
    """The most validation tokens, up to `wanted`, that fill whole windows of every length."""
    check_tokenizer(data_dir, config.tokenizer)
    tokens = validation_tokens(data_dir, wanted)
    check_ids(data_dir, tokens, config.n_vocab)
    unit, available = math.lcm(*lengths), len(tokens) - 1
    if available < unit:
        raise UserError(
            f"{data_dir}: {available} validation tokens, but lengths {list(lengths)} need a "
            f"multiple of {unit} to predict the same tokens in whole windows"
        )
    return available // unit * unit


@functools.cache
def text_bytes(data_dir: str, tokens: int, tokenizer: str) -> int:
    """Bytes of the text that the first `tokens` predictions are of; end-of-text marks have none."""
    known = get_tokenizer(tokenizer)
    ids = validation_tokens(data_dir, tokens)[1:]
    return len(known.decode(ids[ids != known.eot]).encode())


@functools.cache
def sampled_sequences(data_dir: str, length: int, wanted: int, config: Config) -> int:
    """The number of random sequences of a length to measure: `wanted`, or fewer.

    That is at most as many as lie side by side in the validation text.
    """
    check_tokenizer(data_dir, config.tokenizer)
    tokens = validation_tokens(data_dir)
    check_ids(data_dir, tokens, config.n_vocab)
    available = (len(tokens) - 1) // length
    if not available:
        raise UserError(
            f"{data_dir}: {len(tokens)} validation tokens have no sequence of {length} and a target"
        )
    return min(wanted, available)


def counted(batches: Iterable[tuple[Tensor, Tensor]], bar: tqdm) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches, their tokens added to the progress bar."""
    for x, y in batches:
        yield x, y
        bar.update(x.numel())
