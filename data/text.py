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
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from data.build import SHARD_SIZE, Stream, all_cores, build
from data.parquet import read_documents
from data.tokenizer import TOKENIZERS
from errors import UserError, command
from runtime.files import sha256_of

PLAIN = (".txt", ".md", ".py")
SUFFIXES = (*PLAIN, ".jsonl", ".parquet")
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

    Raises UserError where the file cannot be read or parsed.
    """
    if path.suffix == ".parquet":
        yield from filter(None, read_documents([path]))
        return
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if path.suffix in PLAIN:
        yield from filter(None, [text])
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                document = json.loads(line)["text"]
            except (ValueError, LookupError, TypeError) as error:
                raise UserError(f'{path}: line {number} has no JSON field "text"') from error
            if not isinstance(document, str):
                raise UserError(f'{path}: line {number}: "text" is {document!r}, not a string')
            if document:
                yield document


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

    def documents(start: int) -> Iterator[str]:
        for source in sources:
            if start < source.documents:
                yield from islice(read_file(source.path), start, None)
            start = max(start - source.documents, 0)

    return Stream(documents, sum(source.documents for source in sources), lambda shard: split)


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
