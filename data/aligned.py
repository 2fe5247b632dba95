"""Training sequences that begin at a document, packed by best fit as in nanochat.

A sequence has T + 1 tokens. It is filled with the longest document that fits, repeatedly; when none
fits, the shortest document is cropped to fill the rest. nanochat chooses from a buffer, whose
content depends on earlier batches. This code chooses from all documents of a shard: the sequences
depend only on the shard and are shuffled like TokenLoader's sequences, so that batches remain a
pure function of (seed, step). Every epoch crops the same tokens.
"""

from bisect import bisect_right
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.loader import Batching, Ints, TokenLoader
from data.shards import Shard, read_shard
from errors import UserError


class AlignedLoader(TokenLoader):
    """TokenLoader's validation batches, and training sequences that begin with end-of-text.

    Raises UserError as TokenLoader does, and if a training shard has no end-of-text. Each start
    reads the training shards once.
    """

    def __init__(
        self,
        data_dir: str | Path,
        batching: Batching,
        vocab_size: int,
        end_of_text: int,
    ) -> None:
        self.end_of_text = end_of_text
        super().__init__(data_dir, batching, vocab_size)

    def _cut_sequences(self, shards: list[Shard], batching: Batching) -> list[int]:
        size = batching.block_size + 1
        counts = []
        spans = []
        hidden = True if batching.rank else None  # None: hidden if there is no terminal
        for file, tokens in tqdm(shards, "documents", leave=False, delay=2, disable=hidden):
            starts = np.flatnonzero(read_shard(str(file.name)) == self.end_of_text)
            if len(starts) == 0:
                raise UserError(
                    f"align_documents = True, but {file.name} has no end-of-text token (id "
                    f"{self.end_of_text}), with which documents begin"
                )
            documents, lengths = best_fit(np.diff(starts, append=tokens), size)
            counts.append(lengths.sum() // size)
            spans.append(np.stack((starts[documents], lengths), axis=1).astype(np.int32))
        # start and length of the documents of every sequence, one sequence after another
        self.spans = np.concatenate(spans)
        ends = np.cumsum(self.spans[:, 1], dtype=np.int64)
        # index of each sequence's first span, then the number of spans
        self.first_span = np.append(0, np.flatnonzero(ends % size == 0) + 1)
        self.cropped = 1 - self.spans[:, 1].sum() / self.tokens
        return counts

    def _spans(self, sequence: Ints) -> Ints:
        spans = []
        for index, shard in zip(sequence, self._shard(sequence), strict=True):
            documents = self.spans[self.first_span[index] : self.first_span[index + 1]]
            spans.append(np.insert(documents, 0, shard, axis=1))
        return np.concatenate(spans, dtype=np.int64)


def best_fit(lengths: Ints, size: int) -> tuple[Ints, Ints]:
    """Pack documents of these lengths [n] into whole sequences of `size` tokens.

    Returns the documents [k] of all sequences, one sequence after another, and how many tokens of
    each are kept [k]. Of equal documents the first is taken first; a sequence that the last
    documents do not fill is left out.
    """
    order = np.argsort(lengths, kind="stable")
    # longer documents fit nowhere: the shortest of them is cropped first
    capped = np.minimum(lengths[order], size + 1)
    distinct, first = np.unique(capped, return_index=True)
    waiting = [group[::-1].tolist() for group in np.split(order, first[1:])]
    by_length = dict(zip(distinct.tolist(), waiting, strict=True))
    available = distinct.tolist()
    documents = []
    kept = []
    space = size
    whole = 0  # documents in whole sequences
    while available:
        i = max(bisect_right(available, space) - 1, 0)  # the longest that fits, or the shortest
        length = available[i]
        documents.append(by_length[length].pop())
        if not by_length[length]:
            del available[i]
        kept.append(min(length, space))
        space -= kept[-1]
        if space == 0:
            whole = len(kept)
            space = size
    return np.array(documents[:whole], np.int64), np.array(kept[:whole], np.int64)
