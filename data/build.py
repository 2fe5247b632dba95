"""Documents to shards: tokenise on all cores, write whole shards, resume after a kill.

The tokens of a stream of documents, each with end-of-text before it, are cut into shards of exactly
`shard_size`, the last one shorter. With each shard `progress.json` records at which token of which
document the next one starts. The next shards depend on nothing else, neither on timing nor on the
number of workers, so a set made in many attempts equals, bit for bit, one made in a single run.

N machines can share the work: part I of N numbers its shards I - 1, I - 1 + N, I - 1 + 2 N, ... and
has a progress.json, a meta.json and a lock of its own, so all parts can be made in one folder, or
in N folders that are then copied into one.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data import shards
from data.tokenizer import copy_file, get_tokenizer, identify, split_text
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

    # (number of a document, its state or None for the first) -> the texts from this document on,
    # each with its state: JSON with which reading can start there
    documents: Callable[[int, Any], Generator[tuple[str, Any]]]
    split: Callable[[int], str]  # number of a shard within this stream -> "train" or "val"
    size: int  # in any unit, the same for all streams of a set
    done: Callable[[int, Any], int]  # number and state of a document -> the size of what precedes
    check: Callable[[], None] = lambda: None  # raises UserError where it has too little text


def build(
    out_dir: str | Path,
    prefix: str,
    streams: list[Stream],
    tokenizer: str,
    shard_size: int,
    workers: int,
    source: str,
    fingerprint: str,
    part: shards.Part = shards.WHOLE,
) -> None:
    """Make the folder `out_dir` of shards `<prefix>_<split>_<number>.bin` and its meta.json.

    Called again, it resumes after the last whole shard, or says that all is done. The streams are
    written in order; a shard has `shard_size` tokens of one stream, whose last shard may have
    fewer. `workers` processes tokenise; 1 means this process itself. In meta.json, `source` says
    where the documents come from, and `fingerprint` is a string that changes when they do. Only the
    shards of `part` are made: all, or a share whose documents `streams` gives.

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
        "tokenizer": identify(tokenizer),
        "shard_size": shard_size,
        "fingerprint": fingerprint,
        "source": source,
    }
    if part != shards.WHOLE:
        settings["parts"] = part[1]
    with claim(out_dir, settings, part) as meta:
        state = "already done"
        if meta is None:
            if not any(out_dir.glob("*.bin")):
                for stream in streams:
                    stream.check()
            writer = _Writer(out_dir, prefix, tokenizer, settings, part)
            meta, state = _make(writer, streams, workers), "done"
            copy_file(tokenizer, out_dir)
            shards.write_meta(out_dir, meta, part)
        try:
            for shard in meta["shards"]:
                shards.read_shard(out_dir / shard["name"])
        except UserError as error:
            raise UserError(f"{error}; delete {out_dir} first") from error
        (out_dir / shards.of_part(shards.PROGRESS, part)).unlink(missing_ok=True)
    print(f"{out_dir}: {state}, {meta['tokens']:,} tokens in {len(meta['shards'])} shards")


@contextmanager
def claim(out_dir: Path, settings: dict, part: shards.Part = shards.WHOLE) -> Iterator[dict | None]:
    """Lock a part of the folder while its shards are made; yields its meta.json, or None.

    `settings` are `tokenizer`, `shard_size`, `fingerprint`, `source` and, of a part, `parts`, as in
    meta.json. Raises UserError where the folder cannot be written to, another process holds the
    lock, or the folder has shards made from other settings.
    """
    check_writable(out_dir)
    with lock_folder(out_dir, "making this set", shards.of_part(".lock", part)):
        meta = shards.read_meta(out_dir, part)
        if any(out_dir.glob("*.bin")):
            records = [
                read_json(path, shards.Settings)
                for name in (shards.META, shards.PROGRESS)
                for path in (out_dir / name, *shards.files_of_parts(out_dir, name))
            ]
            # another part's may have gone since it was listed
            _require_same(out_dir, [dict(record) for record in records if record], settings)
        yield meta


def all_cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Written(shards.Entry):
    """A shard that is done: `documents` have begun with it, and `following` is what comes next."""

    split: str
    stream: int
    documents: int
    following: tuple[int, int, int, Any]  # stream, document, token of that document, its state


class Progress(shards.Settings):
    """The content of progress.json."""

    shards: list[Written]


class _Writer:
    """Adds shards to a folder and lists those that are whole, `done`, in its progress.json."""

    def __init__(
        self, out_dir: Path, prefix: str, tokenizer: str, settings: dict, part: shards.Part
    ):
        self.out_dir, self.prefix, self.tokenizer = out_dir, prefix, tokenizer
        self.settings, self.part = settings, part
        self.path = out_dir / shards.of_part(shards.PROGRESS, part)
        progress = read_json(self.path, Progress)
        listed = progress["shards"] if progress else []
        self.done: list[Written] = list(takewhile(self._is_whole, listed))
        self._save()

    def add(
        self,
        stream: int,
        split: str,
        tokens: NDArray[np.uint16],
        documents: int,
        following: tuple[int, int, int, Any],
    ) -> None:
        """Write a shard of stream number `stream`, with which `documents` documents have begun.

        `following` is where the next one starts: stream, document, token of that document, and the
        document's state.
        """
        index, count = self.part
        name = f"{self.prefix}_{split}_{len(self.done) * count + index - 1:06d}.bin"
        sha256 = shards.write_shard(self.out_dir / name, tokens)
        self.done.append(
            {
                "name": name,
                "tokens": len(tokens),
                "sha256": sha256,
                "split": split,
                "stream": stream,
                "documents": documents,
                "following": following,
            }
        )
        self._save()

    def discard(self) -> None:
        """Delete all shards and progress.json."""
        for shard in self.done:
            (self.out_dir / shard["name"]).unlink()
        self.path.unlink()

    def _is_whole(self, shard: Written) -> bool:
        try:
            return len(shards.read_shard(self.out_dir / shard["name"])) == shard["tokens"]
        except UserError:
            return False

    def _save(self) -> None:
        write_json(self.path, self.settings | {"shards": self.done})


def _make(writer: _Writer, streams: list[Stream], workers: int) -> dict:
    """Write the shards that are missing; returns the content of meta.json."""
    out_dir, settings, part = writer.out_dir, writer.settings, writer.part
    size = sum(stream.size for stream in streams)
    written = sum(shard["tokens"] for shard in writer.done)
    if written:
        print(f"{out_dir}: {len(writer.done)} shards exist; continuing after them")
    with tqdm(initial=written, unit="tok", unit_scale=True, desc=str(out_dir)) as bar:
        following = writer.done[-1]["following"] if writer.done else (0, 0, 0, None)
        first, document, offset, state = following
        for number in range(first, len(streams)):
            stream = streams[number]
            before = sum(stream.size for stream in streams[:number])

            def show(n: int, done: int, before: int = before) -> None:
                bar.update(n)
                if before + done:  # an estimate: the tokens are not known in advance
                    bar.total = int(bar.n * size / (before + done))

            _write_stream(writer, number, stream, document, offset, state, workers, show)
            document, offset, state = 0, 0, None
        bar.total = bar.n

    splits = {shard["split"] for shard in writer.done}
    tokens = sum(shard["tokens"] for shard in writer.done)
    # the first part alone has the shards for validation
    if splits != ({"train", "val"} if part[0] == 1 else {"train"}):
        writer.discard()
        raise UserError(
            f"{out_dir}: {tokens:,} tokens fill only {' and '.join(splits) or 'no'} shards; both "
            f"train and val are needed: give more text or a smaller --shard_size than "
            f"{settings['shard_size']:,}"
        )
    return settings | {
        "vocab_size": get_tokenizer(writer.tokenizer).n_vocab,
        "documents": writer.done[-1]["documents"],
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
    state: Any,
    workers: int,
    show: Callable[[int, int], None],
) -> None:
    """Write the shards of stream `number`, starting at token `offset` of document `document`.

    `state` is that document's. `show` is called with the number of new tokens, and the size of what
    has been read of the stream.
    """
    shard_size = writer.settings["shard_size"]
    buffer, filled = np.empty(shard_size, dtype=np.uint16), 0
    index = sum(shard["stream"] == number for shard in writer.done)
    before = max((s["documents"] for s in writer.done if s["stream"] < number), default=0)
    # The number of the current document, and how many of its tokens have been read.
    at, into = document - 1, 0
    with closing(stream.documents(document, state)) as documents:
        for tokens, starts, states in _tokenise(_tasks(documents), writer.tokenizer, workers):
            taken = min(offset, len(tokens))
            offset -= taken
            new = len(tokens) - taken
            while taken < len(tokens):
                n = min(len(tokens) - taken, shard_size - filled)
                buffer[filled : filled + n] = tokens[taken : taken + n]
                filled, taken = filled + n, taken + n
                if filled == shard_size:
                    begun = int(np.searchsorted(starts, taken, side="right"))
                    inside = taken - int(starts[begun - 1]) if begun else into + taken
                    following = (number, at + begun, inside, states[begun - 1] if begun else state)
                    documents_begun = before + at + begun + 1
                    writer.add(number, stream.split(index), buffer, documents_begun, following)
                    index, filled = index + 1, 0
            if len(starts):
                at, into, state = at + len(starts), len(tokens) - int(starts[-1]), states[-1]
            else:
                into += len(tokens)
            show(new, stream.done(at, state))
    if filled:
        following = (number + 1, 0, 0, None)
        writer.add(number, stream.split(index), buffer[:filled], before + at + 1, following)


def _tasks(documents: Iterable[tuple[str, Any]]) -> Iterator[tuple[Task, list]]:
    """Split and group texts into tasks of about TASK_CHARS characters.

    With each comes the list of the states of those documents that start in it.
    """
    task: Task = []
    states: list = []
    chars = 0
    for text, state in documents:
        for number, piece in enumerate(split_text(text, TASK_CHARS)):
            task.append((number == 0, piece))
            if number == 0:
                states.append(state)
            chars += len(piece)
            if chars >= TASK_CHARS:
                yield task, states
                task, states, chars = [], [], 0
    if task:
        yield task, states


def _encode(name: str, task: Task) -> Encoded:
    """Tokenise a task with the tokenizer of this name or path."""
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


def _tokenise(
    tasks: Iterable[tuple[Task, list]], tokenizer: str, workers: int
) -> Iterator[tuple[*Encoded, list]]:
    """`_encode` of each task and its states, in order; at most TASKS_PER_WORKER per worker are in
    memory."""
    encode = partial(_encode, tokenizer)
    if workers == 1:
        for task, states in tasks:
            yield *encode(task), states
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker)
    pending: deque[tuple[Future[Encoded], list]] = deque()
    try:
        for task, states in tasks:
            pending.append((pool.submit(encode, task), states))
            if len(pending) == workers * TASKS_PER_WORKER:
                encoded, states = pending.popleft()
                yield *encoded.result(), states
        while pending:
            encoded, states = pending.popleft()
            yield *encoded.result(), states
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


def _require_same(out_dir: Path, records: list[dict], settings: dict) -> None:
    """Raise UserError where the sets that were begun are not one with these settings.

    `source` may differ.
    """
    remedy = "use another --out_dir, or delete the folder to make it again"
    if not records:
        raise UserError(f"{out_dir}: holds shards that this command did not make; {remedy}")
    for found in records:
        for key in ("tokenizer", "shard_size"):
            if found.get(key) != settings[key]:
                raise UserError(
                    f"{out_dir}: made with {key} {found.get(key)}, not {settings[key]}; {remedy}"
                )
        if found.get("fingerprint") != settings["fingerprint"]:
            raise UserError(
                f"{out_dir}: made from other documents ({found.get('source')}) than those given "
                f"now ({settings['source']}); {remedy}"
            )
        parts, wanted = (these.get("parts", 1) for these in (found, settings))
        if parts != wanted:
            raise UserError(f"{out_dir}: made in {parts} parts, not {wanted}; {remedy}")
