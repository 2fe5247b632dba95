"""Make the shards of FineWeb or FineWeb-Edu: `python -m data.fineweb`.

GPT-2 BPE, end-of-text before every document, shards of 100M tokens: number 0 for validation, the
others for training. Documents are downloaded first (the default), read over the network as they
are needed (--streaming), or read from parquet files on disk (--parquet): the shards are the same.
--ready downloads published shards of FineWeb's sample-10BT, tokenised in the same way. Stopped at
any point, the same command resumes after the last whole shard.
"""

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from data import shards
from data.build import SHARD_SIZE, Stream, all_cores, build, claim
from data.parquet import OpenFile, count_documents, read_documents
from data.tokenizer import get_tokenizer
from errors import UserError, command
from runtime.files import sha256_of, write_json

DATASETS = {"fineweb": "HuggingFaceFW/fineweb", "fineweb-edu": "HuggingFaceFW/fineweb-edu"}
# Each sample's folder in the dataset's repository.
SAMPLES = {f"sample-{size}": f"sample/{size}" for size in ("10BT", "100BT", "350BT")}
READY = "kjj0/fineweb10B-gpt2"
READY_TRAIN_SHARDS = 103
# Bytes per network request: large, since most of a file is text.
NETWORK_BLOCK = 1 << 25

# Parquet files: the name and size in bytes of each, their paths, and how to open one.
Files = tuple[list[tuple[str, int]], Sequence[str | Path], OpenFile]


def local_files(given: list[str]) -> Files:
    """The given parquet files, and those in the given folders in order of name.

    Raises UserError where a path is missing, or a folder has no parquet file.
    """
    files: list[Path] = []
    for path in map(Path, given):
        found = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
        if not path.exists() or not found:
            raise UserError(f"{path}: no parquet file there")
        files += found
    return [(path.name, path.stat().st_size) for path in files], files, open


def hub_files(repo: str, folder: str, streaming: bool) -> Files:
    """The parquet files in a folder of a dataset, downloaded, or to be read over the network.

    Raises UserError where the hub cannot be reached, or a request to it fails.
    """
    import huggingface_hub

    reach_hub()
    try:
        tree = huggingface_hub.HfApi().list_repo_tree(repo, folder, repo_type="dataset")
        files = (entry for entry in tree if isinstance(entry, huggingface_hub.hf_api.RepoFile))
        listed = sorted((f.path, f.size) for f in files if f.path.endswith(".parquet"))
        names = [(Path(path).name, size) for path, size in listed]
        if streaming:
            system = huggingface_hub.HfFileSystem(block_size=NETWORK_BLOCK)
            return names, [f"datasets/{repo}/{path}" for path, _ in listed], system.open
        root = huggingface_hub.snapshot_download(
            repo, repo_type="dataset", allow_patterns=[path for path, _ in listed]
        )
    except Exception as error:  # from one of several HTTP libraries
        raise UserError(f"{repo}: {error}; run the same command again to continue") from error
    return names, [Path(root, path) for path, _ in listed], open


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
        raise UserError(f"{READY}: {name}: {error}; run the same command again") from error
    shards.read_shard(out_dir / name)


def make(
    out_dir: Path, prefix: str, source: str, files: Files, shard_size: int, workers: int
) -> None:
    """Tokenise parquet files into shards."""
    names, paths, open_file = files
    counting = tqdm(paths, desc="counting documents", unit="file", delay=2)
    count = sum(count_documents(path, open_file) for path in counting)
    stream = Stream(
        documents=lambda start: read_documents(paths, start, open_file),
        count=count,
        split=lambda shard: "train" if shard else "val",
    )
    fingerprint = hashlib.sha256(json.dumps(names).encode()).hexdigest()
    build(out_dir, prefix, [stream], "gpt2", shard_size, workers, source, fingerprint)


@command
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m data.fineweb",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dataset", choices=DATASETS, default="fineweb")
    parser.add_argument("--name", choices=SAMPLES, default="sample-10BT")
    parser.add_argument("--streaming", action="store_true", help="read over the network")
    parser.add_argument("--parquet", nargs="+", metavar="PATH", help="files or folders on disk")
    parser.add_argument("--ready", action="store_true", help="download published shards")
    parser.add_argument(
        "--ready_shards",
        type=int,
        default=READY_TRAIN_SHARDS,
        metavar="N",
        help=f"only the first N of the {READY_TRAIN_SHARDS} training shards",
    )
    parser.add_argument("--out_dir", type=Path, help="default: data/fineweb10B and the like")
    parser.add_argument("--shard_size", type=int, default=SHARD_SIZE, help="tokens per shard")
    parser.add_argument("--workers", type=int, default=all_cores(), help="default: all cores")
    args = parser.parse_args(argv)

    repo = DATASETS[args.dataset]
    prefix = args.dataset.replace("-", "_")
    out_dir = args.out_dir or Path("data", prefix + args.name.removeprefix("sample-")[:-1])
    if args.ready:
        if (args.dataset, args.name) != ("fineweb", "sample-10BT") or args.parquet:
            raise UserError("--ready: published shards exist only for fineweb's sample-10BT")
        download_ready(out_dir, args.ready_shards)
        return
    if args.parquet:
        source = " ".join(args.parquet)
        files = local_files(args.parquet)
    else:
        source = f"{repo} {args.name}"
        meta = shards.read_meta(out_dir)
        if meta and meta["source"] == source:  # done: checking it needs no network
            known = meta["fingerprint"]
            build(out_dir, prefix, [], "gpt2", args.shard_size, args.workers, source, known)
            return
        files = hub_files(repo, SAMPLES[args.name], args.streaming)
    make(out_dir, prefix, source, files, args.shard_size, args.workers)


if __name__ == "__main__":
    main()
