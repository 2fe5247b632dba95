"""Shard files: their bytes, what is refused, the folder that holds them."""

import hashlib
import shutil
import struct

import numpy as np
import pytest

from data import shards
from errors import UserError
from tests.helpers import reverse_shard, set_meta


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
        entries.append({"name": path.name, "tokens": 1, "sha256": "", "next": (0, None, 0)})
    shards.write_meta(tmp_path, set_meta("bytes", shards=entries))
    assert shards.list_shards(tmp_path, "train") == [earlier, later]
    earlier.unlink()
    with pytest.raises(UserError, match=f"{earlier.name} is missing, which meta.json lists"):
        shards.list_shards(tmp_path, "train")
    assert shards.list_shards(tmp_path, "val") == [val]
    shards.write_meta(tmp_path, set_meta("bytes", complete=False))
    with pytest.raises(UserError, match="incomplete; rerun the command that was building"):
        shards.list_shards(tmp_path, "val")


def test_the_name_of_a_set_does_not_decide_its_split(tmp_path):
    training = tmp_path / "my_val_set_train_000001.bin"
    validation = tmp_path / "my_val_set_val_000000.bin"
    write(training, 1)
    write(validation, 1)
    assert shards.list_shards(tmp_path, "val") == [validation]
    assert shards.list_shards(tmp_path, "train") == [training]


# ---- what tells shards apart ----


TRAINING = "x_train_000001.bin"
LATER = "x_train_000002.bin"
VALIDATION = "x_val_000000.bin"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for start, name in enumerate((TRAINING, LATER, VALIDATION)):
        write(folder / name, *range(start, start + 1000))
    return folder


def changed(folder, edit, at=None):
    """What an edit of the folder, or of a copy of it, has changed."""
    before = shards.fingerprint_of(folder)
    edited = shutil.copytree(folder, at) if at else folder
    edit(edited)
    now = shards.fingerprint_of(edited)
    difference = shards.data_difference(before, now)
    assert shards.data_difference(now, before) == difference
    return difference


def change_token(path, index):
    """Change one token in place: the file keeps its size."""
    tokens = shards.read_shard(path)
    tokens[index] += 1
    shards.write_shard(path, tokens)


def test_shards_are_told_apart_by_every_byte_and_their_order(folder, tmp_path):
    def rename(copy):
        for path in list(copy.glob("*.bin")):
            path.rename(path.with_name(path.name.replace("x_", "other_")))

    def swap(copy):
        (copy / TRAINING).rename(copy / "first")
        (copy / LATER).rename(copy / TRAINING)
        (copy / "first").rename(copy / LATER)

    assert changed(folder, rename, at=tmp_path / "copy") is None
    assert changed(folder, swap) == "training shards"
    assert changed(folder, lambda folder: reverse_shard(folder / LATER)) == "training shards"
    assert changed(folder, lambda folder: change_token(folder / LATER, 998)) == "training shards"
    assert changed(folder, lambda folder: change_token(folder / VALIDATION, 998)) == (
        "validation shards"
    )
    assert changed(folder, lambda folder: (folder / LATER).unlink()) == "training shards"
    (folder / VALIDATION).unlink()
    (folder / VALIDATION).symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=f"{VALIDATION}: the shard cannot be read: No such"):
        shards.fingerprint_of(folder)
    (folder / VALIDATION).unlink()
    write(folder / VALIDATION, 1)
    # what is not recorded cannot differ
    assert shards.data_difference({}, shards.fingerprint_of(folder)) is None


def test_the_hash_of_a_split_stays_as_stored_measurements_have_it(folder):
    hashes = ""
    for name in (TRAINING, LATER):
        hashes += hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert shards.hash_shards(folder, "train") == hashlib.sha256(hashes.encode()).hexdigest()


def test_large_shards_are_told_apart_by_their_start_and_what_made_them(folder, monkeypatch):
    monkeypatch.setattr(shards, "WHOLE_BYTES", 4000)
    monkeypatch.setattr(shards, "START_BYTES", 1100)

    def describe(folder, digests):
        entries = []
        for name, digest in zip((TRAINING, LATER, VALIDATION), digests, strict=True):
            entry = {"name": name, "tokens": 1000, "sha256": digest, "next": (0, None, 0)}
            entries.append(entry)
        shards.write_meta(folder, set_meta("bytes", shards=entries))

    def append(folder):
        write(folder / LATER, *shards.read_shard(folder / LATER), 1)

    assert changed(folder, lambda folder: change_token(folder / LATER, 20)) == "training shards"
    assert changed(folder, append) == "training shards"
    assert changed(folder, lambda folder: change_token(folder / LATER, 900)) is None
    # the text is another, although not at the start of a shard
    describe(folder, "abc")
    assert changed(folder, lambda folder: describe(folder, "abd")) == "text"
    # shards copied without meta.json
    assert changed(folder, lambda folder: (folder / shards.META).unlink()) is None
    # together the validation shards are small enough to be read whole
    assert changed(folder, lambda folder: change_token(folder / VALIDATION, 900)) == (
        "validation shards"
    )
