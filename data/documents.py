"""Documents of a dataset, read with `datasets`: from the hub, or from parquet files on disk."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

from errors import UserError

COLUMN = "text"
# More are read a little faster, but take more memory where they are books.
ROWS_AT_ONCE = 16


class Documents:
    """The strings in one column of a split of a dataset, in order.

    `path` and `where` are what `datasets.load_dataset` takes: a repository, a folder, or "parquet",
    and which files. `part` (index, count) has only the row groups index - 1, index - 1 + count, ...
    of all files; a file that is not parquet counts as one row group. Error messages call the
    dataset `source`.

    A `remote` dataset is read file by file unless it is in parts, others row group by row group,
    for each of which `datasets` opens its file anew: cheap on disk, but requests and megabytes over
    the network. `size` is the number of these units.

    Raises UserError where it cannot be read, has no such column, or has fewer than `count` row
    groups.
    """

    def __init__(
        self,
        source: str,
        path: str,
        column: str = COLUMN,
        split: str = "train",
        part: tuple[int, int] = (1, 1),
        remote: bool = False,
        **where: Any,
    ):
        self.source, self.column = source, column
        self.format = " as parquet" if path == "parquet" else ""
        index, count = part
        with self._reading():
            import datasets

            datasets.disable_progress_bars()
            # reading files of this machine must not ask the hub to count it
            datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
            datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised, too
            builder = datasets.load_dataset_builder(path, **where)
            dataset = builder.as_streaming_dataset(split)
            names = dataset.column_names
            if names is not None and column not in names:
                raise UserError(
                    f"{source}: needs a column {column!r} of strings; it has {', '.join(names)}"
                )
            if hasattr(builder.config, "columns"):  # parquet: the other columns are not read
                builder.config.columns, builder.config.batch_size = [column], ROWS_AT_ONCE
                dataset = builder.as_streaming_dataset(split)
            dataset = dataset.select_columns([column])
            if count > 1 or not remote:
                dataset = dataset.reshard()
            if dataset.num_shards < count:
                raise UserError(
                    f"{source}: {dataset.num_shards} row groups do not make {count} parts"
                )
            self.dataset = dataset.shard(count, index - 1, contiguous=False)
            self.size = self.dataset.num_shards

    def read(self, document: int = 0, state: Any = None) -> Generator[tuple[str, Any]]:
        """The texts from document number `document` on, each with the state to go on from there.

        `state` is what came with that document, None for the first one: JSON of `size`, the state
        of the dataset at most ROWS_AT_ONCE documents earlier, and how many. Units that end before
        these are not read; all are if the state is of other units.

        Raises UserError where the dataset cannot be read, or a document is not a string.
        """
        size, before, skipped = state or (self.size, None, document)
        if size != self.size:
            before, skipped = None, document
        with self._reading():
            self.dataset.load_state_dict(before)
            for batch in self.dataset.iter(ROWS_AT_ONCE):
                texts = batch[self.column]
                for number in range(skipped, len(texts)):
                    if not isinstance(texts[number], str):
                        kind = type(texts[number]).__name__
                        raise UserError(
                            f"{self.source}: document {document} has no {self.column}: it is of "
                            f"type {kind}, not str"
                        )
                    yield texts[number], (self.size, before, number)
                    document += 1
                before, skipped = self.dataset.state_dict(), max(skipped - len(texts), 0)

    def done(self, document: int, state: Any) -> int:
        """Number of units that were begun before the document with this state."""
        dataset = state[1]
        while dataset is not None and "shard_idx" not in dataset:
            dataset = dataset["examples_iterable"]
        return dataset["shard_idx"] if dataset else 0

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn any error into a UserError that names the dataset."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # of datasets, pyarrow, the system or any network library
            reason = one_line(error)
            raise UserError(f"{self.source}: cannot be read{self.format}: {reason}") from error


def parquet_files(
    source: str,
    files: Sequence[str | Path],
    column: str = COLUMN,
    part: tuple[int, int] = (1, 1),
) -> Documents:
    """The documents of parquet files on disk, in the order given."""
    # datasets takes the paths as patterns
    paths = [escape(str(Path(file).absolute())) for file in files]
    return Documents(source, "parquet", column, part=part, data_files=paths)


def one_line(error: Exception) -> str:
    """An error's message without its line breaks, which those about the network have."""
    return " ".join(str(error).split())
