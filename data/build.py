"""Documents to shards: tokenise on all cores, write whole shards, resume after a kill.

The tokens of a stream of documents, each with end-of-text before it, are cut into shards of exactly
`shard_size`, the last one shorter. With each shard `progress.json` records at which token of which
document the next one starts. The next shards depend on nothing else, neither on timing nor on the
number of workers, so a set made in many attempts equals, bit for bit, one made in a single run.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data import shards
from data.tokenizer import get_tokenizer, split_text
from errors import UserError
from runtime.files import check_writable, lock_folder, read_json, write_json

SHARD_SIZE = 100_000_000
# Characters sent to a worker at once: about 0.1 s of work, and well under 1 ms to send.
TASK_CHARS = 1 << 19
# Queue length per worker: enough that none is idle while a shard is written.
TASKS_PER_WORKER = 4

# Pieces of documents: (whether it is its document's first, text).
Task = list[tuple[bool, str]]
# A task's tokens [n], and the offsets at which documents start [documents].
Encoded = tuple[NDArray[np.uint16], NDArray[np.int64]]


@dataclass(frozen=True)
class Stream:
    """Documents in a fixed order, and the split that each of their shards belongs to."""

    documents: Callable[[int], Iterable[str]]  # start -> texts from document number `start` on
    count: int  # number of documents
    split: Callable[[int], str]  # number of a shard within this stream -> "train" or "val"


def build(
    out_dir: str | Path,
    prefix: str,
    streams: list[Stream],
    tokenizer: str,
    shard_size: int,
    workers: int,
    source: str,
    fingerprint: str,
) -> None:
    """Make the folder `out_dir` of shards `<prefix>_<split>_<number>.bin` and its meta.json.

    Called again, it resumes after the last whole shard, or says that all is done. The streams are
    written in order; a shard has `shard_size` tokens of one stream, whose last shard may have
    fewer. `workers` processes tokenise; 1 means this process itself. In meta.json, `source` says
    where the documents come from, and `fingerprint` is a string that changes when they do.

    Raises UserError where a number is out of range; where the folder holds shards of other
    documents or settings, or of unknown origin; where another process is making them; or where the
    documents have too few tokens for both splits.
    """
    if not 0 < shard_size < 2**31:
        raise UserError(f"shard_size {shard_size}: a shard holds 1 to {2**31 - 1} tokens")
    if workers < 1:
        raise UserError(f"workers {workers}: at least one is needed")
    out_dir = Path(out_dir)
    settings = {
        "tokenizer": tokenizer,
        "shard_size": shard_size,
        "fingerprint": fingerprint,
        "source": source,
    }
    with claim(out_dir, settings) as meta:
        state = "already done"
        if meta is None:
            meta, state = _make(out_dir, prefix, streams, settings, workers), "done"
            shards.write_meta(out_dir, meta)
        try:
            for shard in meta["shards"]:
                shards.read_shard(out_dir / shard["name"])
        except UserError as error:
            raise UserError(f"{error}; delete {out_dir} first") from error
        (out_dir / shards.PROGRESS).unlink(missing_ok=True)
    print(f"{out_dir}: {state}, {meta['tokens']:,} tokens in {len(meta['shards'])} shards")


@contextmanager
def claim(out_dir: Path, settings: dict) -> Iterator[dict | None]:
    """Lock the folder while shards are made with these settings; yields its meta.json, or None.

    `settings` are `tokenizer`, `shard_size`, `fingerprint` and `source`, as in meta.json. Raises
    UserError where the folder cannot be written to, another process holds its lock, or it has
    shards made from other settings.
    """
    check_writable(out_dir)
    with lock_folder(out_dir, "making this set"):
        meta = shards.read_meta(out_dir)
        if any(out_dir.glob("*.bin")):
            _require_same(out_dir, meta or read_json(out_dir / shards.PROGRESS), settings)
        yield meta


def all_cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Writer:
    """Adds shards to a folder and lists those that are whole, `done`, in its progress.json."""

    def __init__(self, out_dir: Path, prefix: str, settings: dict):
        self.out_dir, self.prefix, self.settings = out_dir, prefix, settings
        progress = read_json(out_dir / shards.PROGRESS)
        listed: list[dict] = progress["shards"] if progress else []
        self.done = list(takewhile(self._is_whole, listed))
        self._save()

    def add(
        self, stream: int, split: str, tokens: NDArray[np.uint16], following: tuple[int, int, int]
    ) -> None:
        """Write a shard of stream number `stream`.

        `following` is where the next one starts: stream, document and token of that document.
        """
        name = f"{self.prefix}_{split}_{len(self.done):06d}.bin"
        sha256 = shards.write_shard(self.out_dir / name, tokens)
        self.done.append(
            {
                "name": name,
                "tokens": len(tokens),
                "sha256": sha256,
                "split": split,
                "stream": stream,
                "following": following,
            }
        )
        self._save()

    def discard(self) -> None:
        """Delete all shards and progress.json."""
        for shard in self.done:
            (self.out_dir / shard["name"]).unlink()
        (self.out_dir / shards.PROGRESS).unlink()

    def _is_whole(self, shard: dict) -> bool:
        try:
            return len(shards.read_shard(self.out_dir / shard["name"])) == shard["tokens"]
        except UserError:
            return False

    def _save(self) -> None:
        write_json(self.out_dir / shards.PROGRESS, self.settings | {"shards": self.done})


def _make(out_dir: Path, prefix: str, streams: list[Stream], settings: dict, workers: int) -> dict:
    """Write the shards that are missing; returns the content of meta.json."""
    writer = _Writer(out_dir, prefix, settings)
    documents = sum(stream.count for stream in streams)
    written = sum(shard["tokens"] for shard in writer.done)
    if written:
        print(f"{out_dir}: {len(writer.done)} shards exist; continuing after them")
    with tqdm(initial=written, unit="tok", unit_scale=True, desc=str(out_dir)) as bar:
        first, document, offset = writer.done[-1]["following"] if writer.done else (0, 0, 0)
        for number in range(first, len(streams)):
            before = sum(stream.count for stream in streams[:number])

            def show(n: int, at: int, before: int = before) -> None:
                bar.update(n)
                # an estimate: only the number of documents is known in advance
                bar.total = int(bar.n * documents / (before + at))

            _write_stream(writer, number, streams[number], document, offset, workers, show)
            document = offset = 0

    splits = {shard["split"] for shard in writer.done}
    tokens = sum(shard["tokens"] for shard in writer.done)
    if splits != {"train", "val"}:
        writer.discard()
        raise UserError(
            f"{out_dir}: {tokens:,} tokens fill only {' and '.join(splits) or 'no'} shards; both "
            f"train and val are needed: give more text or a smaller --shard_size than "
            f"{settings['shard_size']:,}"
        )
    return settings | {
        "vocab_size": get_tokenizer(settings["tokenizer"]).n_vocab,
        "documents": documents,
        "tokens": tokens,
        "shards": [
            {key: shard[key] for key in ("name", "tokens", "sha256")} for shard in writer.done
        ],
    }


def _write_stream(
    writer: _Writer,
    number: int,
    stream: Stream,
    document: int,
    offset: int,
    workers: int,
    show: Callable[[int, int], None],
) -> None:
    """Write the shards of stream `number`, starting at token `offset` of document `document`.

    `show` is called with the numbers of new tokens and of documents begun so far.
    """
    shard_size = writer.settings["shard_size"]
    buffer, filled = np.empty(shard_size, dtype=np.uint16), 0
    index = sum(shard["stream"] == number for shard in writer.done)
    # The number of the current document, and how many of its tokens have been read.
    current, consumed = document - 1, 0
    tasks = _tasks(stream.documents(document))
    for tokens, starts in _tokenise(tasks, writer.settings["tokenizer"], workers):
        taken = min(offset, len(tokens))
        offset -= taken
        new = len(tokens) - taken
        while taken < len(tokens):
            n = min(len(tokens) - taken, shard_size - filled)
            buffer[filled : filled + n] = tokens[taken : taken + n]
            filled, taken = filled + n, taken + n
            if filled == shard_size:
                begun = int(np.searchsorted(starts, taken, side="right"))
                inside = taken - int(starts[begun - 1]) if begun else consumed + taken
                writer.add(number, stream.split(index), buffer, (number, current + begun, inside))
                index, filled = index + 1, 0
        current += len(starts)
        consumed = len(tokens) - int(starts[-1]) if len(starts) else consumed + len(tokens)
        show(new, current + 1)
    if filled:
        writer.add(number, stream.split(index), buffer[:filled], (number + 1, 0, 0))


def _tasks(texts: Iterable[str]) -> Iterator[Task]:
    """Split and group texts into tasks of about TASK_CHARS characters."""
    task: Task = []
    chars = 0
    for text in texts:
        for number, piece in enumerate(split_text(text, TASK_CHARS)):
            task.append((number == 0, piece))
            chars += len(piece)
            if chars >= TASK_CHARS:
                yield task
                task, chars = [], 0
    if task:
        yield task


def _encode(name: str, task: Task) -> Encoded:
    """Tokenise a task with the tokenizer called `name`."""
    tokenizer = get_tokenizer(name)
    parts: list[NDArray[np.uint16]] = []
    starts: list[int] = []
    n = 0
    for starts_document, text in task:
        if starts_document:
            starts.append(n)
            parts.append(np.array([tokenizer.eot], dtype=np.uint16))
            n += 1
        parts.append(tokenizer.encode_array(text))
        n += len(parts[-1])
    return np.concatenate(parts), np.array(starts, dtype=np.int64)


def _tokenise(tasks: Iterable[Task], tokenizer: str, workers: int) -> Iterator[Encoded]:
    """`_encode` of each task, in order; at most TASKS_PER_WORKER per worker are in memory."""
    encode = partial(_encode, tokenizer)
    if workers == 1:
        yield from map(encode, tasks)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker)
    pending: deque[Future[Encoded]] = deque()
    try:
        for task in tasks:
            pending.append(pool.submit(encode, task))
            if len(pending) == workers * TASKS_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a tokenising process was killed, perhaps for lack of memory: run the same command "
            f"again to continue, if necessary with fewer --workers than {workers}"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Leave Ctrl-C to the parent process, and exit when it ends, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def _require_same(out_dir: Path, found: dict | None, settings: dict) -> None:
    """Raise UserError where `found` describes other documents or settings; `source` may differ."""
    remedy = "use another --out_dir, or delete the folder to make it again"
    if found is None:
        raise UserError(f"{out_dir}: holds shards that this command did not make; {remedy}")
    for key in ("tokenizer", "shard_size"):
        if found.get(key) != settings[key]:
            raise UserError(
                f"{out_dir}: made with {key} {found.get(key)}, not {settings[key]}; {remedy}"
            )
    if found.get("fingerprint") != settings["fingerprint"]:
        raise UserError(
            f"{out_dir}: made from other documents ({found.get('source')}) than those given now "
            f"({settings['source']}); {remedy}"
        )
