"""Files that are whole or not there: written aside, synced, renamed."""

import fcntl
import hashlib
import json
import os
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

from errors import UserError


@contextmanager
def atomic_write(path, mode="wb"):
    """Open a file that appears under `path` only when the block has ended and all is on disk.

    A kill or an error leaves what was there before; the temporary file lies beside it, hidden.
    Raises UserError where it cannot be written.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with open(aside, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        # The rename itself is only durable once the folder is on disk too.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException as error:
        with suppress(OSError):
            aside.unlink()
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise UserError(f"{path}: cannot be written: {reason}") from error
        raise


def check_writable(folder) -> None:
    """Refuse, before any long work, a folder that no file can be written to: UserError.

    One that is not there yet is judged by the one that it would be made in. Leaves nothing behind.
    """
    there = Path(folder)
    try:
        while not there.exists():
            there = there.parent
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise UserError(f"{folder}: no file can be written there: {error.strerror}") from error


def write_json(path, value) -> None:
    """Write a JSON file, whole or not at all."""
    with atomic_write(path, "w") as file:
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


def sha256_of(path) -> str:
    """Hex sha256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def lock_folder(folder, doing: str):
    """Make a folder and hold it alone while the block runs.

    The system lets go of it when the process ends, in whatever way. Raises UserError where another
    process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another process is {doing}") from None
        except OSError:
            pass  # a network file system without locks
        yield
