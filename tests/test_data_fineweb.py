"""`python -m data.fineweb`: the tokens, datasets of the hub, refusals."""

import json
import os
import shutil

import numpy as np
import pytest

from data import fineweb, shards
from tests.corpora import (
    contents,
    expected_tokens,
    make_documents,
    run_fineweb,
    tokens_in,
    write_parquet,
)

pytestmark = pytest.mark.usefixtures("no_fsync")


def test_fineweb_shards(corpus, tmp_path, capsys):
    documents, folder = corpus
    out, tokens = tmp_path / "out", expected_tokens(documents)
    run_fineweb(folder, out, workers=2)
    count = -(-len(tokens) // 1000)
    names = [f"fineweb_{'train' if k else 'val'}_{k:06d}.bin" for k in range(count)]
    for k, name in enumerate(names):
        assert np.array_equal(shards.read_shard(out / name), tokens[k * 1000 : (k + 1) * 1000])
    meta = shards.read_meta(out)
    assert (meta["tokenizer"], meta["source"]) == ("gpt2", str(folder))
    assert [s["name"] for s in meta["shards"]] == names
    assert {p.name for p in out.iterdir()} == {*names, ".lock", "meta.json"}
    assert f"done, {len(tokens):,} tokens" in capsys.readouterr().out


def test_fineweb_refusals(corpus, tmp_path, call, refused):
    _, folder = corpus

    def says(message, parquet, *more, out="out"):
        paths = (f"--out_dir={tmp_path / out}", f"--parquet={parquet}")
        refused(call, fineweb, "--workers=1", *paths, *more, says=message)

    says("tokens fill only one shard, for validation", folder)
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.parquet")  # opening it would wait for ever
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    for path in (tmp_path / n for n in ("none", "empty", "pipe.parquet", "broken.parquet")):
        says(f"{path}: cannot be read: ", path)
    other = write_parquet(tmp_path / "other.parquet", ["a"], column="content")
    says("Column name ['text'] not in the dataset. Columns in the dataset: ['id'", other)
    null = write_parquet(tmp_path / "null.parquet", ["a", "b", None])
    says("null.parquet: a document has no text, or it is not a string", null)
    (tmp_path / "foreign").mkdir()
    shards.write_shard(tmp_path / "foreign/fineweb_train_000007.bin", np.zeros(1, np.uint16))
    says("foreign: holds shards that this", folder, out="foreign")
    says("Bad split: test. Available splits: ['train']", folder, "--split=test")


def test_no_network_is_said_at_once(tmp_path, monkeypatch, call, refused):
    # nothing listens on the discard port of this machine
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    says = "error: HuggingFaceFW/fineweb: cannot be read: "
    refused(call, fineweb, f"--out_dir={tmp_path / 'x'}", says=says)
    assert not (tmp_path / "x").exists()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Make the folder of a dataset with one configuration of one split.

    `datasets` reads a folder as it reads a repository of the hub.
    """
    monkeypatch.setattr("huggingface_hub.dataset_info", lambda repo, timeout: None)

    def make(repo, configuration, split):
        (tmp_path / repo).mkdir()
        (tmp_path / repo / "README.md").write_text(
            f"---\nconfigs:\n- config_name: {configuration}\n  data_files:\n"
            f"  - split: {split}\n    path: sample/*\n---\n"
        )
        return tmp_path / repo

    return make


def test_the_shards_are_the_same_from_the_hub_and_from_disk(corpus, tmp_path, hub, monkeypatch):
    _, folder = corpus
    repo, out = hub("edu", "sample-10BT", "train"), tmp_path / "out"
    shutil.copytree(folder, repo / "sample")
    monkeypatch.setitem(fineweb.DATASETS, "fineweb-edu", str(repo))
    fineweb.main(["--dataset=fineweb-edu", "--shard_size=1000", f"--out_dir={out}"])
    made, local = contents(out), run_fineweb(folder, tmp_path / "local", f"--dataset={repo}")
    meta, local_meta = (files.pop("meta.json") for files in (made, local))
    assert made == local and meta["documents"] == local_meta["documents"]
    assert meta["source"] == f"{repo} sample-10BT train text"


def test_any_dataset_of_the_hub(tmp_path, hub):
    """JSON lines, a configuration, a split and a column of its own."""
    documents, out = make_documents(90), tmp_path / "out"
    repo = hub("Train-Set.v2", "small", "held")
    (repo / "sample").mkdir()
    for k in (0, 1):
        lines = [json.dumps({"n": n, "body": text}) for n, text in enumerate(documents[k::2])]
        (repo / "sample" / f"{k}.jsonl").write_text("\n".join(lines))
    options = [f"--dataset={repo}", "--name=small", "--column=body", "--shard_size=1000"]
    fineweb.main([*options, "--split=held", f"--out_dir={out}"])
    assert np.array_equal(tokens_in(out), expected_tokens(documents[::2] + documents[1::2]))
