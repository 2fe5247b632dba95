"""Recall: what was said must be found again, however far away it was said.

The loss on text is worth little as a test of a long context, as most of what predicts a token is
near. Here an answer follows from one place, or from few, at any distance. Loss and accuracy are of
answers alone. Of 256 token ids a task has:

lookup    4 of 12 keys get a value of 16 each: key and value are one token, so that finding it takes
          one match and no positions. At the end the 4 keys are asked in random order.
mqar      multi-query associative recall (Arora et al. 2023): 4 of 128 keys, each followed by a
          value of 64; later each key is asked at a random place. In the authors' code such places
          follow a power law that prefers the nearest ones, and noise may contain keys.
latest    as lookup, but each key is assigned three times: the answer is its latest value (Tan et
          al. 2024, MQRAR).
latest_2  the answer is the last value but one (Yang et al. 2025, PaTH: MQRAR-2).
sort      symbols of 32, a separator, and the symbols in order (Vasylenko et al. 2025, ASEntmax).

All other tokens are noise, which has tokens of its own. The sizes are smaller than the authors', so
that a model learns a task within minutes on a CPU.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config import RECALL_IDS
from data.loader import Batching
from data.simulated import Indices, SimulatedLoader, generator
from errors import UserError

EVALUATION = 2  # the set of scripts.recall, beside those of training and validation
SEQUENCES = 2**32  # of an epoch: no run sees a sequence twice
NO_ANSWER = -100  # the target that torch's cross-entropy ignores

PAIRS = 4  # keys that are assigned and asked
# lookup and latest: key * VALUES + value, then queries, then noise
KEYS, VALUES = 12, 16
QUERIES = KEYS * VALUES
TIMES = 3  # that latest assigns each key
SHORTEST = PAIRS * (TIMES + 1)  # length that fits any task
# mqar: keys, then values, then noise
MQAR_KEYS, MQAR_VALUES = 128, 64
# sort: symbols, then the separator
SYMBOLS = 32

Ints = NDArray[np.int64]


class Drawn(NamedTuple):
    """A sequence: its tokens [L] and, for each of its n answers [n], where it is due and from."""

    tokens: Ints
    places: Ints  # of the positions whose outputs answer
    answers: Ints  # token ids
    sources: Ints  # of the positions that determine the answers


def assigned(rng: np.random.Generator, length: int, pairs: int, times: int, back: int) -> Drawn:
    """Keys with a value in the same token, `times` each; the last value but `back` - 1 is asked."""
    keys, first_query = rng.permutation(KEYS)[:pairs], length - pairs
    tokens = rng.integers(QUERIES + KEYS, RECALL_IDS, length)
    order = rng.permutation(keys.repeat(times))
    values = rng.integers(VALUES, size=len(order))
    at = np.sort(rng.choice(first_query, len(order), replace=False))
    tokens[at] = order * VALUES + values
    asked = rng.permutation(keys)
    tokens[first_query:] = QUERIES + asked
    wanted = [np.flatnonzero(order == key)[-back] for key in asked]
    return Drawn(tokens, np.arange(first_query, length), values[wanted], at[wanted])


def mqar(rng: np.random.Generator, length: int, pairs: int) -> Drawn:
    """Keys and values in turn at the beginning; later, among noise, each key is asked once."""
    keys = rng.permutation(MQAR_KEYS)[:pairs]
    values = MQAR_KEYS + rng.integers(MQAR_VALUES, size=pairs)
    tokens = rng.integers(MQAR_KEYS + MQAR_VALUES, RECALL_IDS, length)
    tokens[: 2 * pairs] = np.stack([keys, values], 1).ravel()
    places = rng.choice(np.arange(2 * pairs, length), pairs, replace=False)
    tokens[places] = keys
    order = places.argsort()
    return Drawn(tokens, places[order], values[order], 2 * order + 1)


def sort(rng: np.random.Generator, length: int, pairs: int) -> Drawn:
    """Symbols, a separator and the symbols in order; of an odd length the last is cut off."""
    count = (length + 1) // 2
    symbols = rng.integers(SYMBOLS, size=count)
    sources = symbols.argsort(kind="stable")[: length - count]
    tokens = np.concatenate([symbols, [SYMBOLS], symbols[sources][:-1]])
    return Drawn(tokens, np.arange(count, length), symbols[sources], sources)


# One entry for each value of the setting `recall`.
TASKS: dict[str, Callable[[np.random.Generator, int, int], Drawn]] = {
    "lookup": partial(assigned, times=1, back=1),
    "mqar": mqar,
    "latest": partial(assigned, times=TIMES, back=1),
    "latest_2": partial(assigned, times=TIMES, back=2),
    "sort": sort,
}


def draw(task: str, seed: int, index: int, length: int, pairs: int = PAIRS) -> Drawn:
    """A sequence of a set, a pure function of these arguments."""
    return TASKS[task](generator(seed, index), length, pairs)


def targets(drawn: Drawn) -> Ints:
    """The targets [L] of a sequence: its answers, and NO_ANSWER elsewhere."""
    out = np.full(len(drawn.tokens), NO_ANSWER)
    out[drawn.places] = drawn.answers
    return out


class RecallLoader(SimulatedLoader):
    """Batches of one length each: of T, or in half of the steps of T / 4 to T.

    Every batch has as many sequences, so that a shorter batch has fewer tokens. `first_id` is added
    to all token ids.
    """

    unit = "sequence"

    def __init__(self, task: str, batching: Batching, first_id: int = 0) -> None:
        if batching.block_size < 4 * SHORTEST:
            raise UserError(
                f"block_size = {batching.block_size} must be at least {4 * SHORTEST}: recall "
                f"trains on a quarter of it too, and its tasks take {SHORTEST} tokens"
            )
        self.task, self.source, self.first_id = task, f"recall task {task}", first_id
        self.tokens = SEQUENCES * batching.block_size
        super().__init__(SEQUENCES, batching)

    def _length(self, step: int) -> int:
        rng, longest = np.random.default_rng([self.batching.seed, step]), self.batching.block_size
        return longest if rng.random() < 0.5 else int(rng.integers(longest // 4, longest + 1))

    def _make(self, seed: int, indices: Indices, length: int) -> tuple[Tensor, Tensor]:
        drawn = [draw(self.task, seed, int(index), length) for index in indices]
        x = torch.from_numpy(np.stack([one.tokens for one in drawn]))
        y = torch.from_numpy(np.stack([targets(one) for one in drawn]))
        x, y = x + self.first_id, torch.where(y == NO_ANSWER, y, y + self.first_id)
        return (x.pin_memory(), y.pin_memory()) if self.device.type == "cuda" else (x, y)
