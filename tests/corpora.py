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
    documents = []
    for _ in range(n):
        length = rng.randrange(1, longest)
        documents.append(" ".join(rng.choices(words, k=length)))
    return documents


def write_parquet(path, documents, rows=7, column="text"):
    table = pa.table({"id": range(len(documents)), column: documents})
    pq.write_table(table, path, rows)
    return path


def expected_tokens(documents, tokenizer="gpt2"):
    """End-of-text and the ids of each document that is not empty, one after another: uint16 [n]."""
    tok = get_tokenizer(tokenizer)
    ids = []
    for document in filter(None, documents):
        ids += [tok.eot, *tok.encode(document)]
    return np.array(ids, dtype=np.uint16)


def contents(folder):
    """Name and content of every file in a folder of shards; of meta.json without `next`.

    The start of the next shard can be given in many ways: by the state at a document, or by an
    earlier state and more tokens.
    """
    files = {}
    for path in folder.iterdir():
        if path.name != ".lock" and path.is_file():
            files[path.name] = path.read_bytes()
    meta = json.loads(files["meta.json"])
    for shard in meta["shards"]:
        del shard["next"]
    files["meta.json"] = meta
    return files


def tokens_in(folder):
    """The tokens of all shards, in the order in which they were made."""
    paths = sorted(folder.glob("*.bin"), key=lambda path: path.stem[-6:])
    return np.concatenate([shards.read_shard(path) for path in paths])


def run_fineweb(parquet, out_dir, *more, shard_size=1000, workers=1):
    arguments = [
        f"--parquet={parquet}",
        f"--out_dir={out_dir}",
        f"--shard_size={shard_size}",
        f"--workers={workers}",
    ]
    fineweb.main([*arguments, *more])
    return contents(out_dir)


def stop_after_each_shard(monkeypatch, make):
    """Call `make` until it is done, letting it write only one shard each time."""
    write_shard = shards.write_shard
    stops = 0

    def write_one(path, tokens):
        assert not path.exists()
        if written:
            raise KeyError("stopped")
        written.append(path)
        return write_shard(path, tokens)

    monkeypatch.setattr(shards, "write_shard", write_one)
    while True:
        written = []
        try:
            make()
        except KeyError:
            stops += 1
            assert stops < 200  # each must begin where the one before ended
            with pytest.raises(UserError, match="incomplete"):
                shards.list_shards(written[0].parent, "val")
        else:
            break
    assert stops > 2
