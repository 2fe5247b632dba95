"""Make the shards of FineWeb, or of any dataset of the hub: `python -m data.fineweb`.

GPT-2's BPE or another --tokenizer, end-of-text before every document, shards of 100M tokens: number
0 for validation, the others for training. Documents are downloaded first (the default), read over
the network as they are needed (--streaming), or read from parquet files on disk (--parquet): the
shards are the same.
--ready downloads published shards of FineWeb's sample-10BT, tokenised in the same way. Stopped at
any point, the same command resumes after the last whole shard. --part 3/16 makes the third of 16
parts of a set, which as many machines can make at the same time, in one folder or in several.
"""

import argparse
import hashlib
import json
import re
from glob import escape
from pathlib import Path

from tqdm import tqdm

from data import shards
from data.build import SHARD_SIZE, Stream, all_cores, build, claim
from data.documents import COLUMN, Documents, one_line, parquet_files
from data.tokenizer import BUILT_IN, get_tokenizer
from errors import UserError, command
from runtime.files import sha256_of, write_json

# Short names of datasets, and the configuration that is taken of these without --name.
DATASETS = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
SAMPLE = "sample-10BT"
READY = "kjj0/fineweb10B-gpt2"
READY_TRAIN_SHARDS = 103

# Name and size in bytes of each file of a dataset, which tell it from others.
Files = list[tuple[str, int]]


def local_files(given: list[str]) -> list[Path]:
    """The given parquet files, and those in the given folders in order of name.

    Raises UserError where a path is missing, is not a regular file, or a folder has no parquet
    file.
    """
    files: list[Path] = []
    for path in map(Path, given):
        found = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
        if not path.exists() or not found:
            raise UserError(f"{path}: no parquet file there")
        files += found
    for path in files:
        if not path.is_file():  # opening a FIFO would wait for ever
            raise UserError(f"{path}: cannot be read: it is not a regular file")
    return files


def hub_files(repo: str, name: str | None, split: str) -> tuple[Files, list[str], str]:
    """The files of a split of a dataset: names and sizes, paths in the repository, and revision.

    Raises UserError where the hub cannot be reached, or has no such dataset.
    """
    import datasets
    from huggingface_hub import HfFileSystem
    from huggingface_hub.hf_file_system import HfFileSystemResolvedRepositoryPath as InRepository

    reach_hub()
    datasets.disable_progress_bars()
    try:
        builder = datasets.load_dataset_builder(repo, name)
        urls = (builder.config.data_files or {}).get(split)
        if not urls:
            raise UserError(f"{repo}: no split {split!r} of {name or 'its default configuration'}")
        system = HfFileSystem()
        sizes = [(Path(url).name, system.info(url)["size"]) for url in urls]
        found = [path for path in map(system.resolve_path, urls) if isinstance(path, InRepository)]
    except UserError:
        raise
    except Exception as error:  # of datasets, or of one of several HTTP libraries
        raise UserError(
            f"{repo}: {one_line(error)}; run the same command again to continue"
        ) from error
    return sizes, [path.path_in_repo for path in found], found[0].revision


def download(repo: str, paths: list[str], revision: str) -> str:
    """Download files of a dataset unless they are in the cache; returns the folder.

    `datasets` would keep a second copy of the text, in Arrow's format, if it were to do this.
    Raises UserError where a download fails.
    """
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(
            repo, repo_type="dataset", revision=revision, allow_patterns=[escape(p) for p in paths]
        )
    except Exception as error:  # from one of several HTTP libraries
        raise UserError(
            f"{repo}: {one_line(error)}; run the same command again to continue"
        ) from error


def reach_hub() -> None:
    """Raise UserError at once, not after minutes of retries, if the hub cannot be reached."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # from one of several HTTP libraries
        raise UserError(
            f"cannot reach {constants.ENDPOINT} ({error}): check the network, or give files that "
            "are on disk with --parquet"
        ) from error


def download_ready(out_dir: Path, n_train: int) -> None:
    """Download the published validation shard and the first `n_train` training shards.

    Raises UserError where the hub cannot be reached, a download fails, or a shard is damaged.
    """
    settings = {
        "tokenizer": "gpt2",
        "shard_size": SHARD_SIZE,
        "fingerprint": READY,
        "source": READY,
    }
    if not 1 <= n_train <= READY_TRAIN_SHARDS:
        raise UserError(f"ready_shards {n_train}: there are 1 to {READY_TRAIN_SHARDS}")
    names = ["fineweb_val_000000.bin"]
    names += [f"fineweb_train_{number:06d}.bin" for number in range(1, n_train + 1)]
    with claim(out_dir, settings) as meta:
        missing = [name for name in names if not _is_whole(out_dir / name)]
        if meta and not missing:
            print(f"{out_dir}: already done, {meta['tokens']:,} tokens")
            return
        if missing:
            reach_hub()
        write_json(out_dir / shards.PROGRESS, settings | {"shards": []})
        for name in tqdm(missing, desc=READY, unit="shard"):
            _download(out_dir, name)
        entries = []
        for path in tqdm(sorted(out_dir.glob("*.bin")), desc="checking", unit="shard"):
            tokens = len(shards.read_shard(path))
            entries.append({"name": path.name, "tokens": tokens, "sha256": sha256_of(path)})
        total = sum(entry["tokens"] for entry in entries)
        vocab_size = get_tokenizer("gpt2").n_vocab
        counts = {"vocab_size": vocab_size, "documents": None, "tokens": total}
        shards.write_meta(out_dir, settings | counts | {"shards": entries})
        (out_dir / shards.PROGRESS).unlink()
    print(f"{out_dir}: done, {total:,} tokens in {len(entries)} shards")


def _is_whole(path: Path) -> bool:
    try:
        shards.read_shard(path)
    except UserError:
        return False
    return True


def _download(out_dir: Path, name: str) -> None:
    """Download one published shard, resuming an earlier attempt."""
    from huggingface_hub import hf_hub_download

    # a damaged file would count as downloaded
    (out_dir / name).unlink(missing_ok=True)
    try:
        hf_hub_download(READY, name, repo_type="dataset", local_dir=out_dir)
    except Exception as error:  # from one of several HTTP libraries
        raise UserError(
            f"{READY}: {name}: {one_line(error)}; run the same command again"
        ) from error
    shards.read_shard(out_dir / name)


def make(
    out_dir: Path,
    prefix: str,
    documents: Documents,
    files: Files,
    shard_size: int,
    workers: int,
    part: shards.Part,
    tokenizer: str,
) -> None:
    """Tokenise a part of a dataset into shards. `files` are those of the whole dataset."""
    small = part[0] == 1 and sum(size for _, size in files) < shard_size  # larger: text enough
    stream = Stream(
        documents=documents.read,
        split=lambda shard: "train" if shard or part[0] > 1 else "val",
        size=documents.size,
        done=documents.done,
        check=lambda: check_size(documents, shard_size) if small else None,
    )
    identity = files if documents.column == COLUMN else [documents.column, files]
    fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    source = documents.source
    build(out_dir, prefix, [stream], tokenizer, shard_size, workers, source, fingerprint, part)


def check_size(documents: Documents, shard_size: int) -> None:
    """Raise UserError where no text can be left for training after the shard for validation.

    A document has no more tokens than UTF-8 bytes, and end-of-text.
    """
    most = 0
    for text, _ in documents.read():
        most += len(text.encode("utf-8", "replace")) + 1
        if most > shard_size:
            return
    raise UserError(
        f"{documents.source}: at most {most:,} tokens, which fill only val shards; both train and "
        f"val are needed: give more text or a smaller --shard_size than {shard_size:,}"
    )


def part_of(text: str) -> shards.Part:
    """The part that an option such as 3/16 names.

    Raises UserError where it names none.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= count:
        raise UserError(f"part {text}: give I/N, part I of N, I being 1 to N")
    return index, count


def share(files: list, part: shards.Part) -> tuple[list, shards.Part]:
    """The files that a part of a set is made from, and the part of their row groups.

    Of N files or more, part I of N gets files I, I + N, ... whole, so that a machine has only these
    to download; of fewer it gets row groups I, I + N, ... of all.
    """
    index, count = part
    return (files, part) if len(files) < count else (files[index - 1 :: count], shards.WHOLE)


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


@command
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m data.fineweb",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--dataset",
        default="fineweb",
        metavar="OWNER/NAME",
        help="a dataset of the hub, or fineweb (the default), or fineweb-edu",
    )
    parser.add_argument("--name", help=f"its configuration; default of FineWeb: {SAMPLE}")
    parser.add_argument("--split", help="its split to take; default: train")
    parser.add_argument("--column", default=COLUMN, help="the column of documents; default: text")
    parser.add_argument(
        "--tokenizer",
        default="gpt2",
        help=f"{', '.join(BUILT_IN)} or a tokenizer.json; default: gpt2",
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--streaming", action="store_true", help="read over the network")
    way.add_argument("--parquet", nargs="+", metavar="PATH", help="files or folders on disk")
    way.add_argument("--ready", action="store_true", help="download published shards")
    parser.add_argument(
        "--ready_shards",
        type=int,
        metavar="N",
        help=f"with --ready, take only the first N training shards of {READY_TRAIN_SHARDS}",
    )
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="make part I of N of the set; default: 1/1"
    )
    parser.add_argument("--out_dir", type=Path, help="default: data/fineweb10B and the like")
    parser.add_argument("--shard_size", type=int, default=SHARD_SIZE, help="tokens per shard")
    parser.add_argument("--workers", type=int, default=all_cores(), help="default: all cores")
    args = parser.parse_args(argv)

    repo = DATASETS.get(args.dataset, args.dataset)
    name = args.name or (SAMPLE if repo in DATASETS.values() else None)
    prefix, folder = names_of(repo, name)
    if args.tokenizer != "gpt2":
        get_tokenizer(args.tokenizer)  # raises now, and not after a download
        folder += f"_{Path(args.tokenizer).stem}"
    out_dir = args.out_dir or Path("data", folder)
    part = part_of(args.part)
    if args.ready_shards is not None and not args.ready:
        raise UserError("--ready_shards: it says how many to download, so it goes with --ready")
    if args.ready:
        asked = (repo, name, args.split, args.column, part, args.tokenizer)
        if asked != (DATASETS["fineweb"], SAMPLE, None, COLUMN, shards.WHOLE, "gpt2"):
            raise UserError(
                "--ready: published shards exist only for fineweb's sample-10BT in gpt2"
            )
        download_ready(
            out_dir, READY_TRAIN_SHARDS if args.ready_shards is None else args.ready_shards
        )
        return
    if args.parquet:
        if args.split:
            raise UserError("--split: files given with --parquet have no splits")
        paths = local_files(args.parquet)
        files = [(path.name, path.stat().st_size) for path in paths]
        chosen, row_groups = share(paths, part)
        documents = parquet_files(" ".join(args.parquet), chosen, args.column, row_groups)
    else:
        split = args.split or "train"
        options = [split] if split != "train" else []
        options += [args.column] if args.column != COLUMN else []
        source = " ".join([repo, *([name] if name else []), *options])
        meta = shards.read_meta(out_dir, part)
        if meta and meta["source"] == source:  # done: checking it needs no network
            same = meta["fingerprint"]
            sizes = (args.shard_size, args.workers)
            build(out_dir, prefix, [], args.tokenizer, *sizes, source, same, part)
            return
        files, in_repo, revision = hub_files(repo, name, split)
        chosen, row_groups = share(in_repo, part)
        documents = Documents(
            source,
            repo if args.streaming else download(repo, chosen, revision),
            args.column,
            split,
            row_groups,
            remote=args.streaming,
            revision=revision if args.streaming else None,
            data_files={split: [escape(path) for path in chosen]},
        )
    make(out_dir, prefix, documents, files, args.shard_size, args.workers, part, args.tokenizer)


if __name__ == "__main__":
    main()
