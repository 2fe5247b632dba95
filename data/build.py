"""Documents to shards: tokenise on all cores, write whole shards, resume after a kill.

The tokens of the documents, each with end-of-text before it, are cut into shards of exactly
`shard_size`, the last one shorter. With each shard `progress.json` records where the next one
starts: a state of the reading, and the number of tokens from there. The next shards depend on
nothing else, neither on timing nor on the number of workers, so a set made in many attempts equals,
bit for bit, one made in a single run.
"""

import argparse
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data import shards
from data.tokenizer import BUILT_IN, copy_file, get_tokenizer, identify, split_text
from errors import UserError
from runtime.files import lock_folder, read_json, write_json

COLUMN = "text"
SHARD_SIZE = 100_000_000
# Documents read at once: more are a little faster, but take more memory where they are books.
BATCH = 16
# Characters that a worker tokenises at once: about 0.1 s of work.
TASK_CHARS = 1 << 19
# Queue length per worker: enough that none is idle while a shard is written.
TASKS_PER_WORKER = 4

# Reads documents in a fixed order. It takes a state, JSON, or None for the first document, and
# gives batches: the state from which the reading can start with them, and their texts.
Read = Callable[[Any], Iterator[tuple[Any, list[str]]]]
# Where a shard starts: the number of the stream, a state of its reading, and a token from there.
Place = tuple[int, Any, int]
# The state of the reading at which a task starts, or None if it follows the task before; and pieces
# of documents, None before the first of each.
Task = tuple[Any, list[str | None]]


class Progress(shards.Settings):
    """The content of progress.json: what is done, and where the shard after each starts."""

    shards: list[shards.Entry]
    following: list[Place]


def add_options(parser: argparse.ArgumentParser, tokenizer: str) -> None:
    """The options that data.text and data.fineweb share, with their default tokenizer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    names = f"{', '.join(BUILT_IN)} or a tokenizer.json; default: {tokenizer}"
    parser.add_argument("--tokenizer", default=tokenizer, help=names)
    parser.add_argument("--out_dir", type=Path, help="the folder to make; default: in data/")
    parser.add_argument("--shard_size", type=int, default=SHARD_SIZE, help="tokens per shard")
    parser.add_argument("--workers", type=int, default=cores, help="threads; default: all cores")


def build(
    out_dir: Path,
    prefix: str,
    streams: list[Read],
    tokenizer: str,
    shard_size: int,
    workers: int,
    source: str,
    fingerprint: str,
) -> None:
    """Make the folder `out_dir` of shards `<prefix>_<split>_<number>.bin` and its meta.json.

    The streams are written in order, each in shards of its own: the first of two streams is for
    validation, and of a single stream the first shard. Called again, it resumes after the last
    whole shard, or says that all is done. In meta.json, `source` says where the documents come
    from, and `fingerprint` is a string that changes when they do.

    Raises UserError where a number is out of range; where the folder holds shards of other
    documents or settings, or of unknown origin; where another process is making them; or where the
    documents have too few tokens for both splits.
    """
    if not 0 < shard_size < 2**31 or workers < 1:
        raise UserError(
            f"--shard_size {shard_size} must be 1 to 2**31 - 1, and --workers {workers} at least 1"
        )
    settings: shards.Settings = {
        "tokenizer": identify(tokenizer), "shard_size": shard_size,
        "fingerprint": fingerprint, "source": source,
    }  # fmt: skip
    with claim(out_dir, settings) as meta:
        state = "already done"
        if meta is None:
            made, state = _make(out_dir, prefix, streams, tokenizer, settings, workers), "done"
            copy_file(tokenizer, out_dir)
            meta = {**settings, "shards": made}
            shards.write_meta(out_dir, meta)
        for shard in meta["shards"]:
            if not shards.is_whole(out_dir / shard["name"]):
                raise UserError(f"{out_dir}: {shard['name']} is damaged: delete the folder first")
        (out_dir / shards.PROGRESS).unlink(missing_ok=True)
    tokens = sum(shard["tokens"] for shard in meta["shards"])
    print(f"{out_dir}: {state}, {tokens:,} tokens in {len(meta['shards'])} shards")


@contextmanager
def claim(out_dir: Path, settings: shards.Settings) -> Iterator[shards.Meta | None]:
    """Lock the folder while its shards are made; yields its meta.json, or None.

    Raises UserError where the folder cannot be written to, another process holds the lock, or the
    folder has shards made from other settings; only `source` may differ.
    """
    with lock_folder(out_dir, "making this set"):
        meta = shards.read_meta(out_dir)
        found = meta or read_json(out_dir / shards.PROGRESS, shards.Settings)
        if any(out_dir.glob("*.bin")):
            remedy = "use another --out_dir, or delete the folder to make it again"
            if found is None:
                raise UserError(f"{out_dir}: holds shards that this command did not make; {remedy}")
            for key in ("tokenizer", "shard_size"):
                if found[key] != settings[key]:
                    raise UserError(
                        f"{out_dir}: made with {key} {found[key]}, not {settings[key]}; {remedy}"
                    )
            if found["fingerprint"] != settings["fingerprint"]:
                raise UserError(
                    f"{out_dir}: made from other documents ({found['source']}) than "
                    f"{settings['source']} has now; {remedy}"
                )
        yield meta


def _make(
    out_dir: Path,
    prefix: str,
    streams: list[Read],
    tokenizer: str,
    settings: shards.Settings,
    workers: int,
) -> list[shards.Entry]:
    """Write the shards that are missing; returns all."""
    progress: Progress = read_json(out_dir / shards.PROGRESS, Progress) or {
        **settings, "shards": [], "following": []
    }  # fmt: skip
    found = zip(progress["shards"], progress["following"], strict=False)
    whole = list(takewhile(lambda pair: shards.is_whole(out_dir / pair[0]["name"]), found))
    done, places = [shard for shard, _ in whole], [place for _, place in whole]
    if done:
        print(f"{out_dir}: {len(done)} shards exist; continuing after them")
    place = places[-1] if places else (0, None, 0)

    def save() -> None:
        write_json(out_dir / shards.PROGRESS, {**settings, "shards": done, "following": places})

    save()
    size, tokens_done = settings["shard_size"], sum(shard["tokens"] for shard in done)
    with tqdm(initial=tokens_done, unit="tok", unit_scale=True, desc=str(out_dir)) as bar:
        for stream, tokens, following in _cut(streams, place, size, tokenizer, workers, bar):
            split = "val" if stream < len(streams) - 1 or not done else "train"
            name = f"{prefix}_{split}_{len(done):06d}.bin"
            sha256 = shards.write_shard(out_dir / name, tokens)
            done.append({"name": name, "tokens": len(tokens), "sha256": sha256})
            places.append(following)
            save()
    if len(done) < 2:
        raise UserError(
            f"{out_dir}: the {bar.n:,} tokens fill only one shard, for validation: delete the "
            f"folder, and give more text or a smaller --shard_size than {size:,}"
        )
    return done


def _cut(
    streams: list[Read], place: Place, shard_size: int, tokenizer: str, workers: int, bar: tqdm
) -> Iterator[tuple[int, NDArray[np.uint16], Place]]:
    """The shards from `place` on: number of the stream, tokens [n], and the place of the next."""
    first, state, skipped = place
    buffer = np.empty(shard_size, dtype=np.uint16)
    for stream in range(first, len(streams)):
        filled, passed = 0, 0  # tokens in the buffer; tokens since `state`
        for at, tokens in _tokenise(_tasks(streams[stream](state)), tokenizer, workers):
            if at is not None:
                state, passed = at, 0
            taken = min(skipped, len(tokens))
            skipped -= taken
            bar.update(len(tokens) - taken)
            while taken < len(tokens):
                n = min(len(tokens) - taken, shard_size - filled)
                buffer[filled : filled + n] = tokens[taken : taken + n]
                filled, taken = filled + n, taken + n
                if filled == shard_size:
                    yield stream, buffer, (stream, state, passed + taken)
                    filled = 0
            passed += len(tokens)
        if filled:
            yield stream, buffer[:filled], (stream + 1, None, 0)
        state, skipped = None, 0


def _tasks(batches: Iterable[tuple[Any, list[str]]]) -> Iterator[Task]:
    """Split and group texts into tasks of about TASK_CHARS characters.

    A task of many short documents ends with a batch, so that the next one has a state; a batch of
    long documents is divided.
    """
    pieces: list[str | None] = []
    first, chars = None, 0
    for state, texts in batches:
        if pieces and (first is None or chars >= TASK_CHARS):
            yield first, pieces
            pieces, chars = [], 0
        first = first if pieces else state
        for text in texts:
            pieces.append(None)
            for piece in split_text(text, TASK_CHARS):
                pieces.append(piece)
                chars += len(piece)
                if chars >= 2 * TASK_CHARS:
                    yield first, pieces
                    first, pieces, chars = None, [], 0
    if pieces:
        yield first, pieces


def _tokenise(
    tasks: Iterable[Task], tokenizer: str, workers: int
) -> Iterator[tuple[Any, NDArray[np.uint16]]]:
    """The state and the tokens [n] of each task, in order.

    Threads are enough: tokenizers leave Python's lock to others while they work.
    """
    known = get_tokenizer(tokenizer)
    pending: deque[tuple[Any, Future[NDArray[np.uint16]]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for state, pieces in tasks:
            pending.append((state, pool.submit(known.encode_documents, pieces)))
            if len(pending) == workers * TASKS_PER_WORKER:
                state, encoded = pending.popleft()
                yield state, encoded.result()
        while pending:
            state, encoded = pending.popleft()
            yield state, encoded.result()
