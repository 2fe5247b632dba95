"""`python -m data.fineweb`: the tokens, datasets of the hub, refusals."""

import hashlib
import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem

from data import fineweb, shards
from tests.corpora import (
    contents,
    expected_tokens,
    make_documents,
    run_fineweb,
    tokens_in,
    write_parquet,
)


def test_fineweb_shards(corpus, tmp_path, capsys):
    documents, folder = corpus
    out = tmp_path / "out"
    run_fineweb(folder, out, workers=2)
    tokens = expected_tokens(documents)
    names = []
    for start in range(0, len(tokens), 1000):
        split = "train" if names else "val"
        names.append(f"fineweb_{split}_{len(names):06d}.bin")
        shard = shards.read_shard(out / names[-1])
        assert np.array_equal(shard, tokens[start : start + 1000])
    meta = shards.read_meta(out)
    assert meta["tokenizer"] == "gpt2"
    assert meta["source"] == str(folder)
    assert [shard["name"] for shard in meta["shards"]] == names
    assert {path.name for path in out.iterdir()} == {*names, ".lock", "meta.json"}
    assert f"done, {len(tokens):,} tokens" in capsys.readouterr().out


def test_fineweb_refusals(corpus, tmp_path, call, refused):
    _, folder = corpus

    def says(message, parquet, *more, out="out"):
        paths = (f"--out_dir={tmp_path / out}", f"--parquet={parquet}")
        refused(call, fineweb, "--workers=1", *paths, *more, says=message)

    says("tokens fill only the validation shard", folder)
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.parquet")  # opening it would wait for ever
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    for name in ("none", "empty", "pipe.parquet", "broken.parquet"):
        path = tmp_path / name
        says(f"{path}: cannot be read: ", path)
    (first, *_) = sorted(folder.glob("**/*.parquet"))
    says("a file is named twice", folder, "--parquet", folder, first)
    other = write_parquet(tmp_path / "other.parquet", ["a"], column="content")
    says("Column name ['text'] not in the dataset. Columns in the dataset: ['id'", other)
    (tmp_path / "mixed").mkdir()
    write_parquet(tmp_path / "mixed/a.parquet", ["a document"])
    lists = write_parquet(tmp_path / "mixed/b.parquet", [["a", "list"]])
    says(f"{lists}: cannot be read: ", tmp_path / "mixed")
    numbers = write_parquet(tmp_path / "numbers.parquet", [17])
    says('numbers.parquet, row 0: "text" must be a string, not int', numbers)
    (tmp_path / "foreign").mkdir()
    shards.write_shard(tmp_path / "foreign/fineweb_train_000007.bin", np.zeros(1, np.uint16))
    says("foreign: holds .bin files that this", folder, out="foreign")
    says("Bad split: test. Available splits: ['train']", folder, "--split=test")


@pytest.mark.parametrize(
    "repo, name, folder",
    [
        ("HuggingFaceFW/fineweb", "sample-10BT", "fineweb10B"),
        ("HuggingFaceFW/fineweb-edu", "sample-100BT", "fineweb_edu100B"),
        ("x/My.Set", "small", "my_set_small"),
        ("x/My.Set", None, "my_set"),
    ],
)
def test_default_folders(repo, name, folder):
    assert fineweb.default_folder(repo, name) == folder


def test_nulls_are_left_out_and_counted(tmp_path, call, capsys):
    documents = [*make_documents(20), "", *make_documents(200, longest=100)]
    folder = tmp_path / "parquet"
    folder.mkdir()
    write_parquet(folder / "0.parquet", documents[:20])
    write_parquet(folder / "1.parquet", [*documents[20:200], None, *documents[200:]])
    out = tmp_path / "out"
    call(fineweb, "--parquet", folder, "--out_dir", out, "--shard_size=1000", "--workers=1")
    assert np.array_equal(tokens_in(out), expected_tokens(documents))
    assert "empty documents left out: 2\n" in capsys.readouterr().out


def test_no_network_is_said_at_once(tmp_path, monkeypatch, call, refused):
    # nothing listens on the discard port of this machine
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("datasets.load_dataset_builder", pytest.fail)  # it retries for minutes
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
        folder = tmp_path / repo
        folder.mkdir()
        (folder / "README.md").write_text(
            f"---\nconfigs:\n- config_name: {configuration}\n  data_files:\n"
            f"  - split: {split}\n    path: sample/*\n---\n"
        )
        return folder

    return make


def test_the_shards_are_the_same_from_the_hub_and_from_disk(corpus, tmp_path, hub, monkeypatch):
    _, folder = corpus
    repo = hub("edu", "sample-10BT", "train")
    out = tmp_path / "out"
    shutil.copytree(folder, repo / "sample")
    monkeypatch.setitem(fineweb.DATASETS, "fineweb-edu", str(repo))
    fineweb.main(["--dataset=fineweb-edu", "--shard_size=1000", f"--out_dir={out}"])
    streamed = contents(out)
    local = run_fineweb(folder, tmp_path / "local", f"--dataset={repo}")
    meta = streamed.pop("meta.json")
    local_meta = local.pop("meta.json")
    assert streamed == local
    assert meta["documents"] == local_meta["documents"]
    assert meta["content"] == local_meta["content"]
    assert meta["source"] == f"{repo} sample-10BT train text"


def test_edited_files_of_the_same_size_are_noticed(tmp_path, call, refused):
    source = tmp_path / "x.parquet"
    out = tmp_path / "out"
    arguments = (call, fineweb, "--parquet", source, "--out_dir", out, "--shard_size=1000")

    def write(text):
        table = pa.table({"text": [text] * 400})
        pq.write_table(table, source, compression="none", use_dictionary=False)
        return source.stat().st_size

    size = write("some words of a text")
    run_fineweb(source, out)
    before = tokens_in(out)
    assert write("more words of a text") == size
    refused(*arguments, says=(f"{out}: made from", "before they were edited", "delete the fol"))
    shutil.rmtree(out)
    run_fineweb(source, out)
    assert not np.array_equal(tokens_in(out), before)


def test_the_hub_knows_the_checksums_of_large_files(tmp_path):
    class Hub(LocalFileSystem):
        def info(self, path, **kwargs):
            return super().info(path, **kwargs) | {"lfs": lfs}

    path = tmp_path / "x"
    path.write_bytes(b"small")
    lfs = {"sha256": "of the large file"}
    assert fineweb.checksum(Hub(), str(path)) == "of the large file"
    lfs = None
    assert fineweb.checksum(Hub(), str(path)) == hashlib.sha256(b"small").hexdigest()


def test_any_dataset_of_the_hub(tmp_path, hub):
    """JSON lines, a configuration, a split and a column of its own."""
    files = [make_documents(45), make_documents(45, seed=1)]
    out = tmp_path / "out"
    repo = hub("Train-Set.v2", "small", "held")
    (repo / "sample").mkdir()
    for k, documents in enumerate(files):
        lines = [json.dumps({"n": n, "body": text}) for n, text in enumerate(documents)]
        (repo / "sample" / f"{k}.jsonl").write_text("\n".join(lines))
    options = ["--name=small", "--column=body", "--split=held", "--shard_size=1000"]
    fineweb.main([f"--dataset={repo}", *options, f"--out_dir={out}"])
    assert np.array_equal(tokens_in(out), expected_tokens(files[0] + files[1]))
