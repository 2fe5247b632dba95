"""Make token shards from any text files: `python -m data.text [PATHS...]`.

Reads .txt, .md and .py (each file is a document), .jsonl (field "text" of each line is one) and
.parquet (column `text` of each row is one); a folder stands for all such files in it that are not
hidden. Without paths it uses the source code of Python's standard library, which every machine
has. For validation it uses the files named by --val, or a tenth, chosen by a hash of their names.
"""

import argparse
import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Collection, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import IO

from tqdm import tqdm

from data.build import SHARD_SIZE, Stream, all_cores, build
from data.documents import parquet_files
from data.tokenizer import TOKENIZERS
from errors import UserError, command
from runtime.files import sha256_of

PLAIN = (".txt", ".md", ".py")
SUFFIXES = (*PLAIN, ".jsonl", ".parquet")
# The longest line of a .jsonl file in bytes. Reading one takes three times as much memory, and nine
# times if one of its characters takes Python four bytes, since then all do.
MAX_LINE = 1 << 27
# Folders of installed packages and of tests, which are not library code.
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Source:
    """A file of documents."""

    path: Path
    name: str  # decides the order, and whether it is used for validation
    sha256: str  # of its content
    documents: int  # number of documents


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
                    if file.suffix in SUFFIXES:
                        found[file.resolve()] = file.relative_to(path).as_posix()
        elif not path.exists():
            raise UserError(f"{path}: no such file or folder")
        elif path.suffix not in SUFFIXES:
            raise UserError(f"{path}: files must end in one of {' '.join(SUFFIXES)}")
        else:
            found[path.resolve()] = path.name
    return sorted((name, path) for path, name in found.items())


def list_stdlib() -> list[tuple[str, Path]]:
    """The standard library's Python files, as `list_files` gives them."""
    files = list_files([sysconfig.get_path("stdlib")], without=NOT_STDLIB)
    return [(name, path) for name, path in files if path.suffix == ".py"]


def read_file(path: Path) -> Iterator[str]:
    """The documents of one file, without empty ones.

    Raises UserError where the file cannot be read or parsed, is not a regular file, or has a line
    of JSON longer than MAX_LINE.
    """
    if path.exists() and not path.is_file():  # opening a FIFO would wait for ever
        raise UserError(f"{path}: cannot be read: it is not a regular file")
    if path.suffix == ".parquet":
        yield from (text for text, _ in parquet_files(str(path), [path]).read() if text)
        return
    try:
        with open(path, "rb") as file:
            if path.suffix in PLAIN:
                yield from filter(None, [_decode(path, file.read(), 0)])
            else:
                yield from _read_lines(path, file)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _read_lines(path: Path, file: IO[bytes]) -> Iterator[str]:
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
            document = json.loads(text)["text"]
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f'{path}: line {number} has no JSON field "text"') from error
        if not isinstance(document, str):
            raise UserError(f'{path}: line {number}: "text" is {document!r}, not a string')
        del text
        if document:
            yield document


def _decode(path: Path, data: bytes, start: int) -> str:
    """Bytes of a file, from byte `start` of it on, as text."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = start + error.start
        raise UserError(f"{path}: not UTF-8 text: {error.reason} at byte {at}") from error


def inspect(files: list[tuple[str, Path]], skip_unreadable: bool = False) -> list[Source]:
    """Read every (name, path) once and count its documents; files without any are left out.

    Raises UserError where a file cannot be read or parsed, unless `skip_unreadable`.
    """
    sources, skipped = [], 0
    for name, path in tqdm(files, desc="reading", unit="file", delay=2):
        try:
            documents = sum(1 for _ in read_file(path))
        except UserError:
            if not skip_unreadable:
                raise
            skipped += 1
            continue
        if documents:
            sources.append(Source(path, name, sha256_of(path), documents))
    if skipped:
        print(f"skipped {skipped} files that are not UTF-8")
    return sources


def choose_validation(sources: list[Source]) -> tuple[list[Source], list[Source]]:
    """Split sources into (train, val): val is a tenth, at least one, by the hash of the name."""
    ranked = sorted(sources, key=lambda source: hashlib.sha256(source.name.encode()).digest())
    val = set(ranked[: max(1, len(sources) // 10)])
    return [s for s in sources if s not in val], [s for s in sources if s in val]


def stream(sources: list[Source], split: str) -> Stream:
    """The documents of these sources, all for one split."""

    def documents(start: int, state: None) -> Generator[tuple[str, None]]:
        for source in sources:
            if start < source.documents:
                for text in islice(read_file(source.path), start, None):
                    yield text, None
            start = max(start - source.documents, 0)

    size = sum(source.documents for source in sources)
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
    parser.add_argument("--tokenizer", choices=TOKENIZERS, default="bytes", help="default: bytes")
    parser.add_argument("--out_dir", help="default: data/text_<tokenizer>")
    parser.add_argument("--shard_size", type=int, default=SHARD_SIZE, help="tokens per shard")
    parser.add_argument("--workers", type=int, default=all_cores(), help="default: all cores")
    args = parser.parse_args(argv)

    sources = inspect(list_files(args.paths) if args.paths else list_stdlib(), not args.paths)
    if args.val:
        val = inspect(list_files(args.val))
        chosen = {source.path for source in val}
        train = [source for source in sources if source.path not in chosen]
    else:
        train, val = choose_validation(sources)
    given = " ".join(args.paths) or f"standard library of Python {platform.python_version()}"
    if not sources:
        raise UserError(f"{given}: no text in any {' '.join(SUFFIXES)} file")
    if not train or not val:
        raise UserError(
            f"{given}: a single file cannot serve for both training and validation; give a file "
            "for validation with --val"
        )
    inputs = [[(source.name, source.sha256) for source in part] for part in (val, train)]
    build(
        args.out_dir or f"data/text_{args.tokenizer}",
        prefix="text",
        streams=[stream(val, "val"), stream(train, "train")],
        tokenizer=args.tokenizer,
        shard_size=args.shard_size,
        workers=args.workers,
        source=given,
        fingerprint=hashlib.sha256(json.dumps(inputs).encode()).hexdigest(),
    )


if __name__ == "__main__":
    main()
