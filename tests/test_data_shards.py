"""Shard files: their bytes, what is refused, the folder that holds them."""

import struct

import numpy as np
import pytest

from data import shards
from errors import UserError
from tests.helpers import set_meta


def shard_bytes(tokens, magic=20240520, version=1):
    """A shard as llm.c describes it, made without our writer."""
    header = struct.pack("<3i", magic, version, len(tokens))
    return header + bytes(1024 - len(header)) + struct.pack(f"<{len(tokens)}H", *tokens)


def write(path, *tokens):
    shards.write_shard(path, np.array(tokens, dtype=np.uint16))


def test_the_published_format(tmp_path):
    path = tmp_path / "x_train_000001.bin"
    write(path, 0, 1, 513, 65535)
    assert path.read_bytes() == shard_bytes([0, 1, 513, 65535])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    tokens = shards.read_shard(path)
    assert tokens.dtype == np.uint16 and tokens.tolist() == [0, 1, 513, 65535]


@pytest.mark.parametrize(
    "data, message",
    [
        (shard_bytes([1, 2, 3], magic=7), r"not a shard: it starts with \[7, 1\], not 20240520, 1"),
        (shard_bytes([1, 2, 3])[:-1], "3 tokens, which take 1030 bytes, but the file has 1029"),
        (shard_bytes([]), "0 tokens"),
        (shard_bytes([1, 2, 3]) + b"\0\0", "but the file has 1032"),
        (b"", r"starts with \[\]"),
        (None, "the shard cannot be read: No such"),
    ],
)
def test_refuses_what_is_no_whole_shard(tmp_path, data, message):
    path = tmp_path / "bad_train_000001.bin"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UserError, match=message) as error:
        shards.open_shard(path)
    assert str(path) in str(error.value)


def test_lists_each_split_in_order_and_misses_none(tmp_path):
    names = [f"fineweb_{name}.bin" for name in ("train_000010", "train_000002", "val_000000")]
    for name in names:
        write(tmp_path / name, 1)
    entries = [{"name": name, "tokens": 1, "next": (0, None, 0)} for name in names]
    shards.write_meta(tmp_path, set_meta("bytes", shards=entries))
    assert [p.name for p in shards.list_shards(tmp_path, "train")] == [names[1], names[0]]
    (tmp_path / names[1]).unlink()
    with pytest.raises(UserError, match=f"{names[1]} is missing, which meta.json lists"):
        shards.list_shards(tmp_path, "train")
    assert [p.name for p in shards.list_shards(tmp_path, "val")] == [names[2]]
    shards.write_meta(tmp_path, set_meta("bytes", complete=False))
    with pytest.raises(UserError, match="unfinished; repeat the command"):
        shards.list_shards(tmp_path, "val")
