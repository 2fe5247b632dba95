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

import hashlib
import io
import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NoReturn

import pyarrow
import pyarrow.parquet
from tqdm import tqdm

from data.build import BATCH, build, check_folder, parse_options, tokenise
from data.documents import Document, Rules, reading
from data.ids import are_ids, copy_ids
from data.tokenizer import split_text
from errors import Parser, UserError, command
from runtime.files import sha256_of

PLAIN = (".txt", ".md", ".py")
SUFFIXES = (*PLAIN, ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
CHUNK_CHARS = 1 << 20  # of a plain file that are read at once
NAMED = 10  # files for training and for validation whose names are printed
# Folders of installed packages and of tests, which are not library code.
NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
# What ends a paragraph, a line and a word.
ENDS = [
    re.compile(r"\n\s*\n"),
    re.compile(r"\n"),
    re.compile(r"\s"),
]

Files = list[tuple[str, Path]]  # names and paths


@dataclass(frozen=True)
class Source:
    """A file of documents, or some of its documents, or a part of its only document."""

    path: Path
    name: str  # decides the order, and whether it is used for validation
    sha256: str  # of the file's content
    rules: Rules
    documents: range  # their indices in the file
    length: int  # in characters, of the whole file
    characters: range = range(sys.maxsize)  # of the only document
    part: str = ""  # such as "the last 4 documents of ", for messages

    def read(self, first: int = 0) -> Iterator[Document]:
        """Yield the documents from index `first` of this source on."""
        wanted = self.documents[first:]
        for document in islice(read_file(self.path, self.rules), wanted.start, wanted.stop):
            yield slice_text(document, self.characters)


def list_files(paths: Iterable[str | Path], without: Collection[str] = ()) -> Files:
    """List (name, path) of all files with one of SUFFIXES in these files and folders, by name.

    The name is relative to the folder in `paths`. Hidden files and folders are left out, and so
    are folders whose name is in `without`. Raises UserError if a path is missing, or is a file of
    another type, and where there is no such file.
    """
    by_target: dict[Path, tuple[str, Path]] = {}  # by the file that links lead to
    for path in map(Path, paths):
        if path.is_dir():
            entered = set()
            for parent, folders, files in os.walk(path, onerror=refuse, followlinks=True):
                if Path(parent).resolve() in entered:  # a link leads back
                    folders.clear()
                    continue
                entered.add(Path(parent).resolve())
                # os.walk enters the folders that stay in its list
                visible = [name for name in folders if name[0] != "." and name not in without]
                folders[:] = sorted(visible)
                for name in sorted(files):  # the last link to a file names it
                    file = Path(parent, name)
                    if name[0] != "." and name.endswith(SUFFIXES) and file.is_file():
                        by_target[file.resolve()] = (file.relative_to(path).as_posix(), file)
        elif not path.is_file():
            raise UserError(f"{path}: no such file or folder")
        elif not path.name.endswith(SUFFIXES):
            raise UserError(f"{path}: files must end in one of {' '.join(SUFFIXES)}")
        else:
            by_target[path.resolve()] = (path.name, path)
    if not by_target:
        searched = " ".join(map(str, paths))
        raise UserError(f"{searched}: no file there ends in one of {' '.join(SUFFIXES)}")
    return sorted(by_target.values())


def refuse(error: OSError) -> NoReturn:
    raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error


def list_stdlib() -> Files:
    """List the standard library's Python files, as `list_files` does."""
    files = list_files([sysconfig.get_path("stdlib")], without=NOT_STDLIB)
    return [(name, path) for name, path in files if path.suffix == ".py"]


def read_file(path: Path, rules: Rules) -> Iterator[Document]:
    """Yield the documents of one file.

    Raises UserError if the file cannot be read or parsed.
    """
    with reading(path):
        if path.name.endswith(PLAIN):
            yield from rules.cut(read_plain(path))
        elif path.suffix == ".parquet":
            yield from rules.documents(read_parquet(path, rules.column))
        else:
            yield from rules.documents(read_json_lines(path, rules.column))


def read_plain(path: Path) -> Iterator[str]:
    """Yield the text of a file in chunks, since it may be larger than memory.

    A chunk ends where a word does, so that no end-of-text, which has no space, is in two chunks:
    `Rules` counts it chunk by chunk.
    """
    with open(path, "rb") as file:
        # without a byte-order mark, and with line breaks as they are
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        try:
            yield from split_text(iter(lambda: text.read(CHUNK_CHARS), ""), CHUNK_CHARS)
        except UnicodeDecodeError as error:
            place = file.tell() - len(error.object) + error.start
            raise UserError(f"{path}: byte {place:,} is not UTF-8: {error.reason}") from error


def read_parquet(path: Path, column: str) -> Iterator[tuple[str, Any]]:
    """Yield the name of each row, for messages, and its value in a column."""
    table = pyarrow.parquet.ParquetFile(path)
    if column not in table.schema_arrow.names:
        raise UserError(f"{path}: no column {column!r}")
    row = 0
    for batch in table.iter_batches(BATCH, columns=[column]):
        for value in batch[column].to_pylist():
            yield f"{path}, row {row}", value
            row += 1


def read_json_lines(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    """Yield the name of each line, for messages, and its value of a field."""
    with io.BufferedReader(pyarrow.input_stream(path)) as lines:  # decompresses by the suffix
        for number, line in enumerate(lines, 1):
            if line.strip():
                name = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    start = line[:40].decode(errors="replace").strip()
                    raise UserError(f"{name}: not JSON: {start}") from error
                if not isinstance(row, dict):
                    raise UserError(f"{name}: not a JSON object with fields")
                if field not in row:
                    fields = ", ".join(row) or "none"
                    raise UserError(f'{name}: no field "{field}"; its fields are {fields}')
                yield name, row[field]


def slice_text(document: Document, characters: range) -> Iterator[str]:
    """Yield some of the characters of a document, in chunks."""
    position = 0
    for chunk in document:
        start = max(characters.start - position, 0)
        end = max(characters.stop - position, 0)
        yield chunk[start:end]
        position += len(chunk)


def inspect(files: Files, rules: Rules) -> list[Source]:
    """Read every (name, path) once and count its documents; files without any are left out.

    Raises UserError if a file cannot be read or parsed.
    """
    sources = []
    for name, path in tqdm(files, desc="reading", unit="file", delay=2):
        count = 0
        length = 0
        for document in read_file(path, rules):
            count += 1
            length += sum(map(len, document))
        if count:
            sources.append(Source(path, name, sha256_of(path), rules, range(count), length))
    return sources


def divide(source: Source) -> tuple[list[Source], list[Source]]:
    """Split one source into two, (train, val): val is the last tenth of its characters.

    It begins with the first document that begins in that tenth, or else with the last one. A single
    document is divided before a paragraph, or else a line or a word. Raises UserError if none of
    them begins there.
    """
    if len(source.documents) == 1:
        total = source.length
        cut = find_cut(source)
        first_part = f"the first {cut:,} of {total:,} characters of "
        last_part = f"the last {total - cut:,} characters of "
        train = replace(source, characters=range(cut), part=first_part)
        val = replace(source, characters=range(cut, total), part=last_part)
    else:
        total = len(source.documents)
        lengths = (sum(map(len, document)) for document in source.read())
        starts = accumulate(lengths, initial=0)
        tenth = source.length * 9 / 10
        cut = next(index for index, start in enumerate(starts) if start >= tenth)
        cut = min(cut, total - 1)
        first_part = f"the first {cut:,} of {total:,} documents of "
        last_part = f"the last {total - cut:,} documents of "
        train = replace(source, documents=range(cut), part=first_part)
        val = replace(source, documents=range(cut, total), part=last_part)
    return [train], [val]


def find_cut(source: Source) -> int:
    """Return how many characters of a single document are for training.

    Raises UserError if no word begins in its last tenth.
    """
    tenth = source.length * 9 // 10
    start = max(tenth - 1, 1)
    (document,) = replace(source, characters=range(start, source.length)).read()
    text = "".join(document)
    for pattern in ENDS:
        if match := pattern.search(text.rstrip()):
            return start + match.end()
    beginning = text[tenth - start :][:20]
    raise UserError(
        f"{source.path}: cannot split off a validation set: no word boundary in the last tenth, "
        f"{beginning!r}; give more text, or a file for validation with --val"
    )


def split(sources: list[Source]) -> tuple[list[Source], list[Source]]:
    """Split sources into (train, val).

    For validation a tenth of them, at least one, is chosen by the hash of the name; a single source
    is divided.
    """
    if len(sources) == 1:
        return divide(sources[0])
    ranked = sorted(sources, key=lambda s: hashlib.sha256(os.fsencode(s.name)).digest())
    chosen = ranked[: max(1, len(sources) // 10)]
    val = sorted(chosen, key=lambda source: source.name)
    held_out = {source.path for source in val}
    return [source for source in sources if source.path not in held_out], val


def numbered(source: Source, first: int) -> Iterator[tuple[int, list[Document]]]:
    """Yield the documents of a source from index `first` on, each with its index."""
    for index, document in enumerate(source.read(first), first):
        yield index, [document]


@command
def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="python -m data.text", description=__doc__)
    parser.add_argument("paths", nargs="*", metavar="PATHS", help="files and folders")
    parser.add_argument("--val", nargs="+", metavar="PATHS", help="files, folders to validate on")
    share = "share of the training text's passages of T tokens that get an excerpt behind them"
    parser.add_argument("--repeat", type=float, metavar="SHARE", help=share)
    parser.add_argument("--within", type=int, metavar="T", help="the training length")
    args = parse_options(parser, argv, tokenizer="bytes")

    if args.val and not args.paths:  # --val takes all paths behind it
        raise UserError("--val needs PATHS to train on, which stand before --val")
    if (args.repeat is None) != (args.within is None):
        raise UserError("--repeat SHARE and --within T need each other")
    repeats = args.repeat is not None
    if repeats and not 0 < args.repeat <= 1:
        raise UserError(f"--repeat {args.repeat:g} must be a share above 0, up to 1")
    if repeats and args.within < 16:
        raise UserError(f"--within {args.within} must be at least 16 tokens")
    if any(map(are_ids, args.paths)):
        copy_ids(args)
        return
    folder = f"text_{Path(args.tokenizer).stem}"
    if repeats:
        folder += "_repeat"
    out_dir = args.out_dir or Path("data", folder)
    check_folder(out_dir, args)  # before the files are read
    if args.paths:
        source = " ".join(args.paths)
        files = list_files(args.paths)
    else:
        source = f"standard library of Python {platform.python_version()}"
        files = list_stdlib()
    val_files: Files = []
    if args.val:
        val_files = list_files(args.val)
        held_out = {path.resolve() for _, path in val_files}
        files = [(name, path) for name, path in files if path.resolve() not in held_out]
        if not files:
            raise UserError(f"{source}: --val names all of it, so nothing is left to train on")
    val = inspect(val_files, args.rules)
    train = inspect(files, args.rules)
    args.rules.report()
    if not args.val:
        train, val = split(train)
    if not train or not val:
        raise UserError(f"{source}: too little text for training and validation")
    print_names("training", train)
    print_names("validation", val)
    streams = []
    checksums = []
    for split_sources, repeat in ((val, 0), (train, args.repeat)):
        readers = [partial(numbered, source) for source in split_sources]
        streams.append(partial(tokenise, readers, args, repeat))
        checksums.append([(source.name, source.sha256) for source in split_sources])
    documents = [args.column, checksums]
    build(out_dir, "text", streams, args, source, documents)


def print_names(split: str, sources: list[Source]) -> None:
    names = [source.part + source.name for source in sources[:NAMED]]
    if len(sources) > NAMED:
        names.append(f"and {len(sources) - NAMED} more")
    shown = ", ".join(names).encode(errors="backslashreplace").decode()  # not all are UTF-8
    print(f"{split}: {shown}")


if __name__ == "__main__":
    main()
