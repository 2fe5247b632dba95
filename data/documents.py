"""Turn the rows of a data set into documents: leave out empty rows, and split at marks."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from data.vocabulary import END_OF_TEXT
from errors import UserError

Document = Iterable[str]  # the chunks of its text


@dataclass(eq=False)
class Rules:
    """Which rows of a data set are documents, and how many rows were left out so far.

    Raises UserError if `split_at` is empty.
    """

    column: str  # of parquet, or field of JSON
    eot_text: str = END_OF_TEXT  # of the tokenizer; in a document it stays text
    split_at: str | None = None
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.split_at == "":
            raise UserError("--split_at needs a mark, such as '<|endoftext|>'")

    def documents(self, rows: Iterable[tuple[str, Any]]) -> Iterator[Document]:
        """Yield the documents of rows: pairs of a name, for messages, and a text.

        A null is an empty document. Raises UserError for any other value that is not a string.
        """
        for name, value in rows:
            if value is None:
                value = ""
            elif not isinstance(value, str):
                kind = type(value).__name__
                raise UserError(f'{name}: "{self.column}" must be a string, not {kind}')
            yield from self.cut([value])

    def cut(self, row: Iterable[str]) -> Iterator[Document]:
        """Yield the documents of a row, whose text comes in chunks."""
        self.counts["rows"] += 1
        is_empty = True
        for document in self._split(row) if self.split_at else whole(row):
            is_empty = False
            yield self._count_marks(document)
        self.counts["empty"] += is_empty

    def _split(self, row: Iterable[str]) -> Iterator[Document]:
        """Yield what is between marks, without white space around it, unless nothing is left."""
        mark = str(self.split_at)
        text = ""
        for chunk in row:
            search_from = max(0, len(text) - len(mark) + 1)
            text += chunk
            if mark in text[search_from:]:
                *documents, text = text.split(mark)
                self.counts["split"] += len(documents)
                yield from ([document.strip()] for document in documents if document.strip())
        if text.strip():
            yield [text.strip()]

    def _count_marks(self, document: Document) -> Document:
        for chunk in document:
            self.counts["marks"] += chunk.count(self.eot_text)
            yield chunk

    def report(self) -> None:
        """Print how many documents were left out, and where there are marks."""
        if self.counts["empty"]:
            print(f"empty documents left out: {self.counts['empty']:,}")
        if self.split_at and self.counts["rows"]:
            print(f"documents end at {self.split_at!r}: {self.counts['split']:,} times")
        if self.counts["marks"]:
            print(
                f"warning: the text has {self.eot_text} {self.counts['marks']:,} times; with "
                f"--split_at '{self.eot_text}' documents end there"
            )


def whole(row: Iterable[str]) -> Iterator[Document]:
    """Yield a row as a document, unless it is empty."""
    chunks = iter(row)
    first = next(chunks, "")
    if first:
        yield chain([first], chunks)


@contextmanager
def reading(source: str | Path) -> Iterator[None]:
    """Turn any error of the block into a UserError that names the source."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of pyarrow, datasets, the system or any network library
        raise UserError(f"{source}: cannot be read: {' '.join(str(error).split())}") from error
