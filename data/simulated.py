"""Batches of sequences that are made when they are needed, in place of being read from files.

Every sequence is a pure function of (set, index), so nothing is stored, and each rank makes its own
share of a batch while the previous batch is trained on.
"""

import sys
from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from data.loader import Batches, Loader, copy_to
from errors import UserError

# The sets of sequences; the seed of a run selects the order alone.
TRAINING, VALIDATION = 0, 1

Indices = Sequence[int] | NDArray[np.int64]


def generator(seed: int, index: int) -> np.random.Generator:
    """The random numbers of one sequence of a set: a counter-based stream of its own."""
    return np.random.Generator(np.random.Philox(key=(seed << 64) | index))


class SimulatedLoader(Loader):
    """Batches of simulated sequences; an epoch has each sequence once."""

    unit: str  # what a sequence is called
    val_tokens = sys.maxsize  # made as they are needed

    def validation_batches(self, max_tokens: int, batch_size: int) -> Batches:
        windows, T = self.validation_windows(max_tokens), self.batching.block_size
        if windows < 1:
            raise UserError(f"val_tokens = {max_tokens}, but one {self.unit} takes {T} of them")
        indices = range(self.batching.rank, windows, self.batching.world_size)
        parts = (indices[at : at + batch_size] for at in range(0, len(indices), batch_size))
        return (copy_to(self.device, *self._make(VALIDATION, part, T)) for part in parts)

    def _length(self, step: int) -> int:
        """The length of the sequences of a step."""
        return self.batching.block_size

    @abstractmethod
    def _make(self, seed: int, indices: Indices, length: int) -> tuple[Tensor, Tensor]:
        """x and y of these sequences of a set in host memory, pinned if they go to a GPU."""

    def _read(self, step: int) -> tuple[Tensor, Tensor]:
        return self._make(TRAINING, self._windows(step), self._length(step))
