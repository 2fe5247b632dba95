"""Token shards on disk, in the format of llm.c and modded-nanogpt, and the folder that holds them.

A shard is a header of 256 little-endian int32 (20240520, version 1, number of tokens, zeros), then
that many little-endian uint16 tokens. A folder holds `*_val_*.bin`, `*_train_*.bin` and, if this
repository made it, `meta.json`, with a copy of the tokenizer's file, `tokenizer.json`, unless the
tokenizer is built in. A set made in N parts is a folder of N such folders, `part-1-of-N` to
`part-N-of-N`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data.tokenizer import TOKENIZER, identify
from errors import UserError
from runtime.files import atomic_write, read_json, write_json

MAGIC = 20240520
VERSION = 1
HEADER = np.dtype("<i4")
HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * HEADER.itemsize
TOKEN = np.dtype("<u2")

META = "meta.json"
HOW_TO_MAKE = "make it with `python -m data.fineweb` or `python -m data.text`: docs/data.md"


Count = Annotated[int, msgspec.Meta(ge=0)]
# Where a shard starts: the number of the stream, a state of its reading, and a token from there.
Place = tuple[Count, Any, Count]


class Entry(TypedDict):
    """A shard, as meta.json lists it; its name must not lead out of the folder."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[\w.-]+_(train|val)_\d+\.bin$")]
    tokens: Count
    next: Place  # of the shard after it


class Settings(TypedDict):
    """How a set is made: `source` names its documents, `fingerprint` changes with them."""

    tokenizer: str  # see data.tokenizer.identify
    shard_size: int
    fingerprint: str
    source: str


class Meta(Settings):
    """The content of meta.json."""

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


def read_shard(path: str | Path) -> NDArray[np.uint16]:
    """The tokens of a shard [n], as a read-only memory map.

    Raises UserError where the file is missing, is not a shard of this version, or does not have
    exactly the size that follows from its header.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if not path.is_file():  # opening a FIFO would wait for ever
            raise UserError(f"{path}: the shard cannot be read: it is not a regular file")
        header = np.fromfile(path, dtype=HEADER, count=3)
    except OSError as error:
        raise UserError(f"{path}: the shard cannot be read: {error.strerror}") from error
    start = header.tolist()
    if len(start) < 3 or start[:2] != [MAGIC, VERSION]:
        raise UserError(f"{path}: not a shard: it starts with {start[:2]}, not {MAGIC}, {VERSION}")
    n = start[2]
    expected = HEADER_BYTES + n * TOKEN.itemsize
    if n < 1 or size != expected:
        raise UserError(
            f"{path}: its header gives {n} tokens, which take {expected} bytes, but the file "
            f"has {size}; it is truncated or damaged: repeat the command that made it"
        )
    return np.memmap(path, dtype=TOKEN, mode="r", offset=HEADER_BYTES, shape=(n,))


def is_whole(path: Path) -> bool:
    """Whether `read_shard` can read this file."""
    try:
        read_shard(path)
    except UserError:
        return False
    return True


def list_shards(data_dir: str | Path, split: str) -> list[Path]:
    """Paths of a folder's shards of one split ("train" or "val"), sorted by name.

    Raises UserError where the folder does not exist, is unfinished, lacks a part of its set or a
    shard of the split that its meta.json lists, or has none.
    """
    data_dir = Path(data_dir)
    if not data_dir.is_dir():
        raise UserError(f"{data_dir}: no such folder; {HOW_TO_MAKE}")
    shards: list[Path] = []
    for folder in folders_of(data_dir):
        found = sorted(folder.glob(f"*_{split}_*.bin"))
        meta = read_meta(folder)
        if meta and not meta["complete"]:
            raise UserError(f"{folder}: unfinished; repeat the command that was making it")
        listed = {shard["name"] for shard in meta["shards"]} if meta else set()
        for name in sorted(listed - {path.name for path in found}):
            if f"_{split}_" in name:
                raise UserError(
                    f"{folder}: {name} is missing, which meta.json lists: copy it there, or repeat "
                    "the command that made the folder"
                )
        shards += found
    if not shards:
        raise UserError(f"{data_dir}: no *_{split}_*.bin in it; {HOW_TO_MAKE}")
    return shards


def folders_of(data_dir: Path) -> list[Path]:
    """The folder itself, or those of all parts. Raises UserError where a part is missing."""
    found = {path.name for path in data_dir.glob("part-*-of-*")}
    wanted = [f"part-{i}-of-{len(found)}" for i in range(1, len(found) + 1)]
    if found != set(wanted):
        raise UserError(
            f"{data_dir}: has only {', '.join(sorted(found))}: make or copy the other parts there"
        )
    return [data_dir / name for name in wanted] or [data_dir]


def check_shards(paths: Iterable[Path], vocab_size: int) -> None:
    """Read every token of these shards.

    Raises UserError where a shard cannot be read, or holds a token that is not below `vocab_size`.
    """
    shards = [(path, read_shard(path)) for path in paths]
    total = sum(len(tokens) for _, tokens in shards)
    chunk = 1 << 22
    with tqdm(total=total, desc="checking shards", unit="tok", unit_scale=True, delay=2) as bar:
        for path, tokens in shards:
            for start in range(0, len(tokens), chunk):
                part = tokens[start : start + chunk]
                check_ids(path, part, vocab_size, start)
                bar.update(len(part))


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
    identity = identify(tokenizer)
    for folder in folders_of(Path(data_dir)):
        meta = read_meta(folder)
        if meta and meta["tokenizer"] != identity:
            copy = folder / TOKENIZER
            hint = f"; give --tokenizer={copy}" if copy.exists() else ""
            name = "" if identity == tokenizer else f" ({identity})"
            raise UserError(
                f"{folder} was made with tokenizer {meta['tokenizer']!r}, but tokenizer = "
                f"{tokenizer!r}{name}{hint}"
            )


def read_meta(data_dir: str | Path) -> Meta | None:
    """The meta.json of a folder of shards; published shards come without one.

    Raises UserError where the file is damaged.
    """
    return read_json(Path(data_dir) / META, Meta)


def write_meta(data_dir: str | Path, meta: Meta) -> None:
    write_json(Path(data_dir) / META, meta)
