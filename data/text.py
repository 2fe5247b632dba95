"""Make token shards of any text files: `python -m data.text [PATHS...]`.

Reads .txt, .md and .py (a file is a document), .jsonl (a line's field "text" is one) and .parquet
(a row's column `text` is one); a folder stands for all such files in it, save in hidden folders.
Without paths it takes the sources of Python's standard library, which every machine has.
A tenth of the files, chosen by a hash of their names, is for validation, or those named by --val.
"""

import argparse
import hashlib
import json
import os
import platform
import sysconfig
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
# Packages that the user installed, and tests: no library code.
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Source:
    """A file, the name by which it is sorted and chosen, its content's hash, its documents."""

    path: Path
    name: str
    sha256: str
    documents: int


def list_files(paths, without=frozenset()):
    """All readable files of the given files and folders: a list of (name, path), by name.

    A name is relative to the folder that was given. Hidden files and folders, and folders called
    as one of `without`, are left out.

    Raises:
        UserError: a path is missing, or is a file of another kind.
    """
    found = {}
    for path in map(Path, paths):
        if path.is_dir():
            for folder, inner, files in os.walk(path):
                inner[:] = [name for name in inner if name[0] != "." and name not in without]
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


def list_stdlib():
    """The standard library's Python files, as `list_files` gives them."""
    files = list_files([sysconfig.get_path("stdlib")], without=NOT_STDLIB)
    return [(name, path) for name, path in files if path.suffix == ".py"]


def read_file(path):
    """The documents of one file, without empty ones.

    Raises:
        UserError: the file cannot be read or understood.
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


def inspect(files, skip_unreadable=False):
    """Read (name, path) pairs once: a list of `Source`, without files that have no document.

    Raises:
        UserError: a file cannot be read or understood, unless those are to be skipped.
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


def choose_validation(sources):
    """Split sources into (train, val): a tenth, at least one, by the hash of the name, is val."""
    ranked = sorted(sources, key=lambda source: hashlib.sha256(source.name.encode()).digest())
    val = set(ranked[: max(1, len(sources) // 10)])
    return [s for s in sources if s not in val], [s for s in sources if s in val]


def stream(sources, split):
    """The documents of sources, all for one split, as `build` takes them."""

    def documents(start):
        for source in sources:
            if start < source.documents:
                yield from islice(read_file(source.path), start, None)
            start = max(start - source.documents, 0)

    return Stream(documents, sum(source.documents for source in sources), lambda shard: split)


@command
def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m data.text",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", metavar="PATHS", help="files and folders")
    parser.add_argument("--val", nargs="+", metavar="PATHS", help="files for validation")
    parser.add_argument("--tokenizer", choices=TOKENIZERS, default="bytes", help="default: bytes")
    parser.add_argument("--out_dir", help="default: data/text_<tokenizer>")
    parser.add_argument("--shard_size", type=int, default=SHARD_SIZE, help="tokens of a shard")
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
