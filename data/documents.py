"""Turn the rows of a data set into documents: leave out empty rows, and split at marks."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.vocabulary import END_OF_TEXT
from errors import UserError


@dataclass(eq=False)
class Rules:
    """Which rows of a data set are documents, and how many rows were left out so far.

    Raises UserError if `split_at` is empty.
    """

    column: str  # of parquet, or field of JSON
    eot_text: str = END_OF_TEXT  # of the tokenizer; in a document it stays text
    split_at: str | None = None
    empty: int = 0  # rows that were left out
    marks: int = 0  # how often the documents have `eot_text`

    def __post_init__(self) -> None:
        if self.split_at == "":
            raise UserError("--split_at needs a mark, such as '<|endoftext|>'")

    def documents(self, source: str, rows: Iterable[tuple[int, Any]]) -> Iterator[str]:
        """Yield the documents of rows: each row, or what is between marks, unless it is empty.

        Each row comes with its number in `source`, such as "x.parquet, row". A null is an empty
        row. Raises UserError, which names the row by both, for any other row that is not a string.
        """
        for number, row in rows:
            if row is None:
                row = ""
            if not isinstance(row, str):
                kind = type(row).__name__
                raise UserError(f'{source} {number}: "{self.column}" must be a string, not {kind}')
            documents = [row]
            if self.split_at:
                documents = [document.strip() for document in row.split(self.split_at)]
            if not any(documents):
                self.empty += 1
            for document in documents:
                if document:
                    self.marks += document.count(self.eot_text)
                    yield document

    def report(self) -> None:
        """Print how many rows were left out, and how often documents have end-of-text as text."""
        if self.empty:
            print(f"empty documents left out: {self.empty:,}")
        if self.marks:
            print(
                f"warning: the text has {self.eot_text} {self.marks:,} times; with "
                f"--split_at '{self.eot_text}' documents end there"
            )


@contextmanager
def reading(source: str | Path) -> Iterator[None]:
    """Turn any error of the block into a UserError that names the source."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of pyarrow, datasets, the system or any network library
        raise UserError(f"{source}: cannot be read: {' '.join(str(error).split())}") from error
