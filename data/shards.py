"""Token shards on disk, in the format of llm.c and modded-nanogpt, and the folder that holds them.

A shard is a header of 256 little-endian int32 (20240520, version 1, number of tokens, zeros), then
that many little-endian uint16 tokens. A folder holds `*_val_*.bin`, `*_train_*.bin` and, if this
repository made it, `meta.json`, with a copy of the tokenizer's file, `tokenizer.json`, unless the
tokenizer is built in.
"""

import functools
import hashlib
import os
import re
import sys
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from data.vocabulary import TOKENIZER, identify
from errors import UserError
from runtime.files import atomic_write, read_json, write_json

MAGIC = 20240520
VERSION = 1
HEADER = np.dtype("<i4")
HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * HEADER.itemsize
TOKEN = np.dtype("<u2")

META = "meta.json"

# If the shards of a split exceed WHOLE_BYTES together, only START_BYTES of each are hashed.
WHOLE_BYTES = 1 << 28
START_BYTES = 1 << 20

# Of the data of a run: a hash or description for each name, such as "training shards".
Fingerprint = dict[str, str]
# The names in a Fingerprint whose data are made by code, not read from files.
SIMULATED = ("recall", "recall sequences", "orbits")

Tokens = NDArray[np.uint16]
Shard = tuple[FileIO, int]  # an open file, and its number of tokens

Count = Annotated[int, msgspec.Meta(ge=0)]


class Place(NamedTuple):
    """Where a shard starts in the documents."""

    stream: Count  # its index
    state: Any  # from which the stream is read; None: from its start
    skip: Count  # tokens from there to the shard


class Entry(TypedDict):
    """A shard, as meta.json lists it; its name must not lead out of the folder."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[\w.-]+_(train|val)_\d+\.bin$")]
    tokens: Count
    sha256: str  # of the file, as it was made
    next: Place  # of the shard after it


class Meta(TypedDict):
    """The content of meta.json."""

    tokenizer: str  # as data.vocabulary.identify names it
    shard_size: int
    documents: str  # a hash that changes when the documents do
    content: NotRequired[str]  # a hash of the files' checksums; data.text has them in `documents`
    source: str  # where the documents come from
    repeat: NotRequired[tuple[float, Count]]  # the share and length of data.build.with_repeats
    split_at: NotRequired[str]  # the mark between documents
    complete: bool  # otherwise more shards are to be made
    shards: list[Entry]


def write_shard(path: str | Path, tokens: Tokens) -> None:
    """Write tokens [n], n >= 1, as one shard, whole or not at all."""
    header = np.zeros(HEADER_INTS, dtype=HEADER)
    header[:3] = [MAGIC, VERSION, len(tokens)]
    # until it is complete its name is hidden and ends in .tmp, which no glob for shards matches
    with atomic_write(path) as file:
        file.write(header.data)
        file.write(np.ascontiguousarray(tokens, dtype=TOKEN).data)


def open_shard(path: str | Path) -> Shard:
    """Open a shard; returns its file, and its number of tokens by its header.

    Raises UserError if the file is missing, is not a shard of this version, or does not have
    exactly the size that follows from its header.
    """
    try:
        file = FileIO(path)
        size = os.fstat(file.fileno()).st_size
        header = np.fromfile(file, HEADER, 3).tolist()
    except OSError as error:
        raise UserError(f"{path}: the shard cannot be read: {error.strerror}") from error
    if len(header) < 3 or header[:2] != [MAGIC, VERSION]:
        raise UserError(f"{path}: not a shard: it starts with {header[:2]}, not {MAGIC}, {VERSION}")
    tokens = header[2]
    expected = byte_offset(tokens)
    if tokens < 1 or size != expected:
        raise UserError(
            f"{path}: its header gives {tokens} tokens, which take {expected} bytes, but the "
            f"file has {size}; it is truncated or damaged: repeat the command that made it"
        )
    return file, tokens


def byte_offset(index: int) -> int:
    """The byte of a shard's file where token `index` begins, or the file's end after the last."""
    return HEADER_BYTES + index * TOKEN.itemsize


def open_shards(paths: list[Path]) -> list[Shard]:
    """Open many shards as `open_shard` does, after raising the limit on open files, often 1,024."""
    import resource  # Windows has none

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + len(paths), hard), hard))
    return [open_shard(path) for path in paths]


def read_shard(path: str | Path, count: int = sys.maxsize) -> Tokens:
    """Read the first `count` tokens of a shard, or all, [n]; raises UserError as `open_shard`."""
    file, available = open_shard(path)
    with file:
        return np.fromfile(path, TOKEN, min(available, count), offset=HEADER_BYTES)


def has_token(path: Path, token: int) -> bool:
    """Tell whether a shard has a token; a common one is near its start."""
    return token in read_shard(path, START_BYTES // TOKEN.itemsize) or token in read_shard(path)


def read_spans(files: Sequence[FileIO], spans: NDArray[np.int64], vocab_size: int) -> Tokens:
    """Read spans [n, 3], one after another: the index of a file, of a token in it, and a length.

    Only these bytes are read; a page fault of a memory map would read megabytes ahead. Raises
    UserError if a file ends before its span does, or a token is not below `vocab_size`.
    """
    if hasattr(os, "posix_fadvise"):  # not on macOS
        # a disk that knows all spans reads many at the same time
        for index, start, length in spans.tolist():
            descriptor = files[index].fileno()
            size = length * TOKEN.itemsize
            os.posix_fadvise(descriptor, byte_offset(start), size, os.POSIX_FADV_WILLNEED)
    chunks = []
    for index, start, length in spans.tolist():
        file = files[index]
        size = length * TOKEN.itemsize
        content = os.pread(file.fileno(), size, byte_offset(start))
        if len(content) < size:
            raise UserError(f"{file.name} has shrunk: it ends before token {start + length}")
        tokens = np.frombuffer(content, TOKEN)
        check_ids(file.name, tokens, vocab_size, start)
        chunks.append(tokens)
    return np.concatenate(chunks)


def is_whole(folder: Path, shard: Entry) -> bool:
    """Whether a shard that meta.json lists is in the folder, with its size."""
    path = folder / shard["name"]
    return path.is_file() and path.stat().st_size == byte_offset(shard["tokens"])


def list_shards(data_dir: str | Path, split: str) -> list[Path]:
    """List the paths of a folder's shards of one split ("train" or "val"), sorted by name.

    Raises UserError if the folder is incomplete, lacks a shard of the split that its meta.json
    lists, or has no shard of the split.
    """
    meta = read_meta(data_dir)
    if meta and not meta["complete"]:
        raise UserError(
            f"{data_dir}: incomplete; rerun the command that was building it, which resumes or "
            "says why it cannot"
        )
    listed = meta["shards"] if meta else []
    for shard in listed:
        name = shard["name"]
        if is_in_split(name, split) and not Path(data_dir, name).exists():
            raise UserError(
                f"{data_dir}: {name} is missing, which meta.json lists: copy it there, or repeat "
                "the command that made the folder"
            )
    paths = sorted(path for path in Path(data_dir).glob("*.bin") if is_in_split(path.name, split))
    if not paths:
        missing = f"has no *_{split}_*.bin" if Path(data_dir).exists() else "does not exist"
        raise UserError(
            f"{data_dir} {missing}: name the folder of the shards with --data_dir, or make it: "
            "`python -m data.fineweb`, or for text of your own `python -m data.text` (docs/data.md)"
        )
    return paths


def is_in_split(name: str, split: str) -> bool:
    """Whether a file is a shard of a split, such as my_val_set_train_000001.bin of "train"."""
    return re.search(rf"_{split}_[^_]+\.bin$", name) is not None


def fingerprint_of(data_dir: str | Path) -> Fingerprint:
    """Return what identifies the shards of a folder, whatever its path.

    It has a hash of the shards of each split and, if there is a meta.json, a hash of the checksums
    of all shards when they were made. Raises UserError as `list_shards` does.
    """
    fingerprint = {
        "training shards": hash_shards(data_dir, "train"),
        "validation shards": hash_shards(data_dir, "val"),
    }
    meta = read_meta(data_dir)
    if meta is not None:
        fingerprint["text"] = hash_hashes([shard["sha256"] for shard in meta["shards"]])
    return fingerprint


def data_difference(before: Fingerprint, now: Fingerprint) -> str | None:
    """Name what differs between two fingerprints; None if all that both of them record is equal."""
    for name in before:
        if name in now and now[name] != before[name]:
            return name
    return None


def hash_shards(data_dir: str | Path, split: str) -> str:
    """Hash the shards of a split in order, whatever they are called.

    All bytes are hashed if they are at most WHOLE_BYTES together; otherwise the first START_BYTES
    of each shard, with the header, which has its size. Raises UserError as `list_shards`, and where
    a shard cannot be read.
    """
    paths = list_shards(data_dir, split)
    try:
        stats = [path.stat() for path in paths]
        is_small = sum(stat.st_size for stat in stats) <= WHOLE_BYTES
        count = WHOLE_BYTES if is_small else START_BYTES
        hashes = []
        for path, stat in zip(paths, stats, strict=True):
            hashes.append(_hash_start(path, count, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    except OSError as error:
        message = f"{error.filename}: the shard cannot be read: {error.strerror}"
        raise UserError(message) from error
    return hash_hashes(hashes)


@functools.cache
def _hash_start(path: Path, count: int, *version: int) -> str:
    """Hash the first `count` bytes of a file, of which the file system says this version."""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read(count)).hexdigest()


def hash_hashes(hashes: list[str]) -> str:
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def check_ids(
    source: str | Path, tokens: NDArray[np.integer], vocab_size: int, start: int = 0
) -> None:
    """Raise UserError if one of these tokens [n] is not below `vocab_size`.

    `source` and `start`, the first token's place in it, are for the message.
    """
    if tokens.max() >= vocab_size:
        first = int(np.argmax(tokens >= vocab_size))
        raise UserError(
            f"{source}: token {start + first} is {tokens[first]}, but the vocabulary is 0 to "
            f"{vocab_size - 1}; it was made with another tokenizer"
        )


def check_tokenizer(data_dir: str | Path, tokenizer: str) -> None:
    """Raise UserError if meta.json says that another tokenizer made these shards."""
    identity = identify(tokenizer)
    meta = read_meta(data_dir)
    if meta and meta["tokenizer"] != identity:
        copy = Path(data_dir, TOKENIZER)
        hint = f"; to train on it: --tokenizer={copy}" if copy.exists() else ""
        name = "" if identity == tokenizer else f" ({identity})"
        raise UserError(
            f"{data_dir} was made with tokenizer {meta['tokenizer']!r}, but tokenizer = "
            f"{tokenizer!r}{name}{hint}"
        )


def read_meta(data_dir: str | Path) -> Meta | None:
    """Read the meta.json of a folder of shards; None if it has none, as published shards do.

    Raises UserError if the file is damaged.
    """
    return read_json(Path(data_dir) / META, Meta)


def write_meta(data_dir: str | Path, meta: Meta) -> None:
    write_json(Path(data_dir) / META, meta)
