"""Shard files: their bytes, what is refused, the folder that holds them."""

import os
import re
import struct

import numpy as np
import pytest

from data import shards
from errors import UserError
from runtime.files import sha256_of
from tests.helpers import set_meta


def shard_bytes(tokens, magic=20240520, version=1, n=None):
    """A shard as llm.c describes it, made without our writer."""
    header = struct.pack("<3i", magic, version, len(tokens) if n is None else n)
    return header + bytes(1024 - len(header)) + struct.pack(f"<{len(tokens)}H", *tokens)


def test_written_bytes_are_the_published_format(tmp_path):
    path = tmp_path / "x_train_000001.bin"
    digest = shards.write_shard(path, np.array([0, 1, 513, 65535], dtype=np.uint16))
    assert path.read_bytes() == shard_bytes([0, 1, 513, 65535])
    assert digest == sha256_of(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_reads_the_published_format(tmp_path):
    path = tmp_path / "fineweb_val_000000.bin"
    path.write_bytes(shard_bytes([50256, 7, 65535]))
    tokens = shards.read_shard(path)
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint16
    assert tokens.tolist() == [50256, 7, 65535]


@pytest.mark.parametrize(
    "data, message",
    [
        (shard_bytes([1, 2, 3], magic=7), "starts with 7, a shard with 20240520"),
        (shard_bytes([1, 2, 3], version=2), "shard version 2, only version 1"),
        (shard_bytes([1, 2, 3])[:-1], "3 tokens, which take 1030 bytes, but the file has 1029"),
        (shard_bytes([1, 2, 3]) + b"\0\0", "but the file has 1032"),
        (shard_bytes([]), "0 tokens"),
        (b"", "0 bytes, less than a shard's header"),
        (shard_bytes([1])[:1000], "1000 bytes, less than"),
    ],
)
def test_refuses_what_is_no_whole_shard(tmp_path, data, message):
    path = tmp_path / "bad_train_000001.bin"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as error:
        shards.read_shard(path)
    assert str(path) in str(error.value)


def test_refuses_a_fifo(tmp_path):
    """Opening it would wait until somebody writes into it."""
    os.mkfifo(tmp_path / "x_train_000001.bin")
    (path,) = shards.list_shards(tmp_path, "train")
    with pytest.raises(UserError, match="x_train_000001.bin: the shard cannot.*not a regular file"):
        shards.read_shard(path)


def test_refuses_a_missing_shard(tmp_path):
    with pytest.raises(UserError, match="gone_val_000000.bin: the shard cannot be read: No such"):
        shards.read_shard(tmp_path / "gone_val_000000.bin")
    names = ("x_val_000000.bin", "x_train_000001.bin", "x_train_000002.bin")
    for name in names:
        shards.write_shard(tmp_path / name, np.array([1], dtype=np.uint16))
    entries = [{"name": name, "tokens": 1, "sha256": "0" * 64} for name in names]
    shards.write_meta(tmp_path, set_meta("bytes", shards=entries))
    assert len(shards.list_shards(tmp_path, "train")) == 2
    (tmp_path / names[1]).unlink()
    with pytest.raises(UserError, match="x_train_000001.bin is missing, which meta.json lists"):
        shards.list_shards(tmp_path, "train")
    shards.list_shards(tmp_path, "val")  # validation alone needs no other


@pytest.mark.parametrize(
    "tokens", [np.zeros(3, np.int64), np.zeros((2, 2), np.uint16), np.zeros(0)]
)
def test_writer_takes_only_tokens(tmp_path, tokens):
    with pytest.raises(ValueError, match="uint16"):
        shards.write_shard(tmp_path / "x_train_000001.bin", tokens)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_no_shard(tmp_path, monkeypatch):
    path = tmp_path / "x_train_000001.bin"
    shards.write_shard(path, np.array([1, 2], dtype=np.uint16))

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("runtime.files.os.fsync", fail)
    with pytest.raises(UserError, match="00000[12].bin: cannot be written: disk full"):
        shards.write_shard(path, np.array([3], dtype=np.uint16))
    with pytest.raises(UserError, match="00000[12].bin: cannot be written: disk full"):
        shards.write_shard(tmp_path / "x_train_000002.bin", np.array([3], dtype=np.uint16))
    assert shards.list_shards(tmp_path, "train") == [path]
    assert shards.read_shard(path).tolist() == [1, 2]


def test_lists_each_split_in_order(tmp_path):
    for name in ("fineweb_train_000010", "fineweb_train_000002", "fineweb_val_000000"):
        shards.write_shard(tmp_path / f"{name}.bin", np.array([1], dtype=np.uint16))
    train = [path.name for path in shards.list_shards(tmp_path, "train")]
    assert train == ["fineweb_train_000002.bin", "fineweb_train_000010.bin"]
    assert [p.name for p in shards.list_shards(tmp_path, "val")] == ["fineweb_val_000000.bin"]


@pytest.mark.parametrize(
    "name, how",
    [
        ("fineweb10B", r"python -m data.fineweb --out_dir .*fineweb10B`"),
        ("fineweb_edu100B", r"data.fineweb --dataset fineweb-edu --name sample-100BT --out_dir"),
        ("mine", r"python -m data.text \[FILES\] --tokenizer TOKENIZER --out_dir .*mine`"),
        ("text_gpt2", r"python -m data.text \[FILES\] --tokenizer gpt2 --out_dir .*text_gpt2`"),
    ],
)
def test_says_how_to_make_what_is_missing(tmp_path, name, how):
    with pytest.raises(UserError, match=f"{name}: no such folder; make it with `.*{how}"):
        shards.list_shards(tmp_path / name, "train")
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=rf"{name}: no \*_val_\*.bin in it; make it with `.*{how}"):
        shards.list_shards(tmp_path / name, "val")


def test_a_default_folder_needs_no_out_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"data.text \[FILES\] --tokenizer bytes`"):
        shards.list_shards("data/text_bytes", "train")
    with pytest.raises(UserError, match=r"python -m data.fineweb`"):
        shards.list_shards("data/fineweb10B", "train")


def test_the_default_folder_needs_no_option():
    with pytest.raises(UserError, match="`python -m data.fineweb --name sample-350BT`"):
        shards.list_shards("data/fineweb350B", "train")


def test_an_unfinished_set_is_not_used(tmp_path):
    shards.write_shard(tmp_path / "x_train_000001.bin", np.array([1], dtype=np.uint16))
    (tmp_path / shards.PROGRESS).write_text("{}")
    with pytest.raises(UserError, match="unfinished"):
        shards.list_shards(tmp_path, "train")


def test_check_shards_finds_a_token_outside_the_vocabulary(tmp_path):
    good, bad = tmp_path / "x_train_000001.bin", tmp_path / "x_train_000002.bin"
    shards.write_shard(good, np.arange(257, dtype=np.uint16))
    # Past the first chunk of the scan, and not the first token there.
    tokens = np.zeros((1 << 22) + 100, dtype=np.uint16)
    tokens[-3] = 257
    shards.write_shard(bad, tokens)
    shards.check_shards([good, bad], vocab_size=258)
    with pytest.raises(UserError, match=rf"{bad}: token {len(tokens) - 3} is 257.*0 to 256"):
        shards.check_shards([good, bad], vocab_size=257)


def test_shards_of_another_tokenizer_are_refused(tmp_path):
    shards.check_tokenizer(tmp_path, "gpt2")  # published shards have no meta.json
    shards.write_meta(tmp_path, set_meta("gpt2"))
    shards.check_tokenizer(tmp_path, "gpt2")
    message = f"{tmp_path} was made with tokenizer 'gpt2', but tokenizer = 'bytes'"
    with pytest.raises(UserError, match=re.escape(message)):
        shards.check_tokenizer(tmp_path, "bytes")
    shards.write_meta(tmp_path, {})
    with pytest.raises(UserError, match="meta.json: damaged: .*missing required field"):
        shards.check_tokenizer(tmp_path, "gpt2")


def test_meta(tmp_path):
    assert shards.read_meta(tmp_path) is None
    meta = set_meta("gpt2", shards=[{"name": "x_train_000001.bin", "tokens": 3, "sha256": "0"}])
    shards.write_meta(tmp_path, meta)
    assert shards.read_meta(tmp_path) == meta
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(UserError, match="meta.json: cannot be read as JSON"):
        shards.read_meta(tmp_path)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"shards": None}, "Expected `array`, got `null` - at `$.shards`"),
        ({"shards": [1]}, "Expected `object`, got `int` - at `$.shards[0]`"),
        ({"tokens": "many"}, "Expected `int`, got `str` - at `$.tokens`"),
        ({"tokens": ...}, "missing required field `tokens`"),
        ({"shards": [{"name": "../x_train_000001.bin", "tokens": 1, "sha256": ""}]}, "$.shards[0]"),
        ({"shards": [{"name": "/x_train_000001.bin", "tokens": 1, "sha256": ""}]}, "$.shards[0]"),
    ],
)
def test_a_meta_with_a_field_of_another_kind_is_refused(tmp_path, change, says):
    meta = set_meta("gpt2") | change
    shards.write_meta(tmp_path, {key: value for key, value in meta.items() if value is not ...})
    with pytest.raises(UserError, match=re.escape(says)):
        shards.read_meta(tmp_path)
