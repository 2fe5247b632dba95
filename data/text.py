"""Make token shards from any text files: `python -m data.text [PATHS...]`.

Reads .txt, .md and .py (each file is a document), .jsonl, also compressed as .jsonl.gz or
.jsonl.zst (a field of each line is one), and .parquet (a column of each row is one); a folder
stands for all such files in it that are not hidden. Without paths it uses the source code of
Python's standard library, which every machine has. For validation it uses the files named by
--val, or a tenth of several files, chosen by a hash of their names, or the last tenth of a single
file, from the first document that begins in it (of one document: paragraph, or else line or word).
"""

import argparse
import hashlib
import io
import json
import os
import platform
import re
import sysconfig
from collections.abc import Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, count, islice
from pathlib import Path
from typing import IO

from tqdm import tqdm

from data.build import SHARD_SIZE, Stream, all_cores, build
from data.documents import COLUMN, parquet_files
from data.tokenizer import BUILT_IN, get_tokenizer
from errors import UserError, command
from runtime.files import sha256_of

PLAIN = (".txt", ".md", ".py")
COMPRESSED = {".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}
SUFFIXES = (*PLAIN, ".jsonl", *COMPRESSED, ".parquet")
# The longest line of a .jsonl file in bytes. Reading one takes three times as much memory, and nine
# times if one of its characters takes Python four bytes, since then all do.
MAX_LINE = 1 << 27
# Folders of installed packages and of tests, which are not library code.
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
# What ends a paragraph, a line and a word.
ENDS = [re.compile(pattern) for pattern in (r"\n\s*\n", r"\n", r"\s")]


@dataclass(frozen=True)
class Source:
    """A file of documents, or a part of one."""

    path: Path
    name: str  # decides the order, and whether it is used for validation
    sha256: str  # of the file's content
    field: str  # which each line of JSON or row of parquet has its document in
    documents: range  # their numbers in the file
    characters: tuple[int, int | None] = (0, None)  # of its only document

    def read(self, first: int = 0) -> Iterator[str]:
        """The documents from number `first` of this source on."""
        numbers = self.documents[first:]
        for text in islice(read_file(self.path, self.field), numbers.start, numbers.stop):
            yield text[slice(*self.characters)]


def list_files(
    paths: Iterable[str | Path], without: Collection[str] = ()
) -> list[tuple[str, Path]]:
    """(name, path) of all files with one of SUFFIXES in the given files and folders, by name.

    The name is relative to the folder that was given. Hidden files and folders are left out, and so
    are folders whose name is in `without`. Raises UserError where a path is missing, or is a file
    of another type.
    """
    found: dict[Path, str] = {}
    for path in map(Path, paths):
        if path.is_dir():
            for folder, folders, files in os.walk(path):
                folders[:] = [name for name in folders if name[0] != "." and name not in without]
                for file in (Path(folder, name) for name in files if name[0] != "."):
                    if file.name.endswith(SUFFIXES):
                        found[file.resolve()] = file.relative_to(path).as_posix()
        elif not path.exists():
            raise UserError(f"{path}: no such file or folder")
        elif not path.name.endswith(SUFFIXES):
            raise UserError(f"{path}: files must end in one of {' '.join(SUFFIXES)}")
        else:
            found[path.resolve()] = path.name
    return sorted((name, path) for path, name in found.items())


def list_stdlib() -> list[tuple[str, Path]]:
    """The standard library's Python files, as `list_files` gives them."""
    files = list_files([sysconfig.get_path("stdlib")], without=NOT_STDLIB)
    return [(name, path) for name, path in files if path.suffix == ".py"]


def read_file(path: Path, field: str = COLUMN) -> Iterator[str]:
    """The documents of one file, without empty ones.

    Raises UserError where the file cannot be read or parsed, is not a regular file, or has a line
    of JSON longer than MAX_LINE.
    """
    if path.exists() and not path.is_file():  # opening a FIFO would wait for ever
        raise UserError(f"{path}: cannot be read: it is not a regular file")
    if path.suffix == ".parquet":
        yield from (text for text, _ in parquet_files(str(path), [path], field).read() if text)
        return
    try:
        with open(path, "rb") as file:
            if path.suffix in PLAIN:
                yield from filter(None, [_decode(path, file.read(), 0)])
            else:
                yield from _read_lines(path, _decompress(path, file), field)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def _decompress(path: Path, file: IO[bytes]) -> IO[bytes]:
    """The content of an open .jsonl file, decompressed if its name says so."""
    suffix = "".join(path.suffixes[-2:])
    if suffix not in COMPRESSED:
        return file
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(file, COMPRESSED[suffix]))


def _read_lines(path: Path, file: IO[bytes], field: str) -> Iterator[str]:
    """The documents of an open .jsonl file, without empty ones."""
    start = 0
    for number in count(1):
        line = file.readline(MAX_LINE + 1)
        if not line:
            return
        if len(line) > MAX_LINE:
            raise UserError(
                f"{path}: line {number} is longer than {MAX_LINE:,} bytes: divide the document "
                "into several, or give it as a .txt file"
            )
        text = _decode(path, line, start)
        start += len(line)
        if not text.strip():
            continue
        del line  # memory, of a long one
        try:
            document = json.loads(text)[field]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise UserError(f'{path}: line {number} has no JSON field "{field}"') from error
        if not isinstance(document, str):
            raise UserError(f'{path}: line {number}: "{field}" is {document!r}, not a string')
        del text
        if document:
            yield document


def _decode(path: Path, data: bytes, start: int) -> str:
    """Bytes of a file, from byte `start` of it on, as text."""
    try:
        return data.decode("utf-8").removeprefix("" if start else "\ufeff")  # a byte-order mark
    except UnicodeDecodeError as error:
        at = start + error.start
        raise UserError(f"{path}: not UTF-8 text: {error.reason} at byte {at}") from error


def inspect(
    files: list[tuple[str, Path]], field: str = COLUMN, skip_unreadable: bool = False
) -> list[Source]:
    """Read every (name, path) once and count its documents; files without any are left out.

    Raises UserError where a file cannot be read or parsed, unless `skip_unreadable`.
    """
    sources, skipped = [], 0
    for name, path in tqdm(files, desc="reading", unit="file", delay=2):
        try:
            documents = sum(1 for _ in read_file(path, field))
        except UserError:
            if not skip_unreadable:
                raise
            skipped += 1
            continue
        if documents:
            sources.append(Source(path, name, sha256_of(path), field, range(documents)))
    if skipped:
        print(f"skipped {skipped} files that are not UTF-8")
    return sources


def choose_validation(sources: list[Source]) -> tuple[list[Source], list[Source]]:
    """Split sources into (train, val): val is a tenth, at least one, by the hash of the name."""
    ranked = sorted(sources, key=lambda source: hashlib.sha256(os.fsencode(source.name)).digest())
    val = set(ranked[: max(1, len(sources) // 10)])
    return [s for s in sources if s not in val], [s for s in sources if s in val]


def divide(source: Source) -> tuple[Source, Source]:
    """Split one source into (train, val): val is the last tenth of its characters.

    It begins with the first document that begins in that tenth, or else with the last one. A single
    document is divided before a paragraph, or else a line or a word. Raises UserError where it has
    none there.
    """
    if len(source.documents) > 1:
        starts = [0, *accumulate(map(len, source.read()))]
        tenth = starts.pop() * 9 / 10
        cut = next((i for i, start in enumerate(starts) if start >= tenth), len(starts) - 1)
        train, val = source.documents[:cut], source.documents[cut:]
        return replace(source, documents=train), replace(source, documents=val)
    (text,) = source.read()
    tenth, end = len(text) * 9 // 10, len(text.rstrip())
    found = [match for pattern in ENDS if (match := pattern.search(text, max(tenth - 1, 1), end))]
    if not found:
        raise UserError(
            f"{source.path}: no word begins in its last tenth, {text[tenth:][:20]!r}, to divide it "
            "there for validation; give more text, or a file for validation with --val"
        )
    at = found[0].end()
    return replace(source, characters=(0, at)), replace(source, characters=(at, None))


def stream(sources: list[Source], split: str) -> Stream:
    """The documents of these sources, all for one split."""

    def documents(start: int, state: None) -> Generator[tuple[str, None]]:
        for source in sources:
            if start < len(source.documents):
                for text in source.read(start):
                    yield text, None
            start = max(start - len(source.documents), 0)

    size = sum(len(source.documents) for source in sources)
    return Stream(documents, lambda shard: split, size, lambda document, state: document)


@command
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m data.text",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", metavar="PATHS", help="files and folders")
    parser.add_argument("--val", nargs="+", metavar="PATHS", help="files for validation")
    parser.add_argument(
        "--field", "--column", default=COLUMN, help="of JSON or parquet; default: text"
    )
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        help=f"{', '.join(BUILT_IN)} or a tokenizer.json; default: bytes",
    )
    parser.add_argument("--out_dir", help="default: data/text_<tokenizer>")
    parser.add_argument("--shard_size", type=int, default=SHARD_SIZE, help="tokens per shard")
    parser.add_argument("--workers", type=int, default=all_cores(), help="default: all cores")
    args = parser.parse_args(argv)

    get_tokenizer(args.tokenizer)  # raises now, and not after all files have been read
    files = list_files(args.paths) if args.paths else list_stdlib()
    sources = inspect(files, args.field, skip_unreadable=not args.paths)
    given = " ".join(args.paths) or f"standard library of Python {platform.python_version()}"
    if not sources:
        raise UserError(f"{given}: no text in any {' '.join(SUFFIXES)} file")
    if args.val:
        val = inspect(list_files(args.val), args.field)
        chosen = {source.path for source in val}
        train = [source for source in sources if source.path not in chosen]
    elif len(sources) == 1:
        train, val = ([part] for part in divide(sources[0]))
    else:
        train, val = choose_validation(sources)
    if not train or not val:
        raise UserError(
            f"{given}: no text is left for training, or there is none for validation in {args.val}"
        )
    inputs = [[(source.name, source.sha256) for source in part] for part in (val, train)]
    identity = inputs if args.field == COLUMN else [args.field, inputs]
    build(
        args.out_dir or f"data/text_{Path(args.tokenizer).stem}",
        prefix="text",
        streams=[stream(val, "val"), stream(train, "train")],
        tokenizer=args.tokenizer,
        shard_size=args.shard_size,
        workers=args.workers,
        source=given,
        fingerprint=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
    )


if __name__ == "__main__":
    main()
