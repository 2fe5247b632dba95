"""Make shards from token ids of another program: nanoGPT's .bin and build-nanogpt's .npy.

The ids are copied unchanged and in order, after a check that they are within the vocabulary.
"""

import argparse
import hashlib
import pickle
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.build import COLUMN, build, check_folder, in_turn
from data.shards import HEADER, MAGIC, TOKEN, Tokens, check_ids
from data.vocabulary import END_OF_TEXT, TOKENIZER, count_ids
from errors import UserError

SUFFIXES = (".bin", ".npy")
CHUNK = 1 << 20  # ids that are read at once
# What nanoGPT writes beside ids of characters.
META_PKL = "meta.pkl"


def are_ids(path: str | Path) -> bool:
    return Path(path).suffix in SUFFIXES


def open_ids(path: Path) -> Tokens:
    """Map the ids [n] of a file into memory.

    Raises UserError if it cannot be read, has another form, or is a shard already.
    """
    try:
        if path.suffix == ".npy":
            ids = np.lib.format.open_memmap(path, mode="r")
        else:
            ids = np.memmap(path, TOKEN, mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as ids of uint16: {error}") from error
    if ids.dtype != TOKEN or ids.ndim != 1:
        raise UserError(f"{path}: has {ids.dtype} {list(ids.shape)}; ids must be uint16 [n]")
    if len(ids) == 0:
        raise UserError(f"{path}: has no ids")
    if np.array_equal(ids[:2], np.array([MAGIC], HEADER).view(TOKEN)):
        raise UserError(f"{path} is a shard: --data_dir takes its folder as it is (docs/data.md)")
    return ids


def checksum(path: Path, vocab_size: int) -> str:
    """Return a hash of a file's ids. Raises UserError if one is not below `vocab_size`."""
    ids = open_ids(path)
    digest = hashlib.sha256()
    for start in tqdm(range(0, len(ids), CHUNK), desc=f"checking {path}", delay=2):
        chunk = ids[start : start + CHUNK]
        check_ids(path, chunk, vocab_size, start)
        digest.update(chunk.data)
    return digest.hexdigest()


def read_ids(path: Path, first: int) -> Iterator[tuple[int, Tokens]]:
    """Yield the ids of a file from index `first` on, in chunks, each with its first index."""
    ids = open_ids(path)
    for start in range(first, len(ids), CHUNK):
        yield start, ids[start : start + CHUNK]


def copy_ids(args: argparse.Namespace) -> None:
    """Make a folder of shards from the files of data.text's command line.

    Raises UserError if they are not all of ids, or an option is for text.
    """
    if not args.val or not all(map(are_ids, [*args.paths, *args.val])):
        raise UserError("ids need files of ids for validation too: train.bin --val val.bin")
    training = [Path(path).resolve() for path in args.paths]
    for path in args.val:
        if Path(path).resolve() in training:
            raise UserError(f"{path} is for training and for validation too")
    if args.repeat or args.split_at is not None or args.column != COLUMN:
        raise UserError("--repeat, --split_at and --field are for text: ids stay as they are")
    folder = Path(args.paths[0]).absolute().parent
    meta_pkl = folder / META_PKL
    with tempfile.TemporaryDirectory() as temporary:
        if meta_pkl.is_file():
            if args.tokenizer != "bytes":  # the default
                raise UserError(f"{meta_pkl} says what the ids stand for: leave out --tokenizer")
            args.tokenizer = str(Path(temporary, TOKENIZER))
            tokenizer_of_characters(meta_pkl).save(args.tokenizer)
        out_dir = args.out_dir or Path("data", folder.name)
        check_folder(out_dir, args)  # before the ids are read
        vocab_size = count_ids(args.tokenizer)
        streams = []
        checksums = []
        for split in (args.val, args.paths):
            paths = list(map(Path, split))
            streams.append(partial(in_turn, [partial(read_ids, path) for path in paths]))
            checksums.append([checksum(path, vocab_size) for path in paths])
        build(out_dir, "text", streams, args, " ".join(args.paths), checksums)


# ---- characters ----


class PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, texts and numbers; anything else could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"it has an object of {module}.{name}, not plain values alone")


def read_characters(path: Path) -> list[str]:
    """Return the character of each id in nanoGPT's meta.pkl.

    Raises UserError if the file cannot be read, or has tokens that are not characters.
    """
    try:
        with open(path, "rb") as file:
            itos = PlainUnpickler(file).load()["itos"]
        characters = [itos[i] for i in range(len(itos))]
    except Exception as error:  # pickle raises many types for damaged files
        raise UserError(f"{path}: not a meta.pkl of nanoGPT: {error!r}") from error
    if not all(isinstance(text, str) and len(text) == 1 for text in characters):
        raise UserError(
            f"{path}: its ids are not of single characters: give a tokenizer.json of them with "
            "--tokenizer, and move meta.pkl away"
        )
    return characters


def tokenizer_of_characters(meta_pkl: Path) -> Any:
    """Return a tokenizer with nanoGPT's ids of characters, and end-of-text as the last id.

    Raises UserError as `read_characters`, and where the library is missing.
    """
    characters = read_characters(meta_pkl)
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise UserError(f"{meta_pkl}: this needs `pip install tokenizers`") from error
    ids = {text: i for i, text in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(ids))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer
