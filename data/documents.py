"""Documents of a dataset, read with `datasets`: from the hub, or from parquet files on disk."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from errors import UserError

COLUMN = "text"
# More are read a little faster, but take more memory where the documents are books.
ROWS_AT_ONCE = 16

# Reads documents in a fixed order. It takes a state, JSON, or None for the first document, and
# gives batches: the state from which the reading can start with them, and their texts.
Read = Callable[[Any], Iterator[tuple[Any, list[str]]]]


def open_dataset(source: str, path: str, column: str, split: str, **where: Any) -> Read:
    """The strings in one column of a split of a dataset.

    `path` and `where` are what `datasets.load_dataset` takes: a repository, a folder, or "parquet",
    and which files. Error messages call the dataset `source`. Raises UserError where it cannot be
    read, or has no such column.
    """
    with reading(source):
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

    def read(state: Any) -> Iterator[tuple[Any, list[str]]]:
        with reading(source):
            dataset.load_state_dict(state)
            for batch in dataset.iter(ROWS_AT_ONCE):
                for text in batch[column]:
                    if not isinstance(text, str):
                        kind = type(text).__name__
                        raise UserError(f"{source}: a document's {column} is {kind}, not str")
                yield state, batch[column]
                state = dataset.state_dict()

    return read


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Turn any error of the block into a UserError that names the dataset."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of datasets, pyarrow, the system or any network library
        raise UserError(f"{source}: cannot be read: {' '.join(str(error).split())}") from error


def reach_hub() -> None:
    """Raise UserError at once, not after minutes of retries, where the hub cannot be reached."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # from one of several HTTP libraries
        raise UserError(
            f"cannot reach {constants.ENDPOINT} ({error}): check the network, or give files that "
            "are on disk"
        ) from error
