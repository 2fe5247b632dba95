"""Make token shards from any text files: `python -m data.text [PATHS...]`.

Reads .txt, .md and .py (each file is a document), .jsonl, also compressed as .jsonl.gz or
.jsonl.zst (a field of each line is a document), and .parquet (a column's entries are documents); a
folder stands for all such files in it that are not hidden. Without paths it uses the source code
of Python's standard library, which every machine has. For validation it uses the files named by
--val, or a tenth of several files, chosen by a hash of their names, or the last tenth of a single
file, from the first document that begins in it. A file that is a single document is divided before
a paragraph, or else a line or a word.

Files of ids, nanoGPT's train.bin and build-nanogpt's .npy, are copied as they are, and need --val.

With --repeat 0.25 --within 128, a quarter of the passages of 128 tokens of the training text are
followed by an excerpt of themselves, so that a small model learns to copy.
"""

import argparse
import glob
import hashlib
import io
import json
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
from tqdm import tqdm

from data.build import BATCH, COLUMN, build, parse_options, tokenise
from data.documents import Rules, reading
from data.ids import are_ids, copy_ids
from errors import UserError, command
from runtime.files import sha256_of

PLAIN = (".txt", ".md", ".py")
SUFFIXES = (*PLAIN, ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
CHUNK = 1 << 24  # characters of a plain file read at a time
NAMED = 10  # files for validation whose names are printed
# Folders of installed packages and of tests, which are not library code.
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
# What ends a paragraph, a line and a word.
ENDS = [
    re.compile(r"\n\s*\n"),
    re.compile(r"\n"),
    re.compile(r"\s"),
]

Files = list[tuple[str, Path]]  # names and paths


class Source(NamedTuple):
    """A file of documents, or some of its documents, or a part of its only document."""

    path: Path
    name: str  # decides the order, and whether it is used for validation
    sha256: str  # of the file's content
    rules: Rules
    documents: range  # their indices in the file
    characters: slice = slice(None)  # of each document

    def read(self, first: int = 0) -> Iterator[str]:
        """Yield the documents from index `first` of this source on."""
        wanted = self.documents[first:]
        for document in islice(read_file(self.path, self.rules), wanted.start, wanted.stop):
            yield document[self.characters]

    def batches(self, first: int) -> Iterator[tuple[int, list[str]]]:
        """Yield each document from index `first` on as a batch, with its index."""
        for index, document in enumerate(self.read(first), first):
            yield index, [document]


def list_files(paths: Iterable[str | Path]) -> Files:
    """List (name, path) of all files with one of SUFFIXES in these files and folders, by name.

    The name is relative to the folder in `paths`. Hidden files and folders are left out. Raises
    UserError if a path is missing, is a file of another type, or is a folder without such files.
    """
    suffixes = " ".join(SUFFIXES)
    by_file: dict[Path, tuple[str, Path]] = {}  # by the file that links lead to: each one once
    for path in map(Path, paths):
        if path.is_dir():
            names = glob.glob("**", root_dir=path, recursive=True)
            files = [(name, path / name) for name in names if name.endswith(SUFFIXES)]
        elif not path.exists():
            raise UserError(f"{path}: no such file or folder")
        elif not path.name.endswith(SUFFIXES):
            raise UserError(f"{path}: files must end in one of {suffixes}")
        else:
            files = [(path.name, path)]
        files = [(name, file) for name, file in files if file.is_file()]
        if not files:
            raise UserError(f"{path}: no file there ends in one of {suffixes}")
        for name, file in sorted(files):
            by_file.setdefault(file.resolve(), (name, file))
    return sorted(by_file.values())


def list_stdlib() -> Files:
    """List the standard library's Python files, as `list_files` does."""
    files = []
    for name, path in list_files([sysconfig.get_path("stdlib")]):
        if path.suffix == ".py" and NOT_STDLIB.isdisjoint(name.split("/")):
            files.append((name, path))
    return files


def read_file(path: Path, rules: Rules) -> Iterator[str]:
    """Yield the documents of one file.

    Raises UserError if the file cannot be read or parsed.
    """
    with reading(path):
        if path.name.endswith(PLAIN):
            texts = read_plain(path, rules.split_at)
            yield from rules.documents(f"{path}, text", enumerate(texts))
        elif path.suffix == ".parquet":
            entries = read_parquet(path, rules.column)
            yield from rules.documents(f"{path}, row", enumerate(entries))
        else:
            lines = read_json_lines(path, rules.column)
            yield from rules.documents(f"{path}, line", lines)


def read_plain(path: Path, mark: str | None) -> Iterator[str]:
    """Yield a file's whole text or, without holding all of it, each text between marks."""
    with open(path, encoding="utf-8-sig", newline="") as file:  # line breaks stay as they are
        if mark is None:
            yield file.read()
            return
        rest = ""
        while chunk := file.read(CHUNK):
            *texts, rest = (rest + chunk).split(mark)
            yield from filter(str.strip, texts)
        if rest.strip():
            yield rest


def read_parquet(path: Path, column: str) -> Iterator[Any]:
    """Yield the entries of a column."""
    table = pyarrow.parquet.ParquetFile(path)
    if column not in table.schema_arrow.names:
        raise UserError(f"{path}: no column {column!r}: name the column of the text with --field")
    for batch in table.iter_batches(BATCH, columns=[column]):
        yield from batch[column].to_pylist()


def read_json_lines(path: Path, field: str) -> Iterator[tuple[int, Any]]:
    """Yield the number of each line that is not blank, from 1 on, and its value of a field."""
    with io.BufferedReader(pyarrow.input_stream(path)) as lines:  # decompresses by the suffix
        for number, line in enumerate(lines, 1):
            if line.strip():
                name = f"{path}, line {number}"
                with reading(name):
                    row = json.loads(line)
                    if field not in row:
                        raise UserError(
                            f"{name}: no field {field!r}: name the field of the text with --field"
                        )
                    value = row[field]
                yield number, value


def inspect(files: Files, rules: Rules) -> list[Source]:
    """Read every (name, path) once and count its documents; files without any are left out.

    Raises UserError if a file cannot be read or parsed.
    """
    sources = []
    for name, path in tqdm(files, desc="reading", unit="file", delay=2):
        count = sum(1 for _ in read_file(path, rules))
        if count:
            sources.append(Source(path, name, sha256_of(path), rules, range(count)))
    return sources


def divide(source: Source) -> tuple[list[Source], list[Source]]:
    """Split one source into two, (train, val): val is the last tenth of its characters.

    It begins with the first document that begins in that tenth, or else with the last one. A single
    document is divided before a paragraph, or else a line or a word. Raises UserError if none of
    them begins there.
    """
    total = len(source.documents)
    if total == 1:
        (text,) = source.read()
        cut = find_cut(source.path, text)
        print(f"validation: {source.name!r} from character {cut:,} of {len(text):,} on")
        train = source._replace(characters=slice(cut))
        val = source._replace(characters=slice(cut, None))
    else:
        starts = np.cumsum([0, *map(len, source.read())])
        cut = int(np.searchsorted(starts, starts[-1] * 9 / 10))
        cut = min(cut, total - 1)
        print(f"validation: {source.name!r} from document {cut:,} of {total:,} on")
        train = source._replace(documents=range(cut))
        val = source._replace(documents=range(cut, total))
    return [train], [val]


def find_cut(path: Path, text: str) -> int:
    """Return how many characters of a single document are for training.

    Raises UserError if no word begins in its last tenth.
    """
    tenth = len(text) * 9 // 10
    for pattern in ENDS:
        if match := pattern.search(text.rstrip(), max(tenth - 1, 1)):
            return match.end()
    raise UserError(
        f"{path}: cannot split off a validation set: no word boundary in the last tenth; give "
        "more text, or a file for validation with --val"
    )


def split(sources: list[Source]) -> tuple[list[Source], list[Source]]:
    """Split sources into (train, val).

    A tenth of them, at least one, is for validation, chosen by the hash of the name; a single
    source is divided.
    """
    if len(sources) == 1:
        return divide(sources[0])
    ranked = sorted(sources, key=lambda s: hashlib.sha256(os.fsencode(s.name)).digest())
    count = max(1, len(sources) // 10)
    val = sorted(ranked[:count], key=lambda source: source.name)
    train = sorted(ranked[count:], key=lambda source: source.name)
    names = [source.name for source in val[:NAMED]]
    print(f"validation: {len(val):,} of {len(sources):,} files, such as {names}")
    return train, val


@command
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.text", description=__doc__)
    parser.add_argument("paths", nargs="*", metavar="PATHS", help="files and folders")
    parser.add_argument("--val", nargs="+", metavar="PATHS", help="what is for validation")
    field = f"the JSON field or parquet column of the text; default: {COLUMN}"
    parser.add_argument("--field", default=COLUMN, dest="column", metavar="FIELD", help=field)
    share = "the share of the T-token passages of the training text that an excerpt follows"
    parser.add_argument("--repeat", type=float, default=0, metavar="SHARE", help=share)
    within = "the training length (128), if --repeat is given"
    parser.add_argument("--within", type=int, default=128, metavar="T", help=within)
    args = parse_options(parser, argv, tokenizer="bytes")

    if any(map(are_ids, args.paths)):
        copy_ids(args)
        return
    if args.paths:
        source = " ".join(args.paths)
        files = list_files(args.paths)
    else:
        source = f"standard library of Python {platform.python_version()}"
        files = list_stdlib()
    val = []
    if args.val:
        val_files = list_files(args.val)
        held_out = {path.resolve() for _, path in val_files}
        files = [(name, path) for name, path in files if path.resolve() not in held_out]
        val = inspect(val_files, args.rules)
    train = inspect(files, args.rules)
    args.rules.report()  # before `split`, which may read and count again
    if train and not args.val:
        train, val = split(train)
    if not train or not val:
        raise UserError(f"{source}: too little text for training and validation")
    folder = f"text_{Path(args.tokenizer).stem}"
    if args.repeat:
        folder += "_repeat"
    streams = []
    checksums = []
    for sources, repeat in ((val, 0), (train, args.repeat)):
        of_split = [source.batches for source in sources]
        streams.append(partial(tokenise, of_split, args, repeat))
        checksums.append([(source.name, source.sha256) for source in sources])
    build(folder, "text", streams, args, source, [args.column, checksums])


if __name__ == "__main__":
    main()
