"""Documents to shards: tokenise on all cores, write whole shards, resume after a kill.

The tokens of the documents, each with end-of-text before it, are cut into shards of exactly
`shard_size`; the last shard may be shorter. For each shard, meta.json records where the next shard
starts: a state of the reader, and the number of tokens to skip from there. The next shards depend
on nothing else, neither on timing nor on the number of workers, so shards made in several attempts
are bit-for-bit equal to shards made in a single run.
"""

import argparse
import hashlib
import json
import os
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data import shards
from data.documents import Rules
from data.tokenizer import copy_tokenizer, get_tokenizer, split_text
from data.vocabulary import BUILT_IN, identify
from errors import UserError
from runtime.files import check_writable, lock_folder, sha256_of

COLUMN = "text"
SHARD_SIZE = 100_000_000
# Documents read at once: more are a little faster, but take more memory if they are books.
BATCH = 16
# Longer documents are tokenised in pieces of this many characters: about 0.1 s of work.
PIECE_CHARS = 1 << 19
# Queue length per worker: enough that none is idle while a batch is read.
TASKS_PER_WORKER = 16
REMEDY = "use another --out_dir, or delete the folder to make it again"

# Reads a file from a place in it on. It yields batches: the place from which reading starts with
# this batch, and its documents or its tokens.
Read = Callable[[int], Iterator[tuple[int, Any]]]
# Reads tokens in a fixed order. Takes a JSON resume state (None: the beginning) and yields
# (state, tokens [n]); state is None where reading cannot resume.
Stream = Callable[[Any], Iterator[tuple[Any, shards.Tokens]]]


def parse_options(
    parser: argparse.ArgumentParser, argv: list[str] | None, tokenizer: str
) -> argparse.Namespace:
    """Parse the command line, with the options that data.text and data.fineweb share.

    `tokenizer` is the default of --tokenizer. The result also has `rules`, which say what rows of
    the `column` are documents. Raises UserError, before any file is read, if a shared option is out
    of range.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = f"{', '.join(BUILT_IN)} or a tokenizer.json; default: {tokenizer}"
    parser.add_argument("--tokenizer", default=tokenizer, help=names)
    parser.add_argument("--out_dir", type=Path, help="the folder to make; default: in data/")
    field = f"the parquet column or JSON field of the text; default: {COLUMN}"
    parser.add_argument("--column", "--field", default=COLUMN, metavar="NAME", help=field)
    size = f"tokens per shard ({SHARD_SIZE:,})"
    parser.add_argument("--shard_size", type=int, default=SHARD_SIZE, help=size)
    workers = "threads (one per core)"
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help=workers)
    split_at = "begin a document after each MARK, such as '<|endoftext|>'"
    parser.add_argument("--split_at", metavar="MARK", help=split_at)
    options = parser.parse_args(argv)
    if not 0 < options.shard_size < 2**31:
        raise UserError(f"--shard_size {options.shard_size} must be 1 to 2**31 - 1")
    if options.workers < 1:
        raise UserError(f"--workers {options.workers} must be at least 1")
    if options.out_dir is not None:
        check_writable(options.out_dir)
    eot_text = get_tokenizer(options.tokenizer).eot_text
    options.rules = Rules(options.column, eot_text, options.split_at)
    return options


def in_turn(files: Sequence[Read], state: tuple[int, int] | None) -> Iterator[tuple[Any, Any]]:
    """Yield the batches of files, one after another; a state is (index of a file, place in it)."""
    first_file, first_place = state or (0, 0)
    for index in range(first_file, len(files)):
        for place, batch in files[index](first_place):
            yield (index, place), batch
        first_place = 0


def build(
    out_dir: Path,
    prefix: str,
    streams: Sequence[Stream],
    options: argparse.Namespace,
    source: str,
    documents: list,
    content: list | None = None,
) -> None:
    """Make a folder of shards `<prefix>_<split>_<number>.bin` and its meta.json.

    The streams are written in order, and no shard mixes two streams. Validation gets the first of
    two streams, or the first shard of a single stream. `options` is the result of `parse_options`,
    with `repeat` and `within` for `with_repeats`. A second call resumes after the last whole shard,
    or says that all is done. meta.json records `source`, and hashes of `documents` and `content`,
    JSON values that change with the documents.

    Raises UserError if the folder holds shards of other documents or settings, or of unknown
    origin; if another process is making them; or if the documents have too few tokens for both
    splits.
    """
    wanted: shards.Meta = {
        "tokenizer": identify(options.tokenizer),
        "shard_size": options.shard_size,
        "documents": hash_json(documents),
        "source": source,
        "complete": False,
        "shards": [],
    }
    if options.repeat:
        wanted["repeat"] = (options.repeat, options.within)
    if options.split_at is not None:
        wanted["split_at"] = options.split_at
    if content is not None:
        wanted["content"] = hash_json(content)
    with lock_folder(out_dir, "making this set"):
        meta = resume(out_dir, wanted, options)
        if meta["complete"]:
            outcome = "already done"
        else:
            outcome = "done"
            write_shards(out_dir, prefix, streams, meta)
            copy_tokenizer(options.tokenizer, out_dir)
            shards.write_meta(out_dir, {**meta, "complete": True})
    tokens = sum(shard["tokens"] for shard in meta["shards"])
    print(f"{out_dir}: {outcome}, {tokens:,} tokens in {len(meta['shards'])} shards")


def check_folder(out_dir: Path, options: argparse.Namespace) -> shards.Meta | None:
    """Return the meta.json of the shards in a folder; None if it has no shards.

    Raises UserError if they have other settings than `options`, or are of unknown origin, and if
    no file can be written there.
    """
    check_writable(out_dir)
    if not any(out_dir.glob("*.bin")):
        return None
    meta = shards.read_meta(out_dir)
    if meta is None:
        raise UserError(
            f"{out_dir}: holds .bin files that this command did not make; use another --out_dir"
        )
    wanted = {
        "tokenizer": identify(options.tokenizer),
        "shard_size": options.shard_size,
        "repeat": (options.repeat, options.within) if options.repeat else None,
        "split_at": options.split_at,
    }
    for key, now in wanted.items():
        before = meta.get(key)
        if before != now:
            raise UserError(f"{out_dir}: made with {key} {before}, not {now}; {REMEDY}")
    return meta


def hash_json(value: list) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def resume(out_dir: Path, wanted: shards.Meta, options: argparse.Namespace) -> shards.Meta:
    """Return the meta.json to go on from, with the shards before the first bad one.

    A shard is bad if it is missing or has the wrong size. Raises UserError if the folder has shards
    of other settings than `wanted`; only `source` may differ.
    """
    meta = check_folder(out_dir, options)
    if meta is None:
        return wanted
    has_new_content = meta.get("content") != wanted.get("content")
    if has_new_content or meta["documents"] != wanted["documents"]:
        raise UserError(
            f"{out_dir}: made from other documents, from these before they were edited, or by an "
            f"earlier version; {REMEDY}"
        )
    whole = list(takewhile(lambda shard: shards.is_whole(out_dir, shard), meta["shards"]))
    complete = meta["complete"] and whole == meta["shards"]
    return {**meta, "complete": complete, "shards": whole}


def write_shards(out_dir: Path, prefix: str, streams: Sequence[Stream], meta: shards.Meta) -> None:
    """Write the shards that are missing, and meta.json after each."""
    done = meta["shards"]
    place = done[-1]["next"] if done else shards.Place(0, None, 0)
    shards.write_meta(out_dir, meta)
    tokens_done = sum(shard["tokens"] for shard in done)
    with tqdm(initial=tokens_done, unit="tok", unit_scale=True, desc=str(out_dir)) as bar:
        for stream, tokens, next_place in cut_shards(streams, place, meta["shard_size"], bar):
            split = "val" if stream < len(streams) - 1 or not done else "train"
            name = f"{prefix}_{split}_{len(done):06d}.bin"
            shards.write_shard(out_dir / name, tokens)
            done.append(
                {
                    "name": name,
                    "tokens": len(tokens),
                    "sha256": sha256_of(out_dir / name),
                    "next": next_place,
                }
            )
            shards.write_meta(out_dir, meta)
    if len(done) < 2:
        raise UserError(
            f"{out_dir}: the {bar.n:,} tokens fill only the validation shard: delete the folder, "
            f"and give more text or a smaller --shard_size than {meta['shard_size']:,}"
        )


def cut_shards(
    streams: Sequence[Stream], place: shards.Place, shard_size: int, bar: tqdm
) -> Iterator[tuple[int, shards.Tokens, shards.Place]]:
    """Yield the shards from `place` on: stream, tokens [n], and the place of the next shard."""
    first_stream, state, skip = place
    buffer = np.empty(shard_size, dtype=np.uint16)
    for stream in range(first_stream, len(streams)):
        filled = 0  # tokens in the buffer
        passed = 0  # tokens since `state`
        for batch_state, tokens in streams[stream](state):
            if batch_state is not None:
                state = batch_state
                passed = 0
            start = min(skip, len(tokens))
            skip -= start
            bar.update(len(tokens) - start)
            while start < len(tokens):
                chunk = tokens[start : start + len(buffer) - filled]
                buffer[filled : filled + len(chunk)] = chunk
                filled += len(chunk)
                start += len(chunk)
                if filled == len(buffer):
                    yield stream, buffer, shards.Place(stream, state, passed + start)
                    filled = 0
            passed += len(tokens)
        if filled:
            yield stream, buffer[:filled], shards.Place(stream + 1, None, 0)
        state = None


def tokenise(
    files: Sequence[Read], options: argparse.Namespace, repeat: float, state: Any
) -> Iterator[tuple[Any, shards.Tokens]]:
    """Yield (state, tokens [n]) of each piece of the files' documents in order, by several threads.

    The first piece of a batch has the batch's state, the others None. `repeat` is the share of
    `with_repeats`. Threads are enough: tokenizers release the GIL while they work.
    """
    tokenizer = get_tokenizer(options.tokenizer)

    def encode(piece: str, is_first: bool) -> shards.Tokens:
        tokens = tokenizer.encode_array(piece)
        if repeat:
            tokens = with_repeats(tokens, repeat, options.within)
        if is_first:
            tokens = np.insert(tokens, 0, tokenizer.eot)  # end-of-text, before each document
        return tokens

    def pieces() -> Iterator[tuple[Any, Future[shards.Tokens]]]:
        for batch_state, documents in in_turn(files, state):
            for document in documents:
                for i, piece in enumerate(split_text(document, PIECE_CHARS)):
                    yield batch_state, pool.submit(encode, piece, i == 0)
                    batch_state = None

    with ThreadPoolExecutor(options.workers) as pool:
        queue = pieces()
        running = deque(islice(queue, options.workers * TASKS_PER_WORKER))
        while running:
            piece_state, tokens = running.popleft()
            yield piece_state, tokens.result()
            running.extend(islice(queue, 1))


def with_repeats(tokens: shards.Tokens, share: float, within: int) -> shards.Tokens:
    """After a share of the passages of `within` >= 16 tokens, insert an excerpt of the passage.

    The excerpt has 1/8 to 1/4 of `within` tokens, and a random start such that the excerpt and its
    copy lie within `within` tokens. The random choices are seeded by the tokens [n], so they depend
    on nothing else.
    """
    rng = random.Random(zlib.crc32(tokens.data))
    chunks = []
    for passage in np.split(tokens, range(within, len(tokens), within)):
        chunks.append(passage)
        length = rng.randint(within // 8, within // 4)
        if rng.random() < share and length <= len(passage):
            # from the excerpt's first token to the first token of its copy
            lag = rng.randint(length, min(len(passage), within - length))
            start = len(passage) - lag
            chunks.append(passage[start : start + length])
    return np.concatenate(chunks)
