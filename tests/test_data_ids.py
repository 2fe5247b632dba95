"""Ids of nanoGPT and build-nanogpt as shards, and nanoGPT's characters as a tokenizer."""

import pickle

import numpy as np
import pytest

from data import ids, text
from data.shards import list_shards, read_meta, read_shard, write_shard
from data.tasks import check_tokenizer
from data.tokenizer import get_tokenizer
from errors import UserError
from tests.corpora import contents, stop_after_each_shard
from tests.helpers import Malicious


@pytest.fixture
def files(tmp_path):
    """train.bin, val.bin and two .npy of ids below 50,257, and these ids."""
    rng = np.random.default_rng(0)
    arrays = {}
    for name, count in {"train.bin": 50, "val.bin": 9, "a.npy": 13, "b.npy": 8}.items():
        arrays[name] = rng.integers(50257, size=count, dtype=np.uint16)
        if name.endswith(".npy"):
            np.save(tmp_path / name, arrays[name])
        else:
            arrays[name].tofile(tmp_path / name)
    return tmp_path, arrays


def run(out, *arguments):
    text.main([*map(str, arguments), f"--out_dir={out}", "--tokenizer=gpt2", "--shard_size=20"])
    return contents(out)


def tokens(out, split):
    return np.concatenate([read_shard(path) for path in list_shards(out, split)])


def test_ids_are_copied(files, tmp_path, monkeypatch, capsys, refused):
    """In the order given, in shards that begin again where they were stopped."""
    folder, arrays = files
    monkeypatch.setattr(ids, "CHUNK", 7)
    out = tmp_path / "out"
    arguments = (folder / "train.bin", "--val", folder / "val.bin")
    whole = run(out, *arguments)
    assert np.array_equal(tokens(out, "train"), arrays["train.bin"])
    assert np.array_equal(tokens(out, "val"), arrays["val.bin"])
    assert read_meta(out)["tokenizer"] == "gpt2"
    assert "already done" not in capsys.readouterr().out
    assert run(out, *arguments) == whole
    assert "already done" in capsys.readouterr().out
    names = ("b.npy", "train.bin", "a.npy")
    run(tmp_path / "several", *(folder / name for name in names), *arguments[1:])
    expected = np.concatenate([arrays[name] for name in names])
    assert np.array_equal(tokens(tmp_path / "several", "train"), expected)
    again = tmp_path / "again"
    stop_after_each_shard(monkeypatch, lambda: run(again, *arguments))
    assert contents(again) == whole
    monkeypatch.undo()
    arrays["train.bin"][::-1].tofile(folder / "train.bin")
    refused(run, out, *arguments, says="made from other documents")


def test_a_folder_of_others_is_refused_before_the_ids_are_read(
    files, tmp_path, refused, monkeypatch
):
    folder, arrays = files
    out = tmp_path / "out"
    out.mkdir()
    write_shard(out / "theirs_train_000001.bin", arrays["train.bin"])
    monkeypatch.setattr(ids, "checksum", pytest.fail)
    arguments = (folder / "train.bin", "--val", folder / "val.bin")
    refused(run, out, *arguments, says="holds .bin files that this command did not make")


def test_what_is_not_ids_is_refused(files, tmp_path, refused):
    folder, arrays = files
    val = ("--val", folder / "val.bin")
    twice = (folder / "val.bin", *val)
    refused(run, tmp_path / "out", *twice, says="val.bin is for training and for validation too")
    out = tmp_path / "out"
    (folder / "odd.bin").write_bytes(b"odd")
    (folder / "empty.npy").write_bytes(b"")
    np.save(folder / "zero.npy", arrays["train.bin"][:0])
    np.save(folder / "wide.npy", arrays["train.bin"].astype(np.int64))
    np.save(folder / "rows.npy", arrays["train.bin"].reshape(2, 25))
    write_shard(folder / "shard.bin", arrays["train.bin"])
    arrays["train.bin"][17] = 50257
    arrays["train.bin"].tofile(folder / "other.bin")
    (folder / "text.txt").write_text("text")
    for arguments, says in {
        ("odd.bin", *val): "odd.bin: cannot be read as ids of uint16",
        ("train.bin", "--val", folder / "zero.npy"): "zero.npy: has no ids",
        ("empty.npy", *val): "empty.npy: cannot be read as ids of uint16",
        ("none.npy", *val): "none.npy: cannot be read as ids of uint16",
        ("wide.npy", *val): "wide.npy: has int64 [50]; ids must be uint16 [n]",
        ("rows.npy", *val): "rows.npy: has uint16 [2, 25]",
        ("shard.bin", *val): "shard.bin is a shard: --data_dir takes",
        ("other.bin", *val): "other.bin: token 17 is 50257, but the vocabulary is 0 to 50256",
        ("train.bin",): "files of ids for validation too",
        ("train.bin", folder / "text.txt", *val): "files of ids for validation too",
        ("train.bin", *val, "--split_at=x"): "--split_at and --field are for text",
        ("train.bin", *val, "--repeat=1", "--within=16"): "are for text",
    }.items():
        first, *rest = arguments
        refused(run, out, folder / first, *rest, says=says)
    assert not out.exists()


CHARACTERS = "\n !abc\u00e9"


def save_characters(folder, itos, count=30):
    """The files of nanoGPT's data/shakespeare_char."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("train.bin", "val.bin"):
        rng.integers(len(itos), size=count, dtype=np.uint16).tofile(folder / name)
    stoi = {text: i for i, text in itos.items()}
    meta = {"vocab_size": len(itos), "itos": itos, "stoi": stoi}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return [str(folder / "train.bin"), "--val", str(folder / "val.bin")]


def test_characters(tmp_path, monkeypatch, refused):
    """meta.pkl becomes the shards' tokenizer; their folder is named as the folder of the ids."""
    arguments = save_characters(tmp_path / "shakespeare_char", dict(enumerate(CHARACTERS)))
    monkeypatch.chdir(tmp_path)
    text.main(arguments)
    out = tmp_path / "data/shakespeare_char"
    file = str(out / "tokenizer.json")
    check_tokenizer(out, file)
    tokenizer = get_tokenizer(file)
    assert tokenizer.n_vocab == 1 + len(CHARACTERS)
    assert tokenizer.eot == len(CHARACTERS)
    assert tokenizer.encode(CHARACTERS) == list(range(len(CHARACTERS)))
    train = tokens(out, "train")
    assert np.array_equal(train, np.fromfile(arguments[0], np.uint16))
    assert tokenizer.decode(train) == "".join(CHARACTERS[i] for i in train)
    with pytest.raises(UserError, match="cannot encode 'z'"):
        tokenizer.encode("z")
    links = tmp_path / "links"
    links.mkdir()
    for name in ("train.bin", "val.bin"):
        (links / name).symlink_to(tmp_path / "shakespeare_char" / name)
    (tmp_path / "shakespeare_char/meta.pkl").rename(links / "meta.pkl")  # beside the links
    text.main([str(links / "train.bin"), "--val", str(links / "val.bin")])
    assert np.array_equal(tokens(tmp_path / "data/links", "train"), train)
    check_tokenizer(tmp_path / "data/links", file)
    (links / "meta.pkl").rename(tmp_path / "shakespeare_char/meta.pkl")
    before = contents(out)
    text.main(arguments)  # the same file again
    assert contents(out) == before
    says = "meta.pkl says what the ids stand for: leave out --tokenizer"
    refused(text.main, [*arguments, "--tokenizer=gpt2"], says=says)
    refused(text.main, [*arguments, "--field=title"], says="--field are for text: ids stay as")


def test_other_pickles_are_refused(tmp_path, refused, capsys):
    arguments = save_characters(tmp_path / "words", {0: "the", 1: "cat"})
    refused(text.main, arguments, says="its ids are not of single characters")
    for content, says in [
        (pickle.dumps({"itos": Malicious()}), "an object of builtins.print"),
        (pickle.dumps({"itos": {1: "a"}}), "KeyError(0)"),
        (b"damaged", "not a meta.pkl of nanoGPT"),
    ]:
        (tmp_path / "words/meta.pkl").write_bytes(content)
        refused(text.main, arguments, says=says)
    assert "run" not in capsys.readouterr().out
