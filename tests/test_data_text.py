"""`python -m data.text`: every kind of file, the split, refusals."""

import gzip
import json
import os
import shutil
import tracemalloc
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from data import shards, text
from data.documents import Rules
from data.tokenizer import get_tokenizer
from tests.corpora import contents, stop_after_each_shard, write_parquet


@pytest.fixture
def folder(tmp_path):
    """Text files of every kind, and hidden and other files, which must not be read."""
    root = tmp_path / "texts"
    deep = root / "deep"
    hidden = deep / ".hidden"
    hidden.mkdir(parents=True)
    for k in range(21):
        (root / f"{k:02d}.txt").write_text(f"text {k}\n")
    (deep / "a.md").write_bytes(b"# A\r\nb\r\n")
    (deep / "b.py").write_text("x = 1\n")
    (deep / "c.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "x": 1}\n')
    write_parquet(deep / "d.parquet", ["first", "second", ""])
    (deep / "empty.txt").write_text("")
    (hidden / "h.txt").write_text("hidden")
    (deep / ".h.txt").write_text("hidden")
    (deep / "e.html").write_text("<p>")
    return root


def run_text(*argv):
    text.main(["--workers=1", *map(str, argv)])


def inspect(*files, **rules):
    return text.inspect(files, Rules("text", **rules))


def read_all(source):
    return ["".join(document) for document in source.read()]


def documents_of(out, split, tokenizer="bytes"):
    """The texts of a split, each of which begins with end-of-text."""
    tok = get_tokenizer(tokenizer)
    paths = shards.list_shards(out, split)
    tokens = np.concatenate([shards.read_shard(path) for path in paths])
    starts = np.flatnonzero(tokens == tok.eot)
    assert starts[0] == 0
    documents = np.split(tokens, starts)[1:]
    return [tok.decode(document[1:]) for document in documents]


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_text_of_every_kind(folder, tmp_path, tokenizer, capsys):
    out = tmp_path / "out"
    run_text(folder, "--out_dir", out, "--tokenizer", tokenizer)
    printed = capsys.readouterr().out
    assert "training: 00.txt, 01.txt, " in printed
    assert ", 09.txt, and 13 more\n" in printed
    assert "validation: 18.txt, 20.txt\n" in printed
    assert "empty documents left out: 2\n" in printed
    documents = documents_of(out, "train", tokenizer) + documents_of(out, "val", tokenizer)
    expected = [f"text {k}\n" for k in range(21)]
    expected += ["# A\r\nb\r\n", "x = 1\n", "one", "two", "first", "second"]
    assert sorted(documents) == sorted(expected)
    meta = shards.read_meta(out)
    assert meta["tokenizer"] == tokenizer
    assert meta["source"] == str(folder)


def test_the_validation_files_are_always_the_same_tenth(folder, tmp_path):
    for name in ("texts", "moved"):
        folder = folder.rename(tmp_path / name)
        sources = inspect(*text.list_files([folder]))
        train, val = text.split(sources)
        assert len(sources) == 25
        assert sources == sorted(train + val, key=lambda source: source.name)
        assert [source.name for source in val] == ["18.txt", "20.txt"]
    train, val = text.split(sources[:2])
    assert len(train) == len(val) == 1
    foreign = replace(sources[0], name=os.fsdecode(b"caf\xe9.txt"))  # not UTF-8
    _, val = text.split([foreign, *sources])
    assert len(val) == 2


def test_named_validation_files(folder, tmp_path, capsys):
    out = tmp_path / "out"
    run_text(folder, "--val", folder / "deep" / "c.jsonl", folder / "00.txt", "--out_dir", out)
    assert documents_of(out, "val") == ["text 0\n", "one", "two"]
    assert len(documents_of(out, "train")) == 24
    relative = os.path.relpath(folder / "00.txt")
    run_text(folder, "--val", relative, "--out_dir", tmp_path / "relative")
    assert "text 0\n" not in documents_of(tmp_path / "relative", "train")
    assert capsys.readouterr().out.count("empty documents left out: 2\n") == 2


def test_other_documents_of_the_same_size_are_noticed(folder, tmp_path, refused, monkeypatch):
    command = (folder, "--out_dir", tmp_path / "out")
    run_text(*command)
    says = "made with tokenizer bytes, not gpt2"
    with monkeypatch.context() as patch:  # before the text is read
        patch.setattr(text, "list_files", None)
        refused(run_text, *command, "--tokenizer=gpt2", says=says)
    (folder / "00.txt").write_text("text 9\n")
    refused(run_text, *command, says="before they were edited")


@pytest.mark.parametrize("repeat", [(), ("--repeat", 0.5, "--within", 16)])
def test_text_resumes_after_every_shard(folder, tmp_path, monkeypatch, repeat):
    lines = [json.dumps({"text": f"line {k}"}) for k in range(9)]
    (folder / "deep" / "f.jsonl").write_text("\n".join(lines))
    more = ("--shard_size", 7, *repeat, "--out_dir")
    run_text(folder, *more, tmp_path / "whole", "--workers", 3)
    stop_after_each_shard(monkeypatch, lambda: run_text(folder, *more, tmp_path / "out"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_repeats_in_the_training_text_alone(tmp_path, refused):
    lines = [f"line {k} of a longer text\n" for k in range(999)]
    train = tmp_path / "train.txt"
    train.write_text("".join(lines))
    val = tmp_path / "val.txt"
    val.write_text("".join(lines[:100]))
    out = tmp_path / "out"
    command = (train, "--val", val, "--out_dir", out)
    run_text(*command, "--repeat", 0.5, "--within", 64)
    assert shards.read_meta(out)["repeat"] == (0.5, 64)
    assert documents_of(out, "val") == [val.read_text()]
    (document,) = documents_of(out, "train")
    assert 1.06 < len(document) / len(train.read_text()) < 1.13  # half of 3/16
    refused(run_text, *command, says="made with repeat")
    for arguments, says in (
        (("--repeat", 1.5, "--within", 64), "--repeat 1.5 must be a share above 0"),
        (("--repeat", 0, "--within", 64), "--repeat 0 must be a share above 0"),
        (("--repeat", 0.5, "--within", 15), "--within 15 must be at least 16 tokens"),
        (("--repeat", 0.5), "--repeat SHARE and --within T need each other"),
        (("--within", 64), "need each other"),
    ):
        refused(run_text, train, *arguments, says=says)


def test_default_folders(folder, tmp_path, monkeypatch):
    """Named after the tokenizer; text with repeats is in another one."""
    monkeypatch.chdir(tmp_path)
    run_text(folder, "--tokenizer", "bytes")
    run_text(folder, "--tokenizer", "bytes", "--repeat", 0.5, "--within", 16)
    for name, repeat in (("text_bytes", None), ("text_bytes_repeat", (0.5, 16))):
        assert shards.read_meta(tmp_path / "data" / name).get("repeat") == repeat


def test_another_field_makes_another_set(tmp_path, refused):
    path = tmp_path / "x.jsonl"
    lines = [json.dumps({"text": f"one {k}", "body": f"two {k}"}) for k in range(20)]
    path.write_text("\n".join(lines))
    command = (path, "--out_dir", tmp_path / "out")
    run_text(*command)
    refused(run_text, *command, "--field", "body", says="made from other documents")


def test_text_refusals(folder, tmp_path, refused):
    def says(message, *paths):
        refused(run_text, *paths, "--out_dir", tmp_path / "out", says=message)

    says("none: no such file or folder", tmp_path / "none")
    says("e.html: files must end in", folder / "deep" / "e.html")
    says("empty.txt: too little text for training and", folder / "deep" / "empty.txt")
    says("--split_at needs a mark", folder, "--split_at", "")
    says(
        "00.txt: cannot split off a validation set: no word boundary in the last tenth, '\\n'",
        folder / "00.txt",
    )
    says("00.txt: --val names all of it", folder / "00.txt", "--val", folder / "00.txt")
    pages = folder / "pages"
    pages.mkdir()
    (pages / "A.TXT").touch()
    says("pages: no file there ends in one of .txt .md", pages)
    says("tokenizer = 'gtp2'; did you mean gpt2?", folder, "--tokenizer", "gtp2")
    says("--tokeniser gpt2; did you mean tokenizer?", folder, "--tokeniser", "gpt2")
    for name, content, message in (
        ("bad.txt", "ab\xff", "bad.txt: byte 2 is not UTF-8: invalid start byte"),
        ("bad.txt", "ab " * 1000 + "\xc3", "bad.txt: byte 3,000 is not UTF-8: unexpected end"),
        ("bad.jsonl", '{"text": "a"}\n{"body": 1}', 'no field "text"; its fields are body'),
        ("bad.jsonl", '{"text": "a"}\n["text"]', "bad.jsonl, line 2: not a JSON object"),
        ("bad.jsonl", '{"text": "a"}\n\nplain words', "bad.jsonl, line 3: not JSON: plain words"),
        ("bad.jsonl", '{"text": "a\xff"}', "bad.jsonl, line 1: not JSON: {"),
        ("bad.jsonl", '{"text": 5}', 'bad.jsonl, line 1: "text" must be a string, not int'),
        ("bad.parquet", "PAR1", "bad.parquet: cannot be read: Parquet"),
    ):
        (folder / name).write_bytes(content.encode("latin-1"))
        says(message, folder)
        (folder / name).unlink()
    write_parquet(folder / "bad.parquet", ["a"], column="body")
    says("bad.parquet: no column 'text'", folder)
    write_parquet(folder / "bad.parquet", [b"a"])
    says('bad.parquet, row 0: "text" must be a string, not bytes', folder)
    write_parquet(folder / "bad.parquet", pa.array([b"a", b"\xff"]).view(pa.string()))
    says("bad.parquet: cannot be read: 'utf-8' codec can't decode", folder)
    assert not (tmp_path / "out").exists()


def test_a_single_file_is_counted_once(tmp_path, capsys):
    """It is read several times."""
    path = tmp_path / "x.txt"
    path.write_text("some words<|endoftext|>\n\n" * 20)
    run_text(path, "--out_dir", tmp_path / "out")
    assert "the text has <|endoftext|> 20 times" in capsys.readouterr().out
    run_text(path, "--out_dir", tmp_path / "split", "--split_at", "<|endoftext|>")
    assert "documents end at '<|endoftext|>': 20 times" in capsys.readouterr().out


def test_mistakes_are_refused_before_files_are_read(tmp_path, monkeypatch, refused):
    path = tmp_path / "x.txt"
    path.write_text("some words " * 20)
    monkeypatch.setattr(text, "inspect", None)
    for option, says in (
        ("--workers=0", "--workers 0 must be at least 1"),
        ("--shard_size=0", "--shard_size 0 must be 1 to"),
        (f"--out_dir={path}", "no file can be written there"),
    ):
        refused(run_text, path, option, says=says)
    refused(run_text, "--val", path, path, says="PATHS to train on, which stand before --val")


def test_nulls_and_marks(tmp_path, capsys, refused):
    """Rows without text are left out; a mark is text or, with --split_at, ends a document."""
    mark = "<|endoftext|>"
    stories = tmp_path / "stories.txt"
    stories.write_text(f"once\n{mark}\nupon a\n{mark}\ntime\n{mark}\n")
    rows = write_parquet(tmp_path / "rows.parquet", ["a", None, f"b{mark}", "", f"c{mark}d"])
    out = tmp_path / "out"
    command = (rows, "--val", stories, "--out_dir", out)
    run_text(*command)
    printed = capsys.readouterr().out
    assert "empty documents left out: 2\n" in printed
    assert f"warning: the text has {mark} 5 times" in printed
    run_text(*command)
    assert "already done" in capsys.readouterr().out
    split = (*command, "--split_at", mark)
    refused(run_text, *split, says=f"made with split_at None, not {mark}")
    shutil.rmtree(out)
    run_text(*split)
    assert f"documents end at '{mark}': 5 times\n" in capsys.readouterr().out
    assert documents_of(out, "val") == ["once", "upon a", "time"]
    assert documents_of(out, "train") == ["a", "b", "c", "d"]
    assert shards.read_meta(out)["split_at"] == mark


@pytest.mark.parametrize("size", [1, 10, 1000])
def test_plain_files_are_read_in_chunks(tmp_path, monkeypatch, size, capsys):
    path = tmp_path / "x.txt"
    content = "".join(f"line {k}, naïve\r\n\r\n" for k in range(200))
    path.write_bytes(content.encode())
    run_text(path, "--out_dir", tmp_path / "whole")
    monkeypatch.setattr(text, "CHUNK_CHARS", size)
    run_text(path, "--out_dir", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    printed = capsys.readouterr().out
    cut = content.index("line 181")
    assert f"training: the first {cut:,} of {len(content):,} characters of x.txt\n" in printed
    assert f"validation: the last {len(content) - cut:,} characters of x.txt\n" in printed


def test_a_large_file_takes_little_memory(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("some words of a paragraph\n\n" * (1 << 19))  # 14 MB
    tracemalloc.start()
    ((train,), (val,)) = text.divide(*inspect(("x.txt", path)))
    for source in (train, val):
        for _, (document,) in text.numbered(source, 0):
            assert max(map(len, document)) < 2 * text.CHUNK_CHARS
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * text.CHUNK_CHARS


@pytest.mark.parametrize(
    "content, val",
    [
        ("0123456\n\n\n9\n\n9", "9"),  # the paragraph that begins there, not the one before
        ("Speaker:\n  To be,\n\n" * 41, "Speaker:\n  To be,\n\n" * 4),
        ("a line\n" * 20 + "  a li\n", "a line\n  a li\n"),
        ("a single line of words, all of which are in one line", "line"),
        ("word " * 100, "word " * 10),
        ("a\nb", "b"),
    ],
)
def test_where_a_single_document_is_divided(tmp_path, content, val):
    path = tmp_path / "x.txt"
    path.write_text(content)
    ((train_part,), (val_part,)) = text.divide(*inspect(("x.txt", path)))
    assert read_all(train_part) == [content.removesuffix(val)]
    assert read_all(val_part) == [val]


def test_a_single_file_of_documents_is_divided_between_two(tmp_path, capsys):
    documents = [f"document {k}, with some text" for k in range(100, 140)]
    lines = "".join(json.dumps({"body": document}) + "\n" for document in documents)
    plain = tmp_path / "x.jsonl"
    plain.write_text(lines)
    gz = tmp_path / "x.y.jsonl.gz"
    gz.write_bytes(gzip.compress(lines.encode()))
    zst = tmp_path / "x.jsonl.zst"
    with open(zst, "wb") as file:
        for piece in (lines[:50], lines[50:]):  # a file may be made in several pieces
            file.write(pa.compress(piece.encode(), "zstd", asbytes=True))
    parquet = write_parquet(tmp_path / "x.parquet", documents, column="body")
    for path in (plain, gz, zst, parquet):
        out = tmp_path / f"out{path.name}"
        run_text(path, "--out_dir", out, "--field", "body")
        assert documents_of(out, "train") == documents[:36]
        assert documents_of(out, "val") == documents[36:]
        printed = capsys.readouterr().out
        assert f"training: the first 36 of 40 documents of {path.name}\n" in printed
        assert f"validation: the last 4 documents of {path.name}\n" in printed
    plain.write_text(lines + json.dumps({"body": "x" * 2000}) + "\n")
    ((train,), (val,)) = text.divide(*text.inspect([("x.jsonl", plain)], Rules("body")))
    assert len(train.documents) == 40
    assert len(val.documents) == 1


def test_the_standard_library_without_its_tests():
    names = [name for name, _ in text.list_stdlib()]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    for name in names:
        assert name.endswith(".py")
        folders = name.split("/")[:-1]
        assert not {"test", "tests", "idle_test", "site-packages"} & set(folders)


def test_byte_order_marks(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfa")
    for name in ("x.jsonl", "x.txt"):
        assert read_all(*inspect((name, tmp_path / name))) == ["a"]


def test_links_are_read_by_their_names(folder, tmp_path):
    """As in the cache of Hugging Face's hub, where files have no suffix; each file once."""
    linked = tmp_path / "linked"
    linked.mkdir()
    blob = tmp_path / "blobs/9f86"
    blob.parent.mkdir()
    blob.write_text('{"text": "one"}\n{"text": "two"}\n')
    for name in ("b", "a"):  # a folder lists its files in any order
        (linked / f"{name}.jsonl").symlink_to(blob)
    files = text.list_files([linked])
    assert files == [("b.jsonl", linked / "b.jsonl")]
    (source,) = text.inspect(files, Rules("text"))
    assert read_all(source) == ["one", "two"]


def test_linked_folders_are_entered_once(tmp_path):
    for name in ("texts/sub", "other/deep"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "texts/a.txt").write_text("a")
    (tmp_path / "other/deep/b.txt").write_text("b")
    (tmp_path / "texts/link").symlink_to(tmp_path / "other")
    (tmp_path / "texts/sub/back").symlink_to(tmp_path / "texts")
    names = [name for name, _ in text.list_files([tmp_path / "texts"])]
    assert names == ["a.txt", "link/deep/b.txt"]


def test_a_name_that_is_not_utf8_is_printed(capsys, folder):
    name = os.fsdecode(b"caf\xe9.txt")
    source = inspect(("a.txt", folder / "00.txt"))[0]
    text.print_names("training", [replace(source, name=name)])
    printed = capsys.readouterr().out
    printed.encode()  # raises for a surrogate
    assert printed == "training: caf\\udce9.txt\n"
