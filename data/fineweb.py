"""Make the shards of FineWeb, or of any dataset of the hub: `python -m data.fineweb`.

GPT-2's BPE or another --tokenizer, end-of-text before every document, shards of 100M tokens: number
0 for validation, the others for training. Documents are read over the network as they are needed,
or from parquet files on disk (--parquet): the shards are the same. Stopped at any point, the same
command resumes after the last whole shard. --part 3/16 makes the third of 16 parts of a set, which
as many machines can make at the same time.
"""

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

from data.build import BATCH, COLUMN, Read, add_options, build
from data.tokenizer import get_tokenizer
from errors import UserError, command

# Datasets with a short name, and their configuration without --name.
DATASETS = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
SAMPLE = "sample-10BT"


def open_dataset(args: argparse.Namespace, repo: str, name: str | None) -> tuple[Read, list]:
    """The documents that these options name, and the names and sizes of their files.

    Raises UserError where the dataset cannot be read, or has no such split or column.
    """
    source, column = " ".join(args.parquet or [repo]), args.column
    with reading(source):
        import datasets
        from fsspec.core import url_to_fs
        from huggingface_hub import dataset_info

        datasets.disable_progress_bars()
        # reading files of this machine must not ask the hub to count it
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised, too
        if args.parquet:
            paths = [escape(p) + "/**/*.parquet" * Path(p).is_dir() for p in args.parquet]
            builder = datasets.load_dataset_builder("parquet", data_files=paths)
        else:
            dataset_info(repo, timeout=10)  # raises at once, not after minutes of retries
            builder = datasets.load_dataset_builder(repo, name)
        # refuses what the dataset does not have
        dataset = builder.as_streaming_dataset(args.split).select_columns([column])
        files = list(builder.config.data_files[args.split])
        files = choose_part(files, args.part) if args.part else files
        identity = [(Path(file).name, url_to_fs(file)[0].size(file)) for file in files]
        builder.config.data_files = {args.split: files}
        if hasattr(builder.config, "columns"):  # parquet: the other columns are not read
            builder.config.columns, builder.config.batch_size = [column], BATCH
        dataset = builder.as_streaming_dataset(args.split).select_columns([column])

    def read(state: Any) -> Iterator[tuple[Any, list[str]]]:
        with reading(source):
            dataset.load_state_dict(state)
            for batch in dataset.iter(BATCH):
                if not all(isinstance(text, str) for text in batch[column]):
                    raise UserError(f"{source}: a document has no {column}, or it is not a string")
                yield state, batch[column]
                state = dataset.state_dict()

    return read, [column, identity]


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Turn any error of the block into a UserError that names the dataset."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of datasets, pyarrow, the system or any network library
        raise UserError(f"{source}: cannot be read: {' '.join(str(error).split())}") from error


def choose_part(files: list[str], part: str) -> list[str]:
    """The files of a part: for 3/16 the 3rd, 19th, 35th, ...

    Raises UserError where there is no such part.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    index, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= count <= len(files):
        raise UserError(f"--part {part}: give I/N, part I of N, with N at most {len(files)} files")
    return files[index - 1 :: count]


def names_of(repo: str, name: str | None) -> tuple[str, str]:
    """A dataset's prefix of shards' names, and the name of the default folder."""

    def joined(text: str) -> str:
        # a split's name in the prefix would make the shard one of that split
        words = re.findall(r"[a-z0-9]+", text.lower())
        return "_".join(word for word in words if word not in ("train", "val"))

    prefix = joined(repo.split("/")[-1])
    if sample := re.fullmatch(r"sample-(\d+B)T", name or ""):
        return prefix, prefix + sample[1]
    return prefix, f"{prefix}_{joined(name)}" if name else prefix


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m data.fineweb", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = "a dataset of the hub, or fineweb (the default), or fineweb-edu"
    parser.add_argument("--dataset", default="fineweb", metavar="OWNER/NAME", help=names)
    parser.add_argument("--name", help=f"its configuration; default of FineWeb: {SAMPLE}")
    parser.add_argument("--split", default="train", help="its split; default: train")
    parser.add_argument("--column", default=COLUMN, help="the column of documents; default: text")
    parser.add_argument("--parquet", nargs="+", metavar="PATH", help="files or folders on disk")
    parser.add_argument("--part", metavar="I/N", help="make part I of N of the set, a subfolder")
    add_options(parser, tokenizer="gpt2")
    parser.set_defaults(repeat=0)
    return parser.parse_args(argv)


@command
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    repo = DATASETS.get(args.dataset, args.dataset)
    name = args.name or (SAMPLE if repo in DATASETS.values() else None)
    prefix, folder = names_of(repo, name)
    get_tokenizer(args.tokenizer)  # raises now, and not after the files are found
    folder += "" if args.tokenizer == "gpt2" else f"_{Path(args.tokenizer).stem}"
    out_dir = args.out_dir or Path("data", folder)
    out_dir /= f"part-{args.part.replace('/', '-of-')}" if args.part else ""
    read, documents = open_dataset(args, repo, name)
    source = " ".join(args.parquet or filter(None, [repo, name, args.split, args.column]))
    build(out_dir, prefix, [read], args, source, documents)


if __name__ == "__main__":
    main()
