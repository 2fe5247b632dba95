"""Recall tasks: an answer is determined by one or a few earlier tokens, at any distance.

The loss on text says little about the use of a long context, because most of what predicts a token
is near it. Here loss and accuracy are over the answers only. The tasks share 256 token ids:

lookup    4 of 12 keys get one of 16 values each. Key and value are one token, so that finding it
          takes one match and no positions. At the end the 4 keys are asked in random order.
mqar      multi-query associative recall (Arora et al. 2023): 4 of 128 keys, each followed by a
          value of 64; later each key is asked at a random place. In the authors' code such places
          follow a power law that prefers the nearest ones, and noise may contain keys.
latest    as lookup, but each key is assigned three times: the answer is its latest value (Tan et
          al. 2024, MQRAR).
latest_2  the answer is the last value but one (Yang et al. 2025, PaTH: MQRAR-2).
sort      symbols of 32, a separator, and the symbols in order (Vasylenko et al. 2025, ASEntmax).

All other tokens are noise, drawn from the remaining ids. The sizes are smaller than the authors',
so that a model learns a task within minutes on a CPU.
"""

import hashlib
import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from data.loader import Batch, Batching, Ints
from data.shards import Fingerprint
from data.simulated import TRAINING, SimulatedLoader, sequence_rng
from data.vocabulary import RECALL_IDS
from errors import UserError

EVALUATION = 2  # the split of scripts.recall, besides TRAINING and VALIDATION
SEQUENCES = 2**32  # of an epoch: no run sees a sequence twice
NO_ANSWER = -100  # the target that torch's cross-entropy ignores

PAIRS = 4  # keys that are assigned and asked
# lookup and latest: key * VALUES + value, then queries, then noise
KEYS = 12
VALUES = 16
QUERIES = KEYS * VALUES
TIMES = 3  # that latest assigns each key
SHORTEST = PAIRS * (TIMES + 1)  # length that fits any task
# mqar: keys, then values, then noise
MQAR_KEYS = 128
MQAR_VALUES = 64
# sort: symbols, then the separator
SYMBOLS = 32


class Drawn(NamedTuple):
    """The tokens [L] of a sequence, and the places, values and sources of its answers, each [n]."""

    tokens: Ints
    places: Ints  # of the positions whose outputs answer
    answers: Ints  # token ids
    sources: Ints  # of the positions that determine the answers


class Assigned(NamedTuple):
    """How a task assigns values to its keys, and which value of a key it asks for."""

    values: int  # how many different values there are
    times: int = 1  # how often each key is assigned a value
    back: int = 0  # 0 asks for the last value of a key, 1 for the last but one


# How each recall task assigns its keys; sort has no keys.
ASSIGNED = {
    "lookup": Assigned(VALUES),
    "mqar": Assigned(MQAR_VALUES),
    "latest": Assigned(VALUES, TIMES),
    "latest_2": Assigned(VALUES, TIMES, back=1),
}


def draw(task: str, split: int, index: int, length: int, pairs: int = PAIRS) -> Drawn:
    """A sequence of a split, a pure function of these arguments."""
    rng = sequence_rng(split, index)
    if task == "sort":
        return sort(rng, length)
    if task == "mqar":
        return mqar(rng, length, pairs)
    return lookup(rng, length, pairs, ASSIGNED[task])


def lookup(rng: np.random.Generator, length: int, pairs: int, task: Assigned) -> Drawn:
    """Assign values to keys, key and value in one token, and ask for a value of each at the end."""
    keys = rng.permutation(KEYS)[:pairs]
    first_query = length - pairs
    tokens = rng.integers(QUERIES + KEYS, RECALL_IDS, length)
    assigned = rng.permutation(keys.repeat(task.times))
    values = rng.integers(VALUES, size=len(assigned))
    places = np.sort(rng.choice(first_query, len(assigned), replace=False))
    tokens[places] = assigned * VALUES + values
    asked = rng.permutation(keys)
    tokens[first_query:] = QUERIES + asked
    source = [np.flatnonzero(assigned == key)[-1 - task.back] for key in asked]
    return Drawn(
        tokens,
        places=np.arange(first_query, length),
        answers=values[source],
        sources=places[source],
    )


def mqar(rng: np.random.Generator, length: int, pairs: int) -> Drawn:
    """Keys and values in turn at the beginning; later, among noise, each key is asked once."""
    keys = rng.permutation(MQAR_KEYS)[:pairs]
    values = MQAR_KEYS + rng.integers(MQAR_VALUES, size=pairs)
    tokens = rng.integers(MQAR_KEYS + MQAR_VALUES, RECALL_IDS, length)
    tokens[: 2 * pairs] = np.stack([keys, values], 1).ravel()
    places = rng.choice(np.arange(2 * pairs, length), pairs, replace=False)
    tokens[places] = keys
    order = places.argsort()
    return Drawn(tokens, places[order], answers=values[order], sources=2 * order + 1)


def sort(rng: np.random.Generator, length: int) -> Drawn:
    """Symbols, a separator and the symbols in order; of an odd length the last is cut off."""
    count = (length + 1) // 2
    symbols = rng.integers(SYMBOLS, size=count)
    sources = symbols.argsort(kind="stable")[: length - count]
    answers = symbols[sources]
    tokens = np.concatenate([symbols, [SYMBOLS], answers[:-1]])
    return Drawn(tokens, np.arange(count, length), answers, sources)


def targets(drawn: Drawn) -> Ints:
    """The targets [L] of a sequence: its answers, and NO_ANSWER elsewhere."""
    out = np.full(len(drawn.tokens), NO_ANSWER)
    out[drawn.places] = drawn.answers
    return out


class RecallLoader(SimulatedLoader):
    """Batches whose sequences have one length: T in half of the steps, else T / 4 to T.

    Every batch has the same number of sequences, so a batch of shorter ones has fewer tokens.
    `first_id` is added to all token ids. Raises UserError if T / 4 is too short for a task.
    """

    def __init__(self, task: str, batching: Batching, first_id: int = 0) -> None:
        if batching.block_size < 4 * SHORTEST:
            raise UserError(
                f"block_size = {batching.block_size} must be at least {4 * SHORTEST}: recall "
                f"trains on a quarter of it too, and its tasks take {SHORTEST} tokens"
            )
        self.task = task
        self.first_id = first_id
        self.source = f"recall task {task}"
        self.tokens = SEQUENCES * batching.block_size
        super().__init__(SEQUENCES, batching)

    def read(self, step: int) -> Batch:
        length = self.batching.block_size
        rng = np.random.default_rng([self.batching.seed, step])
        if rng.random() >= 0.5:
            length = int(rng.integers(length // 4, length + 1))
        indices = self._sequences(step)
        return self._simulate(TRAINING, indices, length)

    def _simulate(self, split: int, indices: Ints, length: int) -> Batch:
        sequences = [draw(self.task, split, int(index), length) for index in indices]
        tokens = np.stack([sequence.tokens for sequence in sequences])
        answers = np.stack([targets(sequence) for sequence in sequences])
        answers[answers != NO_ANSWER] += self.first_id
        return torch.from_numpy(tokens + self.first_id), torch.from_numpy(answers)


def fingerprint_of(task: str, first_id: int) -> Fingerprint:
    """Return what identifies the sequences of a task whose token ids start at `first_id`."""
    return {
        "recall": f"{task}, ids from {first_id}",
        "recall sequences": hash_sequences(task),
    }


@cache
def hash_sequences(task: str) -> str:
    """Hash a few training batches and evaluation sequences of a task, the same for every run.

    The hash changes if this code, or numpy's generators, draw different sequences.
    """
    digest = hashlib.sha256()
    loader = RecallLoader(task, Batching(block_size=64, sequences_per_step=8, seed=0))
    for step in range(8):
        for tensor in loader.read(step):
            digest.update(tensor.numpy().tobytes())
    for length in (64, 256, 1024):
        for index in range(4):
            for array in draw(task, EVALUATION, index, length):
                digest.update(array.tobytes())
    return digest.hexdigest()


# ---- what is right by chance ----


def chance(task: str, length: int, pairs: int = PAIRS) -> float:
    """The share of answers that a model gets right without matching any key.

    It sees the values of a sequence in their order, but not which keys they belong to, and always
    names the value that is most likely to be asked for. The share is the same at every length. sort
    has no keys: its share is the accuracy of repeating the previous answer, which grows with the
    length. That is a simple rule, not the best possible guess.
    """
    if task == "sort":
        return right_by_repeating(length)
    return right_by_value(pairs, ASSIGNED[task])


@cache
def right_by_value(pairs: int, assigned: Assigned) -> float:
    """The accuracy of naming the likeliest value in view, simulated (standard error 0.0002)."""
    values_after = assigned.back
    values_before = assigned.times - 1 - values_after
    n = pairs * assigned.times
    # a value is asked for if its key has values_before values before it and values_after after it
    likelihoods = np.empty(n)
    for i in range(n):
        likelihoods[i] = math.comb(i, values_before) * math.comb(n - 1 - i, values_after)
    likelihoods /= likelihoods.sum()

    sequences = min(2**18, 2**25 // n**2)  # fewer if n is large, to bound memory
    rng = np.random.default_rng(0)
    values = rng.integers(assigned.values, size=(sequences, n))
    same = values[:, :, None] == values[:, None, :]  # [sequences, n, n]
    likeliest = (same @ likelihoods).max(1)
    return float(likeliest.mean())


def right_by_repeating(length: int) -> float:
    """The expected share of sort's answers that are the answer before."""
    count = (length + 1) // 2
    # Each answer repeats the one before it, unless it is the first of its symbol.
    different = SYMBOLS * (1 - (1 - 1 / SYMBOLS) ** count)
    repeated = count - different
    if length % 2:  # the last answer is cut off
        below = np.arange(SYMBOLS) / SYMBOLS
        largest_is_unique = count * float(np.mean(below ** (count - 1)))
        repeated -= 1 - largest_is_unique
    return repeated / (length - count)
