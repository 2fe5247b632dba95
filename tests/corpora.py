"""Documents, and what the tests of data/ share."""

import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import fineweb, shards
from data.tokenizer import get_tokenizer
from errors import UserError


def make_documents(n, longest=400, seed=0):
    rng = random.Random(seed)
    words = "the a of cat, dog. 12 naïve \n\n  don't 東京 __init__(self): running".split(" ")
    return [" ".join(rng.choices(words, k=rng.randrange(1, longest))) for _ in range(n)]


def write_parquet(path, documents, rows=7, column="text"):
    pq.write_table(pa.table({"id": range(len(documents)), column: documents}), path, rows)
    return path


def expected_tokens(documents, tokenizer="gpt2"):
    """End-of-text and the ids of each document, one after another: uint16 [n]."""
    tok = get_tokenizer(tokenizer)
    return np.array([i for d in documents for i in [tok.eot, *tok.encode(d)]], dtype=np.uint16)


def contents(folder):
    """Name and content of every file in a folder of shards; of meta.json without `next`.

    Where the next shard starts has many names: a document, or one before it and more tokens.
    """
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".lock" and p.is_file()}
    meta = json.loads(files["meta.json"])
    entries = [{key: shard[key] for key in ("name", "tokens")} for shard in meta["shards"]]
    return files | {"meta.json": meta | {"shards": entries}}


def tokens_in(folder):
    """The tokens of all shards, in the order in which they were made."""
    paths = sorted(folder.glob("*.bin"), key=lambda path: path.stem[-6:])
    return np.concatenate([shards.read_shard(path) for path in paths])


def run_fineweb(parquet, out_dir, *more, shard_size=1000, workers=1):
    fineweb.main(
        [f"--parquet={parquet}", f"--out_dir={out_dir}", f"--shard_size={shard_size}"]
        + [f"--workers={workers}", *more]
    )
    return contents(out_dir)


def stop_after_each_shard(monkeypatch, make):
    """Call `make` until it is done, letting it write only one shard each time."""
    write_shard, stops = shards.write_shard, 0

    def write_one(path, part):
        assert not path.exists()
        if written:
            raise KeyError("stopped")
        written.append(path)
        return write_shard(path, part)

    monkeypatch.setattr(shards, "write_shard", write_one)
    while True:
        written = []
        try:
            make()
        except KeyError:
            stops += 1
            assert stops < 200  # each must begin where the one before ended
            with pytest.raises(UserError, match="unfinished"):
                shards.list_shards(written[0].parent, "val")
        else:
            break
    assert stops > 2
