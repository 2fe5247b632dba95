"""Batches of sequences that are made as they are needed, instead of being read from files.

Every sequence is a pure function of (split, index), so nothing is stored, and each rank makes its
share of a batch while the previous batch is trained on.
"""

import sys
from abc import abstractmethod
from collections.abc import Callable

import numpy as np

from data.loader import Batch, Ints, Loader

# The splits; the seed of a run selects only the order of the training sequences.
TRAINING = 0
VALIDATION = 1


def sequence_rng(split: int, index: int) -> np.random.Generator:
    """The random generator of one sequence: a counter-based stream of its own."""
    return np.random.Generator(np.random.Philox(key=(split << 64) | index))


class SimulatedLoader(Loader):
    """Batches of simulated sequences; an epoch has each sequence once."""

    val_tokens = sys.maxsize  # made as they are needed

    def open_validation(self, max_tokens: int) -> Callable[[Ints], Batch]:
        T = self.batching.block_size
        return lambda index: self._simulate(VALIDATION, index, T)

    @abstractmethod
    def _simulate(self, split: int, indices: Ints, length: int) -> Batch:
        """Return x and y of these sequences of a split, in host memory."""

    def read(self, step: int) -> Batch:
        indices = self._sequences(step)
        return self._simulate(TRAINING, indices, self.batching.block_size)
