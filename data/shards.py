"""Token shards on disk, in the format of llm.c and modded-nanogpt, and the folder that holds them.

A shard is a header of 256 little-endian int32 (20240520, version 1, number of tokens, zeros), then
that many little-endian uint16 tokens. A folder holds `*_val_*.bin`, `*_train_*.bin` and, if this
repository made it, `meta.json`, with a copy of the tokenizer's file, `tokenizer.json`, unless the
tokenizer is built in; `progress.json` exists only while the set is being made. A set made in N
parts has `meta.1-of-N.json` to `meta.N-of-N.json` instead.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NotRequired, TypedDict

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
PROGRESS = "progress.json"


class Entry(TypedDict):
    """A shard, as meta.json lists it; its name must not lead out of the folder."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[\w.-]+_(train|val)_\d+\.bin$")]
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    sha256: str


class Settings(TypedDict):
    """How a set is made: `source` names its documents, `fingerprint` changes with them."""

    tokenizer: str  # see data.tokenizer.identify
    shard_size: int
    fingerprint: str
    source: str
    parts: NotRequired[int]  # their number, of a set made in parts


class Meta(Settings):
    """The content of meta.json."""

    vocab_size: int
    documents: int | None  # None: of published shards
    tokens: int
    shards: list[Entry]


# Which part of a set, from 1 on, and the number of its parts.
Part = tuple[int, int]
WHOLE: Part = (1, 1)


def write_shard(path: str | Path, tokens: NDArray[np.uint16]) -> str:
    """Write tokens [n], n >= 1, as one shard, whole or not at all; returns its sha256.

    Raises ValueError where the tokens are not a non-empty one-dimensional uint16 array.
    """
    tokens = np.asarray(tokens)
    if tokens.dtype != np.uint16 or tokens.ndim != 1 or not 0 < len(tokens) < 2**31:
        raise ValueError(f"a shard is a uint16 array [n], not {tokens.dtype} {tokens.shape}")
    header = np.zeros(HEADER_INTS, dtype=HEADER)
    header[:3] = MAGIC, VERSION, len(tokens)
    digest = hashlib.sha256()
    # until it is complete its name is hidden and ends in .tmp, which no glob for shards matches
    with atomic_write(path) as file:
        for part in (header.data, np.ascontiguousarray(tokens, dtype=TOKEN).data):
            file.write(part)
            digest.update(part)
    return digest.hexdigest()


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
    if size < HEADER_BYTES:
        raise UserError(f"{path}: {size} bytes, less than a shard's header of {HEADER_BYTES}")
    magic, version, n = (int(value) for value in header)
    if magic != MAGIC:
        raise UserError(f"{path}: not a token shard: it starts with {magic}, a shard with {MAGIC}")
    if version != VERSION:
        raise UserError(f"{path}: shard version {version}, only version {VERSION} can be read")
    expected = HEADER_BYTES + n * TOKEN.itemsize
    if n < 1 or size != expected:
        raise UserError(
            f"{path}: its header gives {n} tokens, which take {expected} bytes, but the file "
            f"has {size}; it is truncated or damaged: repeat the command that made it"
        )
    return np.memmap(path, dtype=TOKEN, mode="r", offset=HEADER_BYTES, shape=(n,))


def list_shards(data_dir: str | Path, split: str) -> list[Path]:
    """Paths of a folder's shards of one split ("train" or "val"), sorted by name.

    Raises UserError where the folder does not exist, is unfinished, lacks a part of its set or a
    shard of the split that its meta.json lists, or has none.
    """
    data_dir = Path(data_dir)
    if not data_dir.is_dir():
        raise UserError(f"{data_dir}: no such folder; {_how_to_make(data_dir)}")
    if (data_dir / PROGRESS).exists() or files_of_parts(data_dir, PROGRESS):
        raise UserError(f"{data_dir}: unfinished; repeat the command that was making it")
    _check_parts(data_dir)
    needed = "" if files_of_parts(data_dir, META) else f"_{split}_"  # of parts, all shards
    for shard in (read_meta(data_dir) or {"shards": []})["shards"]:
        if needed in shard["name"] and not (data_dir / shard["name"]).exists():
            raise UserError(
                f"{data_dir}: {shard['name']} is missing, which meta.json lists: copy it there, or "
                "repeat the command that made the folder"
            )
    shards = sorted(data_dir.glob(f"*_{split}_*.bin"))
    if not shards:
        raise UserError(f"{data_dir}: no *_{split}_*.bin in it; {_how_to_make(data_dir)}")
    return shards


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
    meta, given = read_meta(data_dir), identify(tokenizer)
    if meta is not None and meta["tokenizer"] != given:
        copy = Path(data_dir, TOKENIZER)
        hint = f"; give --tokenizer={copy}" if copy.exists() else ""
        given = repr(tokenizer) if given == tokenizer else f"{tokenizer!r} ({given})"
        raise UserError(
            f"{data_dir} was made with tokenizer {meta['tokenizer']!r}, but tokenizer = {given}"
            + hint
        )


def of_part(name: str, part: Part) -> str:
    """The name under which a part keeps a file: meta.json, or meta.3-of-16.json."""
    index, count = part
    stem, _, suffix = name.rpartition(".")
    return name if part == WHOLE else f"{stem}.{index}-of-{count}.{suffix}"


def files_of_parts(data_dir: Path, name: str) -> list[Path]:
    """The paths of meta.json or progress.json of all parts that are in a folder."""
    pattern = re.compile(rf"{Path(name).stem}\.\d+-of-\d+\.json")
    return sorted(path for path in data_dir.glob("*-of-*.json") if pattern.fullmatch(path.name))


def read_meta(data_dir: str | Path, part: Part = WHOLE) -> dict | None:
    """The meta.json of a folder of shards, or of one part; None: published shards come without one.

    For a set made in parts, those that are there are combined into one. Raises UserError where a
    file is damaged, or parts of different sets are there.
    """
    data_dir = Path(data_dir)
    meta = read_json(data_dir / of_part(META, part), Meta)
    paths = files_of_parts(data_dir, META)
    if meta is not None:
        return dict(meta)
    if part != WHOLE or not paths:
        return None
    metas = []
    for path in paths:
        if (other := read_json(path, Meta)) is None:
            raise UserError(f"{path}: a link that leads nowhere")
        metas.append(other)
        for key in ("tokenizer", "vocab_size", "shard_size", "fingerprint", "parts"):
            if other.get(key) != metas[0].get(key):
                raise UserError(
                    f"{path}: made with {key} {other.get(key)}, but {paths[0].name} with "
                    f"{metas[0].get(key)}: they are parts of different sets"
                )
    shards = [shard for other in metas for shard in other["shards"]]
    return dict(metas[0]) | {
        "documents": sum(other["documents"] or 0 for other in metas),
        "tokens": sum(other["tokens"] for other in metas),
        "shards": sorted(shards, key=lambda shard: shard["name"]),
    }


def write_meta(data_dir: str | Path, meta: dict, part: Part = WHOLE) -> None:
    """Write meta.json, or that of one part, whole or not at all: see Meta."""
    write_json(Path(data_dir) / of_part(META, part), meta)


def _check_parts(data_dir: Path) -> None:
    """Raise UserError where the folder has some parts of a set but not all."""
    found = {path.name for path in files_of_parts(data_dir, META)}
    if not found:
        return
    count = max(int(name.split("-")[-1].removesuffix(".json")) for name in found)
    if missing := [i for i in range(1, count + 1) if of_part(META, (i, count)) not in found]:
        raise UserError(
            f"{data_dir}: of {count} parts {', '.join(map(str, missing))} cannot be found: make "
            f"what is missing with --part {missing[0]}/{count} and so on, or copy it there"
        )


def _how_to_make(data_dir: Path) -> str:
    """The end of an error message: the command that makes this folder."""
    named = re.fullmatch(r"text_(\w+)", data_dir.name)
    command = f"python -m data.text [FILES] --tokenizer {named[1] if named else 'TOKENIZER'}"
    default = Path("data") / data_dir.name if named else None
    if fineweb := re.match(r"fineweb(_edu)?(\d+B)?", data_dir.name):
        edu, size = fineweb.groups()
        command = "python -m data.fineweb"
        command += " --dataset fineweb-edu" if edu else ""
        command += f" --name sample-{size}T" if size and size != "10B" else ""
        default = Path("data") / data_dir.name
    command += "" if data_dir == default else f" --out_dir {data_dir}"
    return f"make it with `{command}`"
