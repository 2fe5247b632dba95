"""Make the shards of FineWeb, or of any dataset of Hugging Face's hub: `python -m data.fineweb`.

Documents are tokenised by GPT-2's BPE or another --tokenizer, each with end-of-text before it, and
written in shards of 100M tokens: shard 0 is for validation, the others for training. Documents are
streamed over the network, or read from a folder on disk: the shards are the same. After an
interruption, the same command resumes after the last whole shard.
"""

import argparse
import gc
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from data.build import BATCH, COLUMN, Read, build, parse_options, tokenise
from data.documents import reading
from errors import command

# Datasets with a short name, and their configuration without --name.
DATASETS = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
SAMPLE = "sample-10BT"


def open_dataset(
    args: argparse.Namespace, repo: str
) -> tuple[Sequence[Read], list[tuple[str, int]]]:
    """Open a dataset of the hub, or in a folder; returns its files, and their names and sizes.

    Raises UserError if it cannot be read, or has no such split or column.
    """
    column = args.column
    with reading(repo):
        import datasets
        from fsspec.core import url_to_fs
        from huggingface_hub import dataset_info

        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised, too
        if not Path(repo).is_dir():
            dataset_info(repo, timeout=10)  # raises at once, not after minutes of retries
        builder = datasets.load_dataset_builder(repo, args.name)
        # raises for a split or a column that the dataset does not have, and lists its columns
        builder.as_streaming_dataset(args.split).select_columns([column])
        if hasattr(builder.config, "columns"):  # parquet: do not read the other columns
            builder.config.columns = [column]
            builder.config.batch_size = BATCH
        dataset = builder.as_streaming_dataset(args.split).select_columns([column])
        paths = builder.config.data_files[args.split]
        sizes = []
        for path in paths:
            filesystem, path_there = url_to_fs(path)
            sizes.append((Path(path).name, filesystem.size(path_there)))

    def read(index: int, row: int) -> Iterator[tuple[int, list[str]]]:
        """Yield batches of a file's documents from a row on, each with its first row."""
        path = paths[index]
        with reading(path):
            file = dataset.shard(dataset.num_shards, index).skip(row)
            batches = file.iter(BATCH)
            try:
                for batch in batches:
                    rows = batch[column]
                    yield row, list(args.rules.documents(path, rows))
                    row += len(rows)
            finally:
                # a reader that outlives Python aborts the process (apache/arrow issue 45214)
                batches.close()
                gc.collect()

    files = [partial(read, index) for index in range(dataset.num_shards)]
    return files, sizes


def default_folder(repo: str, name: str | None) -> str:
    """Return the folder of a dataset and its configuration.

    It is my_set_small of x/My.Set and small, and fineweb10B of HuggingFaceFW/fineweb, sample-10BT.
    """
    words = f"{Path(repo).resolve().name} {name or ''}".lower()
    folder = re.sub("[^a-z0-9]+", "_", words).strip("_")
    return re.sub(r"_sample_(\d+)bt$", r"\1B", folder)


@command
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.fineweb", description=__doc__)
    names = "a dataset of the hub, or a folder, or fineweb (the default), or fineweb-edu"
    parser.add_argument("--dataset", default="fineweb", metavar="OWNER/NAME", help=names)
    parser.add_argument("--name", help=f"its configuration; default of FineWeb: {SAMPLE}")
    parser.add_argument("--split", default="train", help="its split; default: train")
    parser.add_argument("--column", default=COLUMN, help="the column of documents; default: text")
    parser.set_defaults(repeat=0)
    args = parse_options(parser, argv, tokenizer="gpt2")

    repo = DATASETS.get(args.dataset, args.dataset)
    if not args.name and repo in DATASETS.values():
        args.name = SAMPLE
    folder = default_folder(repo, args.name)
    if args.tokenizer != "gpt2":
        folder += f"_{Path(args.tokenizer).stem}"
    files, sizes = open_dataset(args, repo)
    source = " ".join(filter(None, [repo, args.name, args.split, args.column]))
    stream = partial(tokenise, files, args, 0)
    build(folder, "fineweb", [stream], args, source, [args.column, sizes])
    args.rules.report()


if __name__ == "__main__":
    main()
