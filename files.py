"""Files that are whole or not there: written aside, synced, renamed."""

import json
import os
from contextlib import contextmanager
from pathlib import Path

from errors import UserError


@contextmanager
def replacing(path, mode="wb"):
    """Open a file that appears under `path` only when the block has ended and all is on disk.

    A kill or an error leaves what was there before; the temporary file lies beside it, hidden.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with open(aside, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    # The rename itself is only durable once the folder is on disk too.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path, value) -> None:
    """Write a JSON file, whole or not at all."""
    with replacing(path, "w") as file:
        file.write(json.dumps(value, indent=1) + "\n")


def read_json(path):
    """The content of a JSON file, None if there is none; UserError if it cannot be understood."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from error
    if value is None:
        raise UserError(f"{path}: holds null, nothing else")
    return value
