"""Atomic file writes (to a temporary file, synced, renamed), JSON, .pt files, checksums and locks.

Every command imports this module, so Windows, which has no fcntl, is rejected here.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec
from filelock import FileLock, Timeout

from errors import UserError, exit_with, first_line

if sys.platform == "win32":
    exit_with("this runs on Linux and macOS; on Windows use WSL: learn.microsoft.com/windows/wsl")

import fcntl

LOCK = ".lock"
# What flock reports on a file system without locks, such as NFS without lockd.
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Raise UserError, naming the file, if a write to it in the block raises OSError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextmanager
def atomic_write(path: str | Path, mode: str = "wb") -> Iterator[IO]:
    """Open a file that appears under `path` only once the block has ended and all is on disk.

    A kill or an error leaves the previous content in place. The temporary file is hidden beside it,
    under a random name; a kill leaves it there until `lock_folder` deletes it. Raises UserError if
    it cannot be written. Text is written in UTF-8.
    """
    path = Path(path)
    encoding = None if "b" in mode else "utf-8"
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with writing(path):
        try:
            # x: a new file, never one that a link at this place leads to
            with open(temporary, mode.replace("w", "x"), encoding=encoding) as file:
                with suppress(OSError):  # a network file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def sync_folder(folder: Path) -> None:
    """Make the renames in a folder durable, where its file system can, as SMB shares cannot."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_abandoned(temporary: Path) -> None:
    """Delete the temporary file of a killed process; a file in use is locked, and stays."""
    with suppress(OSError), open(temporary, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.unlink()


def is_writable(folder: str | Path) -> bool:
    """Whether files can be written to a folder or, where there is none yet, it can be made."""
    nearest = Path(folder).absolute()
    while not os.path.exists(nearest):  # Path.exists raises for a name that is too long
        nearest = nearest.parent
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def check_writable(folder: str | Path, hint: str = "") -> None:
    """Raise UserError, before any long work, if a folder cannot be written to."""
    if not is_writable(folder):
        raise UserError(f"{Path(folder).absolute()}: no file can be written there{hint}")


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file atomically."""
    with atomic_write(path, "w") as file:
        file.write(json.dumps(value, indent=1) + "\n")


def read_json(path: str | Path, type: Any = Any) -> Any:
    """Read a JSON file as an object of this type; returns None if there is no such file.

    Raises UserError if it cannot be read as JSON or is not of the type.
    """
    path = Path(path)
    try:
        if not path.is_file():  # not a FIFO: reading it would block
            return None
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from error
    return convert(value, type, path)


def convert(value: Any, type: Any, source: str | Path) -> Any:
    """Convert a value read from a file to an object of this type, such as a msgspec.Struct.

    Raises UserError, naming the file, if a field is missing or has another type.
    """
    try:
        return msgspec.convert(value, type)
    except Exception as error:  # the value may hold any object, such as a tensor
        raise UserError(f"{source}: damaged, or of another version: {error}") from error


def read_pt(path: Path) -> Any:
    """Read a .pt file, memory-mapped: tensors are paged in lazily.

    Nothing in the file is run as code. Raises UserError if it cannot be read.
    """
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load raises many types for damaged files
        reason = first_line(error)
        if unsafe := re.search(r"GLOBAL ([\w.]+)", str(error)):
            reason = f"it has an object of {unsafe[1]}, not tensors and plain values alone"
        raise UserError(f"{path}: the checkpoint cannot be read: {reason}") from error


def sha256_of(path: str | Path) -> str:
    """Hex sha256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path, doing: str, timeout: float = -1) -> Iterator[None]:
    """Hold a lock file's lock while the block runs; the system releases it however a process ends.

    A file system without locks gets a warning. Raises UserError if the file cannot be written, and
    if another process holds the lock for `timeout` seconds (-1: waits for it).
    """
    lock = FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(timeout=timeout)
    except Timeout:
        raise UserError(f"{path.parent}: another process is {doing}") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise cannot_write(path.parent, error) from error
        print(
            f"warning: {path.parent}: its file system has no locks ({error.strerror}), so "
            f"another process may be {doing} too",
            file=sys.stderr,
        )
    try:
        yield
    finally:
        lock.release()


def cannot_write(folder: Path, error: OSError) -> UserError:
    return UserError(f"{folder}: no file can be written there: {error.strerror}")


@contextmanager
def lock_folder(folder: Path, doing: str) -> Iterator[None]:
    """Create a folder and hold its lock, the file `.lock`, while the block runs.

    Temporary files of killed processes are deleted. A folder that the block leaves empty is removed
    again, with its parents, if they were created here. Raises UserError if the folder cannot be
    written to, or if another process holds its lock; the message says that it "is `doing`".
    """
    created = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    with locked(folder / LOCK, doing, timeout=1):  # is_locked holds it for a moment
        try:
            for temporary in folder.glob(".*.tmp"):
                delete_abandoned(temporary)
            yield
        finally:
            with suppress(OSError):  # as where another process has put something there
                if created and [file.name for file in folder.iterdir()] == [LOCK]:
                    shutil.rmtree(folder)
                    for parent in created[1:]:
                        parent.rmdir()


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of a folder."""
    try:
        if folder.exists():  # taking the lock would create it
            with FileLock(folder / LOCK, fallback_to_soft=False).acquire(timeout=0):
                pass
        return False
    except Timeout:
        return True
    except OSError:  # no file can be written there, or the file system has no locks
        return False
