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
    assert list(tmp_path.iterdir()) == [path]
    tokens = shards.read_shard(path)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [0, 1, 513, 65535]


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
    later = tmp_path / "fineweb_train_000010.bin"
    earlier = tmp_path / "fineweb_train_000002.bin"
    val = tmp_path / "fineweb_val_000000.bin"
    entries = []
    for path in (later, earlier, val):
        write(path, 1)
        entries.append({"name": path.name, "tokens": 1, "next": (0, None, 0)})
    shards.write_meta(tmp_path, set_meta("bytes", shards=entries))
    assert shards.list_shards(tmp_path, "train") == [earlier, later]
    earlier.unlink()
    with pytest.raises(UserError, match=f"{earlier.name} is missing, which meta.json lists"):
        shards.list_shards(tmp_path, "train")
    assert shards.list_shards(tmp_path, "val") == [val]
    shards.write_meta(tmp_path, set_meta("bytes", complete=False))
    with pytest.raises(UserError, match="unfinished; repeat the command"):
        shards.list_shards(tmp_path, "val")
