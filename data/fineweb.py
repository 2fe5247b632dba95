"""Make the shards of FineWeb, or of any dataset of the hub: `python -m data.fineweb`.

GPT-2's BPE or another --tokenizer, end-of-text before every document, shards of 100M tokens: number
0 for validation, the others for training. Documents are downloaded first (the default), read over
the network as they are needed (--streaming), or read from parquet files on disk (--parquet): the
shards are the same.
--ready downloads published shards of FineWeb's sample-10BT, tokenised in the same way. Stopped at
any point, the same command resumes after the last whole shard. --part 3/16 makes the third of 16
parts of a set, which as many machines can make at the same time.
"""

import argparse
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

from data import shards
from data.build import BATCH, COLUMN, Read, add_options, build
from data.tokenizer import get_tokenizer
from errors import UserError, command
from runtime.files import write_json

# Short names of datasets, and the configuration that is taken of these without --name.
DATASETS = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
SAMPLE = "sample-10BT"
READY = "kjj0/fineweb10B-gpt2"


def open_dataset(source: str, path: str, column: str, split: str, **where: Any) -> Read:
    """The strings in one column of a split of a dataset.

    `path` and `where` are what `datasets.load_dataset` takes: a repository, a folder, or "parquet",
    and which files. Error messages call the dataset `source`. Raises UserError where it cannot be
    read, or has no such column.
    """
    with reading(source):
        import datasets

        datasets.disable_progress_bars()
        # reading files of this machine must not ask the hub to count it
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised, too
        builder = datasets.load_dataset_builder(path, **where)
        dataset = builder.as_streaming_dataset(split).select_columns([column])
        if hasattr(builder.config, "columns"):  # parquet: the other columns are not read
            builder.config.columns, builder.config.batch_size = [column], BATCH
            dataset = builder.as_streaming_dataset(split)

    def read(state: Any) -> Iterator[tuple[Any, list[str]]]:
        with reading(source):
            dataset.load_state_dict(state)
            for batch in dataset.iter(BATCH):
                if not all(isinstance(text, str) for text in batch[column]):
                    raise UserError(f"{source}: a document has no {column}, or it is not a string")
                yield state, batch[column]
                state = dataset.state_dict()

    return read


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Turn any error of the block into a UserError that names the dataset."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of datasets, pyarrow, the system or any network library
        raise UserError(f"{source}: cannot be read: {' '.join(str(error).split())}") from error


def reach_hub() -> None:
    """Raise UserError at once, not after minutes of retries, where the hub cannot be reached."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # from one of several HTTP libraries
        raise UserError(
            f"cannot reach {constants.ENDPOINT} ({error}): check the network, or give files that "
            "are on disk"
        ) from error


def local_files(given: list[str]) -> list[tuple[str, int]]:
    """Paths and sizes of these parquet files, and of those in these folders in order of name.

    Raises UserError where a path is not a regular file, or a folder has no parquet file.
    """
    files: list[Path] = []
    for path in map(Path, given):
        found = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
        if not found or not all(file.is_file() for file in found):  # a FIFO would wait for ever
            raise UserError(f"{path}: no parquet file there")
        files += found
    return [(str(file.absolute()), file.stat().st_size) for file in files]


def hub_files(repo: str, name: str | None, split: str) -> list[tuple[str, int]]:
    """The files of a split of a dataset: hf:// addresses, which name the revision, and sizes.

    Raises UserError where the hub cannot be reached, or has no such dataset.
    """
    reach_hub()
    with reading(repo):
        import datasets
        from huggingface_hub import HfFileSystem

        builder = datasets.load_dataset_builder(repo, name)
        urls = (builder.config.data_files or {}).get(split)
        if not urls:
            raise UserError(f"{repo}: no split {split!r} of {name or 'its default configuration'}")
        return [(url, HfFileSystem().info(url)["size"]) for url in urls]


def download_ready(out_dir: Path, n_train: int) -> None:
    """Download the published validation shard and the first `n_train` training shards.

    Raises UserError where the hub cannot be reached, a download fails, or a shard is damaged.
    """
    from huggingface_hub import snapshot_download

    if shards.read_meta(out_dir):
        raise UserError(f"{out_dir}: holds shards made on this machine; use another --out_dir")
    names = [f"fineweb_train_{number:06d}.bin" for number in range(1, n_train + 1)]
    names.insert(0, "fineweb_val_000000.bin")
    if not all(shards.is_whole(out_dir / name) for name in names):
        reach_hub()
        out_dir.mkdir(parents=True, exist_ok=True)
        write_json(out_dir / shards.PROGRESS, {})
        with reading(READY):
            snapshot_download(READY, repo_type="dataset", allow_patterns=names, local_dir=out_dir)
        for name in names:
            shards.read_shard(out_dir / name)
        (out_dir / shards.PROGRESS).unlink()
    print(f"{out_dir}: done, {len(names)} shards")


def part_of(files: list[tuple[str, int]], text: str) -> list[tuple[str, int]]:
    """The files of the part that an option such as 3/16 names: the 3rd, 19th, 35th, ...

    Raises UserError where it names none.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= count <= len(files):
        raise UserError(f"--part {text}: give I/N, part I of N, with N at most {len(files)} files")
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


def open_hub(source: str, urls: list[str], column: str, split: str, streaming: bool) -> Read:
    """The documents of these files of a dataset: see `hub_files`.

    Without `streaming` they are downloaded to the hub's cache, unless they are there. (`datasets`
    would keep a second copy of the text, in Arrow's format.)
    """
    from huggingface_hub import snapshot_download

    # hf://datasets/OWNER/NAME@REVISION/PATH
    repo, revision = urls[0].removeprefix("hf://datasets/").split("@")
    revision = revision.split("/")[0]
    files = [escape(url.partition(f"@{revision}/")[2]) for url in urls]
    where: dict[str, Any] = {"data_files": {split: files}}
    if streaming:
        return open_dataset(source, repo, column, split, revision=revision, **where)
    with reading(source):
        folder = snapshot_download(
            repo, repo_type="dataset", revision=revision, allow_patterns=files
        )
    return open_dataset(source, folder, column, split, **where)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m data.fineweb", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = "a dataset of the hub, or fineweb (the default), or fineweb-edu"
    parser.add_argument("--dataset", default="fineweb", metavar="OWNER/NAME", help=names)
    parser.add_argument("--name", help=f"its configuration; default of FineWeb: {SAMPLE}")
    parser.add_argument("--split", default="train", help="its split; default: train")
    parser.add_argument("--column", default=COLUMN, help="the column of documents; default: text")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--streaming", action="store_true", help="read over the network")
    way.add_argument("--parquet", nargs="+", metavar="PATH", help="files or folders on disk")
    ready = "download published shards: that for validation, and N for training; default: all"
    way.add_argument("--ready", nargs="?", type=int, const=103, metavar="N", help=ready)
    parser.add_argument("--part", metavar="I/N", help="make part I of N of the set, a subfolder")
    add_options(parser, tokenizer="gpt2")
    return parser.parse_args(argv)


def find_documents(args: argparse.Namespace, name: str | None, source: str) -> tuple[Read, str]:
    """The documents that these options name, and their fingerprint."""
    repo, where = DATASETS.get(args.dataset, args.dataset), (args.column, args.split)
    files = local_files(args.parquet) if args.parquet else hub_files(repo, name, args.split)
    files = part_of(files, args.part) if args.part else files
    identity: list = [(Path(path).name, size) for path, size in files]
    identity = identity if args.column == COLUMN else [args.column, identity]
    fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    paths = [path for path, _ in files]
    if args.parquet:
        paths = [escape(path) for path in paths]  # datasets takes them as patterns
        return open_dataset(source, "parquet", *where, data_files=paths), fingerprint
    return open_hub(source, paths, *where, args.streaming), fingerprint


@command
def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    repo = DATASETS.get(args.dataset, args.dataset)
    name = args.name or (SAMPLE if repo in DATASETS.values() else None)
    prefix, folder = names_of(repo, name)
    get_tokenizer(args.tokenizer)  # raises now, and not after a download
    folder += "" if args.tokenizer == "gpt2" else f"_{Path(args.tokenizer).stem}"
    out_dir = args.out_dir or Path("data", folder)
    if args.ready is not None:
        asked = (repo, name, args.split, args.column, args.part, args.tokenizer)
        if asked != (DATASETS["fineweb"], SAMPLE, "train", COLUMN, None, "gpt2"):
            raise UserError("--ready: only fineweb's sample-10BT is published, as ids of gpt2")
        return download_ready(out_dir, args.ready)
    options = [word for word in (args.split, args.column) if word not in ("train", COLUMN)]
    source = " ".join(args.parquet or [repo, *filter(None, [name]), *options])
    out_dir /= f"part-{args.part.replace('/', '-of-')}" if args.part else ""
    meta, streams = shards.read_meta(out_dir), []
    if meta and meta["source"] == source and not args.parquet:  # done: no network is needed
        fingerprint = meta["fingerprint"]
    else:
        read, fingerprint = find_documents(args, name, source)
        streams = [read]
    settings = (args.tokenizer, args.shard_size, args.workers, source, fingerprint)
    build(out_dir, prefix, streams, *settings)


if __name__ == "__main__":
    main()
