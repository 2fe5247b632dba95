"""`python -m data.fineweb`: the tokens, datasets of the hub, refusals."""

import json
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
    assert meta["source"] == f"{folder} train text"
    assert [shard["name"] for shard in meta["shards"]] == names
    assert {path.name for path in out.iterdir()} == {*names, ".lock", "meta.json"}
    assert f"done, {len(tokens):,} tokens" in capsys.readouterr().out


def test_fineweb_refusals(corpus, tmp_path, call, refused):
    _, folder = corpus

    def says(message, dataset, *more, out="out"):
        paths = (f"--out_dir={tmp_path / out}", f"--dataset={dataset}")
        refused(call, fineweb, "--workers=1", *paths, *more, says=message)

    def write(name, rows, **options):
        return write_parquet(tmp_path / name, rows, **options).parent

    says("tokens fill only the validation shard", folder)
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/x.parquet").write_bytes(b"PAR1 no")
    for name in ("none", "empty", "broken"):
        path = tmp_path / name
        says(f"{path}: cannot be read: ", path)
    other = write("other/x.parquet", ["a"], column="content")
    says("Column name ['text'] not in the dataset. Columns in the dataset: ['id'", other)
    mixed = write("mixed/a.parquet", ["a document"])
    write("mixed/b.parquet", [["a", "list"]])
    says(f"{mixed}/b.parquet: cannot be read: ", mixed)
    numbers = write("numbers/x.parquet", [17])
    says('numbers/x.parquet: "text" must be a string, not int', numbers)
    (tmp_path / "foreign").mkdir()
    shards.write_shard(tmp_path / "foreign/fineweb_train_000007.bin", np.zeros(1, np.uint16))
    says("foreign: holds .bin files that this", folder, out="foreign")
    says("Bad split: test. Available splits: ['train']", folder, "--split=test")


def test_nulls_are_left_out_and_counted(tmp_path, call, capsys):
    documents = [*make_documents(20), "", *make_documents(200, longest=100)]
    folder = tmp_path / "parquet"
    folder.mkdir()
    write_parquet(folder / "0.parquet", documents[:20])
    write_parquet(folder / "1.parquet", [*documents[20:200], None, *documents[200:]])
    out = tmp_path / "out"
    call(fineweb, "--dataset", folder, "--out_dir", out, "--shard_size=1000", "--workers=1")
    assert np.array_equal(tokens_in(out), expected_tokens(documents))
    assert "empty documents left out: 2\n" in capsys.readouterr().out


def test_no_network_is_said_at_once(tmp_path, monkeypatch, call, refused):
    # nothing listens on the discard port of this machine
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    says = "error: HuggingFaceFW/fineweb: cannot be read: "
    refused(call, fineweb, f"--out_dir={tmp_path / 'x'}", says=says)
    assert not (tmp_path / "x").exists()


@pytest.fixture
def hub(tmp_path):
    """Make the folder of a dataset with one configuration of one split.

    `datasets` reads a folder as it reads a repository of the hub.
    """

    def make(repo, configuration, split):
        folder = tmp_path / repo
        folder.mkdir()
        (folder / "README.md").write_text(
            f"---\nconfigs:\n- config_name: {configuration}\n  data_files:\n"
            f"  - split: {split}\n    path: sample/*\n---\n"
        )
        return folder

    return make


def test_a_configuration_has_the_shards_of_its_files(corpus, tmp_path, hub, monkeypatch):
    _, folder = corpus
    repo = hub("edu", "sample-10BT", "train")
    out = tmp_path / "out"
    shutil.copytree(folder, repo / "sample")
    monkeypatch.setitem(fineweb.DATASETS, "fineweb-edu", str(repo))
    fineweb.main(["--dataset=fineweb-edu", "--shard_size=1000", f"--out_dir={out}"])
    configured = contents(out)
    files_alone = run_fineweb(folder, tmp_path / "alone")
    meta = configured.pop("meta.json")
    meta_of_files = files_alone.pop("meta.json")
    assert configured == files_alone
    assert meta["documents"] == meta_of_files["documents"]
    assert meta["source"] == f"{repo} sample-10BT train text"


def test_a_folder_needs_no_network(corpus, tmp_path, monkeypatch):
    def connect(*arguments):
        raise AssertionError("a request over the network")

    monkeypatch.setattr("socket.getaddrinfo", connect)
    monkeypatch.setattr("socket.socket.connect", connect)
    _, folder = corpus
    run_fineweb(folder, tmp_path / "out")


def test_the_default_folder():
    assert fineweb.default_folder("x/My.Set", "small") == "my_set_small"
    assert fineweb.default_folder("HuggingFaceFW/fineweb", "sample-10BT") == "fineweb10B"
    assert fineweb.default_folder("downloads/My.Set/", None) == "my_set"


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
