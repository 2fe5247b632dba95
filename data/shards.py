"""Token shards on disk, in the format of llm.c and modded-nanogpt, and the folder that holds them.

A shard is a header of 256 little-endian int32 (20240520, version 1, number of tokens, zeros), then
that many little-endian uint16 tokens. A folder holds `*_val_*.bin`, `*_train_*.bin` and, if this
repository made it, `meta.json`; `progress.json` exists only while the set is being made.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

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

    Raises UserError where the folder does not exist, is unfinished, or has no shard of the split.
    """
    data_dir = Path(data_dir)
    if not data_dir.is_dir():
        raise UserError(f"{data_dir}: no such folder; {_how_to_make(data_dir)}")
    if (data_dir / PROGRESS).exists():
        raise UserError(f"{data_dir}: unfinished; repeat the command that was making it")
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
    meta = read_meta(data_dir)
    if meta is not None and meta.get("tokenizer") != tokenizer:
        raise UserError(
            f"{data_dir} was made with tokenizer {meta.get('tokenizer')!r}, "
            f"but tokenizer = {tokenizer!r}"
        )


def read_meta(data_dir: str | Path) -> dict | None:
    """The meta.json of a folder of shards, or None: published shards come without one.

    Raises UserError where the file is there but is not a JSON object.
    """
    meta = read_json(Path(data_dir) / META)
    if meta is not None and not isinstance(meta, dict):
        raise UserError(
            f"{Path(data_dir) / META}: not a JSON object; delete it or make the set again"
        )
    return meta


def write_meta(data_dir: str | Path, meta: dict) -> None:
    """Write meta.json, whole or not at all.

    Its keys are `tokenizer`, `vocab_size`, `shard_size`, `source`, `fingerprint`, `documents`,
    `tokens` and `shards`, a list of `name`, `tokens` and `sha256`.
    """
    write_json(Path(data_dir) / META, meta)


def _how_to_make(data_dir: Path) -> str:
    """The end of an error message: the command that makes this folder."""
    command = f"python -m data.text --out_dir {data_dir}"
    if fineweb := re.match(r"fineweb(_edu)?(\d+B)?", data_dir.name):
        edu, size = fineweb.groups()
        command = "python -m data.fineweb"
        command += " --dataset fineweb-edu" if edu else ""
        command += f" --name sample-{size}T" if size and size != "10B" else ""
        if data_dir != Path("data") / data_dir.name:
            command += f" --out_dir {data_dir}"
    return f"make it with `{command}`"
