"""Batches of sequences that are made as they are needed, instead of being read from files.

Every sequence is a pure function of (split, index), so nothing is stored, and each rank makes its
share of a batch while the previous batch is trained on.
"""

import sys
from abc import abstractmethod

import numpy as np

from data.loader import Batch, Batches, Ints, Loader, copy_to, split_rows
from errors import UserError

# The splits; the seed of a run selects only the order of the training sequences.
TRAINING = 0
VALIDATION = 1


def sequence_rng(split: int, index: int) -> np.random.Generator:
    """The random generator of one sequence: a counter-based stream of its own."""
    return np.random.Generator(np.random.Philox(key=(split << 64) | index))


class SimulatedLoader(Loader):
    """Batches of simulated sequences; an epoch has each sequence once."""

    unit: str  # what a sequence is called
    val_tokens = sys.maxsize  # made as they are needed

    def validation_batches(self, max_tokens: int, batch_size: int) -> Batches:
        T = self.batching.block_size
        count = self.validation_windows(max_tokens)
        if count < 1:
            raise UserError(f"val_tokens = {max_tokens}, but one {self.unit} takes {T} of them")
        share = np.arange(self.batching.rank, count, self.batching.world_size)
        batches = split_rows(share, batch_size)
        return (copy_to(self.device, *self._simulate(VALIDATION, rows, T)) for rows in batches)

    def _length(self, step: int) -> int:
        """The length of the sequences of a step."""
        return self.batching.block_size

    @abstractmethod
    def _simulate(self, split: int, indices: Ints, length: int) -> Batch:
        """x and y of these sequences of a split in host memory, pinned if they go to a GPU."""

    def _read(self, step: int) -> Batch:
        return self._simulate(TRAINING, self._windows(step), self._length(step))
