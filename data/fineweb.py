"""Make the shards of FineWeb, or of any dataset of Hugging Face's hub: `python -m data.fineweb`.

Documents are tokenised by GPT-2's BPE or another --tokenizer, each with end-of-text before it, and
written in shards of 100M tokens: shard 0 is for validation, the others for training. Documents are
streamed over the network, or read from parquet files on disk (--parquet): the shards are the same.
After an interruption, the same command resumes after the last whole shard.
"""

import argparse
import gc
import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.build import BATCH, Read, build, check_folder, parse_options, tokenise
from data.documents import Document, reading
from errors import Parser, UserError, command

# Datasets with a short name, and their configuration without --name.
DATASETS = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
SAMPLE = "sample-10BT"


def open_dataset(
    args: argparse.Namespace, repo: str
) -> tuple[Sequence[Read], list[tuple[str, int]], list[str]]:
    """Open the dataset that these options name; files on disk are read once for their checksums.

    Returns its files, their names and sizes, and their checksums. Raises UserError if the dataset
    cannot be read, or has no such split or column.
    """
    source = " ".join(args.parquet or [repo])
    column = args.column
    with reading(source):
        import datasets
        from fsspec.core import url_to_fs
        from huggingface_hub import dataset_info

        datasets.disable_progress_bars()
        # reading files of this machine must not ask the hub to count it
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised, too
        if args.parquet:
            builder = datasets.load_dataset_builder("parquet", data_files=patterns(args.parquet))
        else:
            dataset_info(repo, timeout=10)  # raises at once, not after minutes of retries
            builder = datasets.load_dataset_builder(repo, args.name)
        # raises for a split or a column that the dataset does not have
        builder.as_streaming_dataset(args.split).select_columns([column])
        sizes = []
        content = []
        paths = builder.config.data_files[args.split]
        if len(set(paths)) < len(paths):
            raise UserError(f"--parquet {source}: a file is named twice")
        for path in tqdm(paths, desc="checksums", unit="file", delay=2):
            filesystem, path_there = url_to_fs(path)
            sizes.append((Path(path).name, filesystem.size(path_there)))
            content.append(checksum(filesystem, path_there))
        if hasattr(builder.config, "columns"):  # parquet: do not read the other columns
            builder.config.columns = [column]
            builder.config.batch_size = BATCH
        dataset = builder.as_streaming_dataset(args.split).select_columns([column])

    def read(index: int, row: int) -> Iterator[tuple[int, list[Document]]]:
        """Yield batches of a file's documents from a row on, each with its first row."""
        path = paths[index]
        with reading(path):
            file = dataset.shard(dataset.num_shards, index).skip(row)
            batches = file.iter(BATCH)
            try:
                for batch in batches:
                    rows = []
                    for number, text in enumerate(batch[column], row):
                        rows.append((f"{path}, row {number}", text))
                    yield row, list(args.rules.documents(rows))
                    row += len(rows)
            finally:
                # a reader that outlives Python aborts the process (apache/arrow issue 45214)
                batches.close()
                gc.collect()

    files = [partial(read, index) for index in range(dataset.num_shards)]
    return files, sizes, content


def checksum(filesystem: Any, path: str) -> str:
    """Return the sha256 of a file's content; the hub knows it of large files without a download."""
    large_file = filesystem.info(path).get("lfs")
    if large_file:
        return large_file["sha256"]
    with filesystem.open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def patterns(paths: list[str]) -> list[str]:
    """Glob patterns of parquet files, and of all parquet files below folders."""
    globs = []
    for path in paths:
        pattern = escape(path)
        if Path(path).is_dir():
            pattern += "/**/*.parquet"
        globs.append(pattern)
    return globs


def default_folder(repo: str, name: str | None) -> str:
    """Return the folder of a dataset and its configuration.

    The folder of x/My.Set with the configuration small is my_set_small, and the folder of
    HuggingFaceFW/fineweb with sample-10BT is fineweb10B.
    """
    words = f"{repo.split('/')[-1]} {name or ''}".lower()
    folder = re.sub("[^a-z0-9]+", "_", words).strip("_")
    return re.sub(r"_sample_(\d+)bt$", r"\1B", folder)


@command
def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="python -m data.fineweb", description=__doc__)
    names = "a dataset of the hub, or fineweb (the default), or fineweb-edu"
    parser.add_argument("--dataset", default="fineweb", metavar="OWNER/NAME", help=names)
    parser.add_argument("--name", help=f"its configuration; default of FineWeb: {SAMPLE}")
    parser.add_argument("--split", default="train", help="its split; default: train")
    parser.add_argument("--parquet", nargs="+", metavar="PATH", help="files or folders on disk")
    parser.set_defaults(repeat=0)
    args = parse_options(parser, argv, tokenizer="gpt2")

    repo = DATASETS.get(args.dataset, args.dataset)
    if not args.name and repo in DATASETS.values():
        args.name = SAMPLE
    folder = default_folder(repo, args.name)
    if args.tokenizer != "gpt2":
        folder += f"_{Path(args.tokenizer).stem}"
    out_dir = args.out_dir or Path("data", folder)
    check_folder(out_dir, args)  # before checksums are computed
    files, sizes, content = open_dataset(args, repo)
    source = args.parquet or filter(None, [repo, args.name, args.split, args.column])
    stream = partial(tokenise, files, args, 0)
    documents = [args.column, sizes]
    build(out_dir, "fineweb", [stream], args, " ".join(source), documents, content)
    args.rules.report()


if __name__ == "__main__":
    main()
