"""Documents of parquet files, the strings of a column `text`, starting at any of them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from errors import UserError

COLUMN = "text"
ROWS_AT_ONCE = 64
# A function that opens a path for reading bytes: `open`, or a file system's method.
OpenFile = Callable[[str | Path, str], IO]


def count_documents(file: str | Path, open_file: OpenFile = open) -> int:
    """Number of rows of a file, from its footer. Raises what `read_documents` raises."""
    with _open(file, open_file) as parquet:
        return parquet.metadata.num_rows


def read_documents(
    files: Iterable[str | Path], start: int = 0, open_file: OpenFile = open
) -> Iterator[str]:
    """The texts of all rows of `files` in order, starting at row `start`, counted over all files.

    Row groups that end before `start` are not read. Raises UserError where a file cannot be read as
    parquet, has no column of strings called `text`, or has a row without text.
    """
    for file in files:
        with _open(file, open_file) as parquet:
            row = 0
            groups: list[int] = []
            for group in range(parquet.num_row_groups):
                rows = parquet.metadata.row_group(group).num_rows
                if not groups and row + rows <= start:
                    row += rows
                else:
                    groups.append(group)
            for batch in parquet.iter_batches(ROWS_AT_ONCE, row_groups=groups, columns=[COLUMN]):
                for text in batch.column(0).to_pylist():
                    if text is None:
                        raise UserError(f"{file}: row {row} has no {COLUMN}")
                    if row >= start:
                        yield text
                    row += 1
        start = max(start - row, 0)


@contextmanager
def _open(path: str | Path, open_file: OpenFile) -> Iterator[pq.ParquetFile]:
    """Open a file for pyarrow; any error while it is read becomes a UserError that names it."""
    try:
        with open_file(path, "rb") as raw:
            parquet = pq.ParquetFile(raw)
            schema = parquet.schema_arrow
            kind = schema.field(COLUMN).type if COLUMN in schema.names else None
            if kind not in (pa.string(), pa.large_string()):
                names = ", ".join(schema.names)
                raise UserError(f"{path}: needs a column {COLUMN!r} of strings; it has {names}")
            yield parquet
    except UserError:
        raise
    except Exception as error:  # from pyarrow, the system or a network library
        raise UserError(f"{path}: cannot be read as parquet: {error}") from error
