"""Atomic file writes (to a temporary file, synced, renamed), JSON, checksums and folder locks."""

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from errors import UserError


@contextmanager
def atomic_write(path: str | Path, mode: str = "wb") -> Iterator[IO]:
    """Open a file that appears at `path` only once the block has ended and all of it is on disk.

    A kill or an error leaves the previous file untouched; the hidden temporary file is beside it.
    Raises UserError where the file cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        # The rename itself is only durable once the folder is on disk too.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise UserError(f"{path}: cannot be written: {reason}") from error
        raise


def check_writable(folder: str | Path) -> None:
    """Raise UserError, before any long work, for a folder that cannot be written to.

    If it does not exist yet, its nearest existing parent is tested. No file is left behind.
    """
    nearest = Path(folder)
    try:
        while not nearest.exists():
            nearest = nearest.parent
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise UserError(f"{folder}: no file can be written there: {error.strerror}") from error


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file atomically."""
    with atomic_write(path, "w") as file:
        file.write(json.dumps(value, indent=1) + "\n")


def read_json(path: str | Path) -> Any:
    """The content of a JSON file, None if there is no such file.

    Raises UserError where it cannot be read as JSON, or contains null.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from error
    if value is None:
        raise UserError(f"{path}: contains only null")
    return value


def sha256_of(path: str | Path) -> str:
    """Hex sha256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def lock_folder(folder: Path, doing: str) -> Iterator[None]:
    """Create a folder and hold its lock while the block runs.

    The system releases the lock when the process ends, however it ends. If nothing was written to
    the folder, what was created here is removed again. Raises UserError where the folder cannot be
    written to, or another process holds its lock; the message says that it "is `doing`".
    """
    check_writable(folder)
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock, before = folder / ".lock", set(folder.iterdir())
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another process is {doing}") from None
        except OSError:
            pass  # a network file system without locks
        try:
            yield
        finally:
            with suppress(OSError):  # another process uses a folder by now, or it is gone
                if lock not in before and set(folder.iterdir()) == before | {lock}:
                    lock.unlink()
                    for path in created:
                        path.rmdir()
