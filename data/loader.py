"""Batches of tokens as a pure function of (seed, step), the same for any number of processes.

A shard is cut into sequences of T + 1 tokens (T is block_size), each of which begins with the last
token of the one before: T inputs and, shifted by one, T targets. An epoch has all n whole
sequences of all shards once, in an order of its own. Epoch follows epoch as one endless list, of
which step s takes entries s B to s B + B - 1 (B = total_batch_size / T), and each rank its slice
of them. No state is carried between steps, so resuming needs only the step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.random import SeedSequence
from numpy.typing import NDArray
from torch import Tensor

from data.shards import (
    Shard,
    Tokens,
    check_ids,
    has_token,
    list_shards,
    open_shards,
    read_shard,
    read_spans,
)
from errors import UserError

FEISTEL_ROUNDS = 8
# Training sequences sampled to count documents: 2 MB at 1,024 tokens.
SAMPLED_SEQUENCES = 1024

Ints = NDArray[np.int64]
Batch = tuple[Tensor, Tensor]  # inputs and targets
Batches = Iterator[Batch]


@dataclass(frozen=True)
class Batching:
    """How sequences are put into batches, and which share of them a rank takes."""

    block_size: int  # positions of a sequence
    sequences_per_step: int  # over all ranks
    seed: int  # of the order within an epoch
    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")  # where batches are copied to; a GPU by its index


class Documents(NamedTuple):
    """Statistics of the training sequences, for attention within documents."""

    per_sequence: float  # mean number of documents, including those that are cut off
    n_quartiles: list[int]  # of n, the number of keys that a query sees within its document
    shards_without: list[str]  # training and validation shards in which no document begins


class Loader(ABC):
    """Shuffled training batches, and validation batches; an epoch has `n_sequences` sequences.

    Raises UserError if an epoch has fewer sequences than one batch takes.
    """

    source: str  # where the batches come from, for messages
    tokens: int  # of an epoch
    needed: str = ""  # the remedy for too few tokens, for messages; "": a shard with enough
    val_tokens: int  # of the whole validation set, each with a target
    documents: Documents | None = None  # with document_mask
    cropped: float = 0.0  # share of an epoch's tokens that align_documents leaves out

    def __init__(self, n_sequences: int, batching: Batching) -> None:
        if n_sequences < batching.sequences_per_step:
            tokens = f"{self.tokens} tokens"
            tokens_per_step = batching.sequences_per_step * batching.block_size
            needed = self.needed or f"a shard of {tokens_per_step + 1} tokens would be enough"
            if self.cropped:
                tokens += f", of which align_documents crops {self.cropped:.1%},"
                needed = "more documents are needed"
            raise UserError(
                f"{self.source}: {tokens} give {n_sequences} sequences of {batching.block_size} "
                f"tokens and a target, fewer than the {batching.sequences_per_step} of a step "
                f"(total_batch_size / block_size); {needed}"
            )
        self.n_sequences = n_sequences
        self.batching = batching
        self._reader = ThreadPoolExecutor(1)
        self._ahead: dict[int, Future[Batch]] = {}  # by step

    def batch(self, step: int) -> Batch:
        """Return this rank's share of a batch: inputs and targets.

        Both are int64 [sequences_per_step / world_size, L, ...], L <= T. Negative targets have no
        loss. Steps may come in any order; the next batch is read in the background.
        """
        batch = self._ahead.get(step) or self._reader.submit(self.read, step)
        self._ahead = {step + 1: self._reader.submit(self.read, step + 1)}
        return copy_to(self.batching.device, *batch.result())

    def validation_sequences(self, max_tokens: int) -> int:
        """Count the whole sequences in the first `max_tokens` validation tokens, or in all."""
        return min(self.val_tokens, max_tokens) // self.batching.block_size

    def validation_batches(self, max_tokens: int, batch_size: int) -> Batches:
        """This rank's share of the validation sequences: x, y, int64 [<= batch_size, T, ...].

        A rank's share is the sequences rank, rank + world_size, ..., so the sum over all ranks is
        the same for any number of them. Only the last batch may be smaller. Raises UserError,
        before the first batch, if there is no whole sequence, or a token is outside the vocabulary.
        """
        count = self.validation_sequences(max_tokens)
        if count < 1:
            tokens = min(self.val_tokens, max_tokens)
            raise UserError(
                f"{self.source}: val_tokens = {max_tokens} leaves {tokens} tokens with a target, "
                f"less than one sequence of {self.batching.block_size}"
            )
        read = self.open_validation(max_tokens)
        share = np.arange(self.batching.rank, count, self.batching.world_size)
        starts = range(0, len(share), batch_size)
        batches = (read(share[start : start + batch_size]) for start in starts)
        return (copy_to(self.batching.device, *batch) for batch in batches)

    @abstractmethod
    def open_validation(self, max_tokens: int) -> Callable[[Ints], Batch]:
        """Return a function from indices of validation sequences to x and y in host memory."""

    @abstractmethod
    def read(self, step: int) -> Batch:
        """Return x and y of a step, in host memory."""

    def _sequences(self, step: int) -> Ints:
        """The indices of this rank's sequences of a step: [b]."""
        count = self.batching.sequences_per_step // self.batching.world_size
        begin = step * self.batching.sequences_per_step + self.batching.rank * count
        return epoch_order(begin, count, self.n_sequences, self.batching.seed)


class TokenLoader(Loader):
    """Batches from the shards `*_train_*.bin` and `*_val_*.bin` in a folder.

    Raises UserError as Loader does, and if there are no training shards or one is damaged; and with
    the first batch that has a token not below `vocab_size`.
    """

    def __init__(self, data_dir: str | Path, batching: Batching, vocab_size: int) -> None:
        self.data_dir = data_dir
        self.source = str(data_dir)
        self.vocab_size = vocab_size
        shards = open_shards(list_shards(data_dir, "train"))
        self._files = [file for file, _ in shards]
        self.tokens = sum(tokens for _, tokens in shards)
        # index of each shard's first sequence, then the total number of sequences
        self.first_sequence = np.cumsum([0, *self._cut_sequences(shards, batching)])
        self._validation_tokens: dict[int, Tokens] = {}  # by their number
        val_shards = open_shards(list_shards(data_dir, "val"))
        self.val_tokens = sum(tokens for _, tokens in val_shards) - 1
        super().__init__(int(self.first_sequence[-1]), batching)

    def open_validation(self, max_tokens: int) -> Callable[[Ints], Batch]:
        T = self.batching.block_size
        tokens = self._validation_tokens.get(max_tokens)
        if tokens is None:  # read once: the folder may be moved while a run trains
            tokens = validation_tokens(self.data_dir, max_tokens, self.vocab_size)
            self._validation_tokens[max_tokens] = tokens
        sequences = sliding_window_view(tokens, T + 1)[::T]
        return lambda index: inputs_and_targets(sequences[index])

    def measure_documents(self, end_of_text: int) -> Documents:
        """Count the documents of up to SAMPLED_SEQUENCES training sequences, evenly spread.

        Raises UserError if no document begins in any training shard.
        """
        without = []
        for split in ("train", "val"):
            paths = list_shards(self.data_dir, split)
            missing = [path.name for path in paths if not has_token(path, end_of_text)]
            if split == "train" and len(missing) == len(paths):
                raise UserError(
                    f"document_mask = True, but no training shard of {self.data_dir} has an "
                    f"end-of-text token (id {end_of_text}), with which documents begin"
                )
            without += missing
        count = min(self.n_sequences, SAMPLED_SEQUENCES)
        sample = np.linspace(0, self.n_sequences - 1, count, dtype=np.int64)
        T = self.batching.block_size
        tokens = self._read_sequences(sample)[:, :T]
        is_start = tokens == end_of_text
        is_start[:, 0] = True
        token = np.arange(T)
        n = token - np.maximum.accumulate(np.where(is_start, token, 0), axis=1) + 1
        quartiles = np.quantile(n, (0.25, 0.5, 0.75)).round().astype(int).tolist()
        return Documents(is_start.sum() / count, quartiles, without)

    def _cut_sequences(self, shards: list[Shard], batching: Batching) -> list[int]:
        """Cut the shards into sequences; returns how many each has.

        A subclass that cuts otherwise keeps here what its `_spans` needs, and sets `cropped`.
        """
        return [(tokens - 1) // batching.block_size for _, tokens in shards]

    def _shard(self, sequence: Ints) -> Ints:
        """The index of the shard of each of these sequences."""
        return np.searchsorted(self.first_sequence, sequence, side="right") - 1

    def _spans(self, sequence: Ints) -> Ints:
        """The spans that these sequences are made of, [n, 3]: shard, first token, length."""
        T = self.batching.block_size
        shard = self._shard(sequence)
        start = (sequence - self.first_sequence[shard]) * T
        return np.stack((shard, start, np.full_like(start, T + 1)), axis=1)

    def _read_sequences(self, sequence: Ints) -> Tokens:
        """The tokens of these sequences, [b, T + 1]."""
        tokens = read_spans(self._files, self._spans(sequence), self.vocab_size)
        return tokens.reshape(len(sequence), -1)

    def read(self, step: int) -> Batch:
        return inputs_and_targets(self._read_sequences(self._sequences(step)))


def epoch_order(begin: int, count: int, n: int, seed: int) -> Ints:
    """Return entries begin to begin + count - 1 of an endless sequence of shuffled epochs.

    Each epoch has 0 to n - 1 once, in the order that `shuffled` gives it.
    """
    epoch, index = np.divmod(np.arange(begin, begin + count), n)
    order = np.empty_like(index)
    for e in set(epoch.tolist()):
        order[epoch == e] = shuffled(index[epoch == e], n, seed, e)
    return order


def shuffled(index: NDArray[np.integer], n: int, seed: int, epoch: int) -> Ints:
    """Entries `index` [k], each in 0..n-1, of the permutation of 0..n-1 that (seed, epoch) selects.

    It takes constant memory: a Feistel network keyed by seed and epoch permutes the integers that
    have no more bits than n - 1; a result of n or more goes through it again until it is below n
    ("cycle walking", less than two passes on average).
    """
    bits = (n - 1).bit_length()
    low_bits = (bits + 1) // 2
    shift = np.uint64(low_bits)
    low_mask = np.uint64((1 << low_bits) - 1)
    high_mask = np.uint64((1 << (bits - low_bits)) - 1)
    keys = SeedSequence([seed, epoch]).generate_state(2 * FEISTEL_ROUNDS, np.uint64)

    out = np.asarray(index).astype(np.uint64)
    walking = np.arange(len(out))  # places in `out` that are not below n yet
    while len(walking):
        high = out[walking] >> shift
        low = out[walking] & low_mask
        for key_high, key_low in keys.reshape(-1, 2):
            high ^= _hash(low ^ key_high) & high_mask
            low ^= _hash(high ^ key_low) & low_mask
        out[walking] = (high << shift) | low
        walking = walking[out[walking] >= n]
    return out.astype(np.int64)


def validation_tokens(data_dir: str | Path, max_tokens: int, vocab_size: int) -> Tokens:
    """Read the first max_tokens + 1 validation tokens, or all if there are fewer, as an array [n].

    The extra token is the last one's target. Shards are concatenated. Raises UserError if a token
    is not below `vocab_size`.
    """
    chunks = []
    missing = max_tokens + 1
    for path in list_shards(data_dir, "val"):
        if missing:
            tokens = read_shard(path, missing)
            check_ids(path, tokens, vocab_size)
            chunks.append(tokens)
            missing -= len(tokens)
    return np.concatenate(chunks)


def copy_to(device: torch.device, x: Tensor, y: Tensor) -> Batch:
    """Copy x and y to `device`; to CUDA from pinned memory, while the process goes on."""
    if device.type != "cuda":
        return x.to(device), y.to(device)
    return (
        x.pin_memory().to(device, non_blocking=True),
        y.pin_memory().to(device, non_blocking=True),
    )


def inputs_and_targets(sequences: Tokens) -> Batch:
    """Split sequences [b, T + 1, ...] into x, y: int64 [b, T, ...]."""
    tokens = torch.from_numpy(sequences.astype(np.int64))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _hash(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64, a hash of each integer."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
