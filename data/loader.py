"""Batches of tokens as a pure function of (seed, step), the same for any number of processes.

A window w of a shard holds its tokens [w T, w T + T]: T inputs and, shifted by one, T targets.
Sequence i of step s is number g = s B + i of an endless order: epoch g // n takes each of the n
whole windows once, in an order of its own. Nothing is kept from step to step, so resuming needs
only the step, and each process takes its slice of the same global batch.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from data.shards import list_shards, read_shard
from errors import UserError

FEISTEL_ROUNDS = 8


class TrainLoader:
    """Shuffled training batches of a folder of shards.

    Args:
        data_dir: folder with `*_train_*.bin`.
        block_size: T, tokens of a sequence.
        batch_size: sequences of a step over all processes together.
        seed: picks the order of the windows.
        rank, world_size: which of how many processes this is.
        device: where the batches go; the copy to a GPU is asynchronous.

    Attributes:
        n_windows: whole windows of the set, the sequences of an epoch.
        tokens: tokens of the set.

    Raises:
        UserError: no shards, a damaged one, fewer windows than one batch, or a batch that cannot be
            shared equally among the processes.
    """

    def __init__(self, data_dir, block_size, batch_size, seed, rank=0, world_size=1, device="cpu"):
        if batch_size % world_size:
            raise UserError(
                f"a batch of {batch_size} sequences cannot be shared equally by {world_size} "
                f"processes: make the batch a multiple of {world_size}"
            )
        self.paths = list_shards(data_dir, "train")
        self.shards = [read_shard(path) for path in self.paths]
        self.tokens = sum(len(shard) for shard in self.shards)
        # Number of the first window of each shard, and after them the number of all windows.
        windows = [(len(shard) - 1) // block_size for shard in self.shards]
        self.first_window = np.concatenate([[0], np.cumsum(windows)])
        self.n_windows = int(self.first_window[-1])
        if self.n_windows < batch_size:
            raise UserError(
                f"{Path(data_dir)}: {self.tokens} training tokens make {self.n_windows} windows of "
                f"{block_size} tokens and a target, but one batch takes {batch_size}, that is at "
                f"least {batch_size * block_size + 1} tokens"
            )
        self.block_size = block_size
        self.batch_size = batch_size
        self.seed = seed
        self.local_batch_size = batch_size // world_size
        self.rank = rank
        self.device = torch.device(device)
        if self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._reader = ThreadPoolExecutor(1, initializer=_use_gpu, initargs=(self.device,))
        self._next_step, self._next_batch = None, None

    def batch(self, step):
        """This process's share of a step: x, y, int64 [batch_size / world_size, block_size].

        y is x shifted by one token. Any step may be asked for at any time; the batch of the step
        that follows is read in the background.
        """
        if step == self._next_step:
            x, y = self._next_batch.result()
        else:
            x, y = self._read(step)
        self._next_step, self._next_batch = step + 1, self._reader.submit(self._read, step + 1)
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def batch_location(self, step):
        """Where this process's sequences of a step lie: a list of (shard path, token offset)."""
        return [
            (self.paths[shard], int(offset))
            for shard, offset in zip(*self._locate(step), strict=True)
        ]

    def _locate(self, step):
        """Shard number and token offset of each sequence of this process: two int64 arrays [b]."""
        first = step * self.batch_size + self.rank * self.local_batch_size
        number = np.arange(first, first + self.local_batch_size)
        epoch, index = np.divmod(number, self.n_windows)
        window = np.empty_like(index)
        for e in np.unique(epoch):
            window[epoch == e] = shuffled(index[epoch == e], self.n_windows, self.seed, int(e))
        shard = np.searchsorted(self.first_window, window, side="right") - 1
        return shard, (window - self.first_window[shard]) * self.block_size

    def _read(self, step):
        """x and y of a step in (for a GPU: pinned) host memory."""
        sequences = [
            self.shards[shard][offset : offset + self.block_size + 1]
            for shard, offset in zip(*self._locate(step), strict=True)
        ]
        return _inputs_and_targets(np.stack(sequences), self.device)


def shuffled(index, n, seed, epoch):
    """Where a random order of n things, chosen by (seed, epoch), puts its places `index`.

    A bijection of 0..n-1 in constant memory: a Feistel network permutes the numbers of as many bits
    as n - 1 has, keyed by seed and epoch; what lands at n or above is sent through again until it
    lands below ("cycle walking", on average less than twice).

    Args:
        index: integer array [k], each 0 <= index < n.

    Returns:
        int64 array [k].
    """
    bits = (n - 1).bit_length()
    low_bits = np.uint64((bits + 1) // 2)
    low_mask = np.uint64((1 << int(low_bits)) - 1)
    high_mask = np.uint64((1 << (bits - int(low_bits))) - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(2 * FEISTEL_ROUNDS, np.uint64)

    out = np.asarray(index).astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        high, low = out[walking] >> low_bits, out[walking] & low_mask
        for key_high, key_low in keys.reshape(-1, 2):
            high ^= _hash(low ^ key_high) & high_mask
            low ^= _hash(high ^ key_low) & low_mask
        out[walking] = (high << low_bits) | low
        walking = walking[out[walking] >= n]
    return out.astype(np.int64)


def validation_tokens(data_dir, max_tokens):
    """The first max_tokens + 1 validation tokens, or all if there are fewer: uint16 [n].

    The one more is the last token's target. Shards follow one another without a gap.
    """
    parts, wanted = [], max_tokens + 1
    for path in list_shards(data_dir, "val"):
        parts.append(read_shard(path)[:wanted])
        wanted -= len(parts[-1])
        if not wanted:
            break
    return np.concatenate(parts)


def validation_batches(
    data_dir, block_size, max_tokens, batch_size, rank=0, world_size=1, device="cpu"
):
    """The first max_tokens validation tokens in whole windows, in order, shared by the processes.

    Process r gets the windows r, r + world_size, ...; so the sum over the processes is the same for
    any number of them, though some may have one window more than others.

    Args:
        block_size: tokens of a window.
        max_tokens: tokens to predict over all processes; all there are if there are fewer.
        batch_size: sequences of a batch of this process; its last batch may be smaller.

    Returns:
        An iterator of x, y, int64 [<= batch_size, block_size], y shifted by one token.

    Raises:
        UserError: not even one window.
    """
    tokens = validation_tokens(data_dir, max_tokens)
    n_windows = (len(tokens) - 1) // block_size
    if n_windows < 1:
        raise UserError(
            f"{Path(data_dir)}: {len(tokens)} validation tokens to use, but one window takes "
            f"{block_size + 1}"
        )
    device = torch.device(device)
    starts = np.arange(rank, n_windows, world_size) * block_size

    def batches():
        for first in range(0, len(starts), batch_size):
            rows = starts[first : first + batch_size, None] + np.arange(block_size + 1)
            x, y = _inputs_and_targets(tokens[rows], device)
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    return batches()


def _use_gpu(device):
    """Let this thread work for `device`: a new thread would open a context on GPU 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _inputs_and_targets(sequences, device):
    """uint16 [b, T + 1] -> x, y: int64 [b, T] each, contiguous, pinned if they go to a GPU."""
    sequences = torch.from_numpy(sequences.astype(np.int64))
    x, y = sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
    return (x.pin_memory(), y.pin_memory()) if device.type == "cuda" else (x, y)


def _hash(x):
    """A uint64 array, each number mixed beyond recognition (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
