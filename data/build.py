"""Documents to shards: tokenise on all cores, write whole shards, resume after a kill.

The tokens of the documents, each with end-of-text before it, are cut into shards of exactly
`shard_size`, the last one shorter. With each shard meta.json records where the next one starts: a
state of the reading, and the number of tokens from there. The next shards depend on nothing else,
neither on timing nor on the number of workers, so the shards that are made in many attempts equal,
bit for bit, the shards of a single run.
"""

import argparse
import hashlib
import json
import os
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from config import VOCABULARY, identify
from data import shards
from data.tokenizer import copy_tokenizer, get_tokenizer, split_text
from errors import UserError
from runtime.files import lock_folder

COLUMN = "text"
SHARD_SIZE = 100_000_000
# Documents read at once: more are a little faster, but take more memory where they are books.
BATCH = 16
# Longer documents are tokenised in pieces of this many characters: about 0.1 s of work.
PIECE_CHARS = 1 << 19
# Pieces, and ends of text between them, that a worker tokenises at once.
TASK_PIECES = 8
# Queue length per worker: enough that none is idle while a batch is read.
TASKS_PER_WORKER = 16

# Reads documents in a fixed order. It takes a state, JSON, or None for the first document, and
# gives batches: the state from which the reading can start with them, and their texts.
Read = Callable[[Any], Iterator[tuple[Any, list[str]]]]


def add_options(parser: argparse.ArgumentParser, tokenizer: str) -> None:
    """The options that data.text and data.fineweb share, with their default tokenizer."""
    names = f"{', '.join(VOCABULARY)} or a tokenizer.json; default: {tokenizer}"
    parser.add_argument("--tokenizer", default=tokenizer, help=names)
    parser.add_argument("--out_dir", type=Path, help="the folder to make; default: in data/")
    parser.add_argument("--shard_size", type=int, default=SHARD_SIZE, help="tokens per shard")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="threads")


def build(
    out_dir: Path,
    prefix: str,
    streams: list[Read],
    options: argparse.Namespace,
    source: str,
    documents: list,
) -> None:
    """Make the folder `out_dir` of shards `<prefix>_<split>_<number>.bin` and its meta.json.

    The streams are written in order, each in shards of its own: the first of two streams is for
    validation, and of a single stream the first shard. `options` are those of `add_options`, and
    the two of `with_repeats`, `repeat` and `within`, for the streams after the first.
    Called again, it resumes after the last whole shard, or says that all is done. In meta.json,
    `source` says where the documents come from; `documents` is JSON that changes when they do.

    Raises UserError where a number is out of range; where the folder holds shards of other
    documents or settings, or of unknown origin; where another process is making them; or where the
    documents have too few tokens for both splits.
    """
    if not 0 < options.shard_size < 2**31:
        raise UserError(f"--shard_size {options.shard_size} must be 1 to 2**31 - 1")
    if options.workers < 1:
        raise UserError(f"--workers {options.workers} must be at least 1")
    wanted: shards.Meta = {
        "tokenizer": identify(options.tokenizer),
        "shard_size": options.shard_size,
        "documents": hashlib.sha256(json.dumps(documents).encode()).hexdigest(),
        "source": source,
        "complete": False,
        "shards": [],
    }
    if options.repeat:
        wanted["repeat"] = (options.repeat, options.within)
    with lock_folder(out_dir, "making this set"):
        meta = _resume(out_dir, wanted)
        state = "already done" if meta["complete"] else "done"
        if not meta["complete"]:
            _make(out_dir, prefix, streams, options, meta)
            copy_tokenizer(options.tokenizer, out_dir)
            shards.write_meta(out_dir, {**meta, "complete": True})
    tokens = sum(shard["tokens"] for shard in meta["shards"])
    print(f"{out_dir}: {state}, {tokens:,} tokens in {len(meta['shards'])} shards")


def _resume(out_dir: Path, wanted: shards.Meta) -> shards.Meta:
    """The meta.json to go on from: its shards up to the first one that is missing or damaged.

    Raises UserError where the folder has shards of other settings than those of `wanted`; only
    `source` may differ.
    """
    meta = shards.read_meta(out_dir)
    if not any(out_dir.glob("*.bin")):
        return wanted
    remedy = "use another --out_dir, or delete the folder to make it again"
    if meta is None:
        raise UserError(f"{out_dir}: holds shards that this command did not make; {remedy}")
    for key in ("tokenizer", "shard_size", "documents", "repeat"):
        if (found := meta.get(key)) != wanted.get(key):
            raise UserError(f"{out_dir}: made with {key} {found}, not {wanted.get(key)}; {remedy}")
    whole = list(takewhile(lambda shard: shards.is_whole(out_dir, shard), meta["shards"]))
    return {**meta, "complete": meta["complete"] and whole == meta["shards"], "shards": whole}


def _make(
    out_dir: Path, prefix: str, streams: list[Read], options: argparse.Namespace, meta: shards.Meta
) -> None:
    """Write the shards that are missing, and meta.json after each."""
    done = meta["shards"]
    place = done[-1]["next"] if done else (0, None, 0)
    shards.write_meta(out_dir, meta)
    before = sum(shard["tokens"] for shard in done)
    with tqdm(initial=before, unit="tok", unit_scale=True, desc=str(out_dir)) as bar:
        for stream, tokens, following in _cut(streams, place, options, bar):
            split = "val" if stream < len(streams) - 1 or not done else "train"
            name = f"{prefix}_{split}_{len(done):06d}.bin"
            shards.write_shard(out_dir / name, tokens)
            done.append({"name": name, "tokens": len(tokens), "next": following})
            shards.write_meta(out_dir, meta)
    if len(done) < 2:
        raise UserError(
            f"{out_dir}: the {bar.n:,} tokens fill only one shard, for validation: delete the "
            f"folder, and give more text or a smaller --shard_size than {options.shard_size:,}"
        )


def _cut(
    streams: list[Read], place: shards.Place, options: argparse.Namespace, bar: tqdm
) -> Iterator[tuple[int, NDArray[np.uint16], shards.Place]]:
    """The shards from `place` on: number of the stream, tokens [n], and the place of the next."""
    first, state, skipped = place
    buffer = np.empty(options.shard_size, dtype=np.uint16)
    for stream in range(first, len(streams)):
        filled, passed = 0, 0  # tokens in the buffer; tokens since `state`
        batches = streams[stream](state)
        for at, tokens in _tokenise(batches, options, options.repeat if stream else 0):
            if at is not None:
                state, passed = at, 0
            taken = min(skipped, len(tokens))
            skipped -= taken
            bar.update(len(tokens) - taken)
            while taken < len(tokens):
                n = min(len(tokens) - taken, len(buffer) - filled)
                buffer[filled : filled + n] = tokens[taken : taken + n]
                filled, taken = filled + n, taken + n
                if filled == len(buffer):
                    yield stream, buffer, (stream, state, passed + taken)
                    filled = 0
            passed += len(tokens)
        if filled:
            yield stream, buffer[:filled], (stream + 1, None, 0)
        state, skipped = None, 0


def _tokenise(
    batches: Iterator[tuple[Any, list[str]]], options: argparse.Namespace, repeat: float
) -> Iterator[tuple[Any, NDArray[np.uint16]]]:
    """The tokens [n] of each task in order; with the first task of a batch its state, else None.

    Threads are enough: tokenizers leave Python's lock to others while they work.
    """
    known = get_tokenizer(options.tokenizer)
    eot = np.array([known.eot], dtype=np.uint16)

    def encode(pieces: list[str | None]) -> NDArray[np.uint16]:
        parts = [eot if piece is None else known.encode_array(piece) for piece in pieces]
        if repeat:  # an end of text is too short to be repeated
            parts = [with_repeats(part, repeat, options.within) for part in parts]
        return np.concatenate(parts)

    def tasks() -> Iterator[tuple[Any, Future[NDArray[np.uint16]]]]:
        for state, texts in batches:
            # None stands for the end of text before each document
            cut = (chain([None], split_text(text, PIECE_CHARS)) for text in texts)
            pieces = chain.from_iterable(cut)
            while task := list(islice(pieces, TASK_PIECES)):
                yield state, pool.submit(encode, task)
                state = None

    with ThreadPoolExecutor(options.workers) as pool:
        queue = tasks()
        running = deque(islice(queue, options.workers * TASKS_PER_WORKER))
        while running:
            state, task = running.popleft()
            yield state, task.result()
            running.extend(islice(queue, 1))


def with_repeats(tokens: NDArray[np.uint16], share: float, within: int) -> NDArray[np.uint16]:
    """The tokens [n], where this share of their passages is followed by an excerpt of itself.

    A passage has `within` >= 16 tokens. The excerpt has 1/8 to 1/4 as many, and begins anywhere in
    the passage, but so that it and its copy lie within `within` tokens. The choice is random with
    the tokens as the seed, so it depends on nothing else.
    """
    rng = random.Random(zlib.crc32(tokens.data))
    parts = []
    for passage in np.split(tokens, range(within, len(tokens), within)):
        parts.append(passage)
        length = rng.randint(within // 8, within // 4)
        if rng.random() < share and length <= len(passage):
            # from the excerpt's first token to the first token of its copy
            lag = rng.randint(length, min(len(passage), within - length))
            start = len(passage) - lag
            parts.append(passage[start : start + length])
    return np.concatenate(parts)
