"""Files that are whole or not there: written to a temporary file, synced, renamed."""

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
    """Open a file that appears under `path` only once the block has ended and all is on disk.

    A kill or an error leaves what was there before; the hidden temporary file lies beside it.
    Raises UserError where it cannot be written.
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
    """Raise UserError, before any long work, for a folder that no file can be written to.

    For a folder that does not exist yet, its nearest existing parent is tested. Leaves no file.
    """
    nearest = Path(folder)
    try:
        while not nearest.exists():
            nearest = nearest.parent
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise UserError(f"{folder}: no file can be written there: {error.strerror}") from error


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    with atomic_write(path, "w") as file:
        file.write(json.dumps(value, indent=1) + "\n")


def read_json(path: str | Path) -> Any:
    """The content of a JSON file, None if there is no such file.

    Raises UserError where it cannot be read as JSON, or holds null.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from error
    if value is None:
        raise UserError(f"{path}: holds null, nothing else")
    return value


def sha256_of(path: str | Path) -> str:
    """Hex sha256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def lock_folder(folder: Path, doing: str, name: str = ".lock") -> Iterator[None]:
    """Create a folder and hold its lock, the file `name`, while the block runs.

    The system releases the lock when the process ends, however it ends. A folder that was created
    here and in which nothing was written is removed again. Raises UserError where the folder cannot
    be written to, or another process holds its lock: that process "is `doing`".
    """
    check_writable(folder)
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / name
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
            if created and list(folder.iterdir()) == [lock]:
                with suppress(OSError):  # a parent that somebody else uses by now
                    lock.unlink()
                    for path in created:
                        path.rmdir()
