"""Token shards on disk, in the format of llm.c and modded-nanogpt, and the folder that holds them.

A shard is a header of 256 little-endian int32 (20240520, version 1, number of tokens, zeros), then
that many little-endian uint16 tokens. A folder holds `*_val_*.bin`, `*_train_*.bin` and, if this
repository made it, `meta.json`, with a copy of the tokenizer's file, `tokenizer.json`, unless the
tokenizer is built in.
"""

import os
import resource
import sys
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from config import TOKENIZER, identify
from errors import UserError
from runtime.files import atomic_write, read_json, write_json

MAGIC = 20240520
VERSION = 1
HEADER = np.dtype("<i4")
HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * HEADER.itemsize
TOKEN = np.dtype("<u2")

META = "meta.json"


Count = Annotated[int, msgspec.Meta(ge=0)]
# Where a shard starts: the number of the stream, a state of its reading, and a token from there.
Place = tuple[Count, Any, Count]


class Entry(TypedDict):
    """A shard, as meta.json lists it; its name must not lead out of the folder."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[\w.-]+_(train|val)_\d+\.bin$")]
    tokens: Count
    next: Place  # of the shard after it


class Meta(TypedDict):
    """The content of meta.json."""

    tokenizer: str  # see config.identify
    shard_size: int
    documents: str  # a hash that changes when they do
    source: str  # where they come from
    repeat: NotRequired[tuple[float, Count]]  # the share and length of data.build.with_repeats

    complete: bool  # otherwise more shards are to be made
    shards: list[Entry]


def write_shard(path: str | Path, tokens: NDArray[np.uint16]) -> None:
    """Write tokens [n], n >= 1, as one shard, whole or not at all."""
    header = np.zeros(HEADER_INTS, dtype=HEADER)
    header[:3] = MAGIC, VERSION, len(tokens)
    # until it is complete its name is hidden and ends in .tmp, which no glob for shards matches
    with atomic_write(path) as file:
        file.write(header.data)
        file.write(np.ascontiguousarray(tokens, dtype=TOKEN).data)


def open_shard(path: str | Path) -> tuple[FileIO, int]:
    """A shard's file, and its number of tokens by its header.

    Raises UserError where the file is missing, is not a shard of this version, or does not have
    exactly the size that follows from its header.
    """
    try:
        file = FileIO(path)
        size, start = os.fstat(file.fileno()).st_size, np.fromfile(file, HEADER, 3).tolist()
    except OSError as error:
        raise UserError(f"{path}: the shard cannot be read: {error.strerror}") from error
    if len(start) < 3 or start[:2] != [MAGIC, VERSION]:
        raise UserError(f"{path}: not a shard: it starts with {start[:2]}, not {MAGIC}, {VERSION}")
    expected = HEADER_BYTES + start[2] * TOKEN.itemsize
    if start[2] < 1 or size != expected:
        raise UserError(
            f"{path}: its header gives {start[2]} tokens, which take {expected} bytes, but the "
            f"file has {size}; it is truncated or damaged: repeat the command that made it"
        )
    return file, start[2]


def open_shards(paths: list[Path]) -> list[tuple[FileIO, int]]:
    """`open_shard` of many: often a process may have 1,024 open files, and more if it asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + len(paths), hard), hard))
    return [open_shard(path) for path in paths]


def read_shard(path: str | Path, count: int = sys.maxsize) -> NDArray[np.uint16]:
    """The first `count` tokens of a shard, or all, [n]. Raises UserError as `open_shard` does."""
    file, available = open_shard(path)
    with file:
        return np.fromfile(path, TOKEN, min(available, count), offset=HEADER_BYTES)


def read_windows(
    files: Sequence[FileIO], places: NDArray[np.int64], length: int, vocab_size: int
) -> NDArray[np.uint16]:
    """The windows [n, length] at `places` [n, 2]: numbers of a file and of a token in it.

    Only these bytes are read; a page fault of a memory map would read megabytes ahead. Raises
    UserError where a file ends before, or a token is not below `vocab_size`.
    """
    windows = np.empty((len(places), length), dtype=TOKEN)
    read = [(files[number], start) for number, start in places.tolist()]
    if hasattr(os, "posix_fadvise"):  # not on macOS
        for file, start in read:  # a disk that knows all windows reads many at the same time
            at = HEADER_BYTES + start * TOKEN.itemsize
            os.posix_fadvise(file.fileno(), at, windows[0].nbytes, os.POSIX_FADV_WILLNEED)
    for window, (file, start) in zip(windows, read, strict=True):
        at = HEADER_BYTES + start * TOKEN.itemsize
        if os.preadv(file.fileno(), [window.data], at) < window.nbytes:
            raise UserError(f"{file.name} has shrunk: it ends before token {start + length}")
    if windows.max() >= vocab_size:
        for window, (file, start) in zip(windows, read, strict=True):
            check_ids(file.name, window, vocab_size, start)
    return windows


def is_whole(folder: Path, shard: Entry) -> bool:
    """Whether a shard that meta.json lists is there, with its size."""
    path, size = folder / shard["name"], HEADER_BYTES + shard["tokens"] * TOKEN.itemsize
    return path.is_file() and path.stat().st_size == size


def list_shards(data_dir: str | Path, split: str) -> list[Path]:
    """Paths of a folder's shards of one split ("train" or "val"), sorted by name.

    Raises UserError where the folder is unfinished, lacks a shard of the split that its meta.json
    lists, or has none.
    """
    found = sorted(Path(data_dir).glob(f"*_{split}_*.bin"))
    meta = read_meta(data_dir)
    if meta and not meta["complete"]:
        raise UserError(f"{data_dir}: unfinished; repeat the command that was making it")
    listed = {shard["name"] for shard in meta["shards"]} if meta else set()
    for name in sorted(listed - {path.name for path in found}):
        if f"_{split}_" in name:
            raise UserError(
                f"{data_dir}: {name} is missing, which meta.json lists: copy it there, or repeat "
                "the command that made the folder"
            )
    if not found:
        raise UserError(
            f"{data_dir}: no *_{split}_*.bin there; `python -m data.text` or `data.fineweb` make "
            f"it, with --out_dir {data_dir} and the tokenizer of the run: docs/data.md"
        )
    return found


def check_ids(source: str | Path, tokens: np.ndarray, vocab_size: int, start: int = 0) -> None:
    """Raise UserError unless all tokens [n], which begin at token `start` of `source`, are below
    `vocab_size`."""
    if tokens.max() >= vocab_size:
        at = int(np.argmax(tokens >= vocab_size))
        raise UserError(
            f"{source}: token {start + at} is {tokens[at]}, but the vocabulary is 0 to "
            f"{vocab_size - 1}; the shard was made with another tokenizer"
        )


def check_tokenizer(data_dir: str | Path, tokenizer: str) -> None:
    """Raise UserError where meta.json says that another tokenizer made these shards."""
    identity, meta = identify(tokenizer), read_meta(data_dir)
    if meta and meta["tokenizer"] != identity:
        copy = Path(data_dir, TOKENIZER)
        hint = f"; give --tokenizer={copy}" if copy.exists() else ""
        name = "" if identity == tokenizer else f" ({identity})"
        raise UserError(
            f"{data_dir} was made with tokenizer {meta['tokenizer']!r}, but tokenizer = "
            f"{tokenizer!r}{name}{hint}"
        )


def read_meta(data_dir: str | Path) -> Meta | None:
    """The meta.json of a folder of shards; published shards come without one.

    Raises UserError where the file is damaged.
    """
    return read_json(Path(data_dir) / META, Meta)


def write_meta(data_dir: str | Path, meta: Meta) -> None:
    write_json(Path(data_dir) / META, meta)
