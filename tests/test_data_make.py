"""The commands that make shards: the tokens, kills and resumes, splits, refusals."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import build, fineweb, shards, text
from data.documents import Documents, parquet_files
from data.tokenizer import get_tokenizer
from errors import UserError
from runtime.files import read_json, sha256_of

ROOT = Path(__file__).parent.parent


def make_documents(n, longest=400, seed=0):
    rng = random.Random(seed)
    words = "the a of cat, dog. 12 naïve \n\n  don't 東京 __init__(self): running".split(" ")
    return [" ".join(rng.choices(words, k=rng.randrange(1, longest))) for _ in range(n)]


def write_parquet(path, documents, rows=7, column="text"):
    pq.write_table(pa.table({"id": range(len(documents)), column: documents}), path, rows)
    return path


def expected_tokens(documents, tokenizer="gpt2"):
    """End-of-text and the ids of each document, one after another: uint16 [n]."""
    tok = get_tokenizer(tokenizer)
    return np.array([i for d in documents for i in [tok.eot, *tok.encode(d)]], dtype=np.uint16)


def contents(folder):
    """Name and content of every file in a folder but its lock."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".lock"}


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """Thousands of small shards, and no test cuts the power."""
    monkeypatch.setattr("runtime.files.os.fsync", lambda descriptor: None)


@pytest.fixture
def refused(capsys):
    """Run a command that must exit with code 2 and one sentence, which is returned."""

    def run(main, *argv):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(arg) for arg in argv])
        assert stop.value.code == 2
        lines = capsys.readouterr().err.strip().split("\n")
        assert lines[-1].startswith("error: ")
        return lines[-1]

    return run


# --- FineWeb ------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path):
    """Documents, and the folder of two parquet files that holds them."""
    documents = make_documents(60) + ["", "x"] + make_documents(30, seed=1)
    folder = tmp_path / "parquet"
    folder.mkdir()
    write_parquet(folder / "000_00000.parquet", documents[:40])
    write_parquet(folder / "001_00000.parquet", documents[40:])
    return documents, folder


def run_fineweb(folder, out_dir, *more, shard_size=1000, workers=1):
    fineweb.main(
        [f"--parquet={folder}", f"--out_dir={out_dir}", f"--shard_size={shard_size}"]
        + [f"--workers={workers}", *more]
    )
    return contents(out_dir)


@pytest.mark.parametrize("workers", [1, 2])
def test_fineweb_shards(corpus, tmp_path, workers, capsys):
    documents, folder = corpus
    out = tmp_path / "out"
    run_fineweb(folder, out, workers=workers)
    tokens = expected_tokens(documents)
    names = [
        f"fineweb_{'train' if k else 'val'}_{k:06d}.bin" for k in range(-(-len(tokens) // 1000))
    ]
    assert sorted(p.name for p in out.glob("*.bin")) == sorted(names)
    for k, name in enumerate(names):
        assert np.array_equal(shards.read_shard(out / name), tokens[k * 1000 : (k + 1) * 1000])
    meta = shards.read_meta(out)
    assert (meta["tokenizer"], meta["vocab_size"]) == ("gpt2", 50257)
    assert (meta["documents"], meta["tokens"]) == (len(documents), len(tokens))
    assert meta["source"] == str(folder)
    assert [s["name"] for s in meta["shards"]] == names
    assert all(s["sha256"] == sha256_of(out / s["name"]) for s in meta["shards"])
    assert sorted(p.name for p in out.iterdir() if p.suffix != ".bin") == [".lock", "meta.json"]
    assert f"done, {len(tokens):,} tokens" in capsys.readouterr().out


def test_a_finished_set_is_left_alone(corpus, tmp_path, capsys, refused):
    _, folder = corpus
    out = tmp_path / "out"
    before = run_fineweb(folder, out)
    times = {p: p.stat().st_mtime_ns for p in out.glob("*.bin")}
    capsys.readouterr()
    assert run_fineweb(folder, out) == before
    assert "already done" in capsys.readouterr().out
    assert times == {p: p.stat().st_mtime_ns for p in out.glob("*.bin")}

    base = ("--parquet", folder, "--out_dir", out)
    assert "shard_size 1000, not 999" in refused(fineweb.main, *base, "--shard_size", 999)
    write_parquet(folder / "002_00000.parquet", ["more"])
    assert "made from other documents" in refused(fineweb.main, *base, "--shard_size", 1000)
    (folder / "002_00000.parquet").unlink()
    path = out / "fineweb_train_000002.bin"
    path.write_bytes(path.read_bytes()[:-2])
    assert str(path) in refused(fineweb.main, *base, "--shard_size", 1000)


@pytest.mark.parametrize("shard_size", [1, 97, 1000])
def test_resume_after_every_shard(tmp_path, monkeypatch, shard_size):
    """Stopped once after each shard, wherever in a document or task it ends."""
    monkeypatch.setattr(build, "TASK_CHARS", 60)  # most documents are split, some share a task
    sizes = {1: (4, 8), 97: (12, 80), 1000: (12, 400)}[shard_size]
    documents = ["", *make_documents(*sizes, seed=shard_size), "", "", "end"]
    folder = tmp_path / "parquet"
    folder.mkdir()
    write_parquet(folder / "x.parquet", documents, rows=3)
    whole = run_fineweb(folder, tmp_path / "whole", shard_size=shard_size)
    tokens = np.concatenate([shards.read_shard(p) for p in ordered(tmp_path / "whole")])
    assert np.array_equal(tokens, expected_tokens(documents))

    out = tmp_path / "out"
    stop_after_each_shard(monkeypatch, lambda: run_fineweb(folder, out, shard_size=shard_size))
    assert contents(out) == whole


def stop_after_each_shard(monkeypatch, make):
    """Call `make` until it is done, letting it write only one shard each time."""
    write_shard, stops = shards.write_shard, 0

    def write_one(path, part):
        assert not path.exists()
        if written:
            raise KeyError("stopped")
        written.append(path)
        return write_shard(path, part)

    monkeypatch.setattr(shards, "write_shard", write_one)
    while True:
        written = []
        try:
            make()
        except KeyError:
            stops += 1
            with pytest.raises(UserError, match="unfinished"):
                shards.list_shards(written[0].parent, "val")
        else:
            break
    assert stops > 2


def ordered(folder):
    return sorted(folder.glob("*.bin"), key=lambda path: path.stem[-6:])


def test_resume_after_a_stop_between_shard_and_progress(corpus, tmp_path, monkeypatch):
    """A shard that progress.json does not list yet, a half-written one, and a damaged one."""
    _, folder = corpus
    whole = run_fineweb(folder, tmp_path / "whole")
    out, write_json = tmp_path / "out", build.write_json

    def stop_at_third(path, value):
        if len(value["shards"]) == 3:
            raise KeyError("stopped")
        write_json(path, value)

    monkeypatch.setattr(build, "write_json", stop_at_third)
    with pytest.raises(KeyError):
        run_fineweb(folder, out)
    assert len(list(out.glob("*.bin"))) == 3
    (out / ".fineweb_train_000003.bin.0a1b2c3d.tmp").write_bytes(b"half")
    (out / "fineweb_train_000001.bin").write_bytes(b"damaged since")
    monkeypatch.setattr(build, "write_json", write_json)
    assert run_fineweb(folder, out) == whole


def test_killed_and_resumed(tmp_path):
    """kill -9, twice, and then to the end: the same shards, and no process left behind."""
    folder = tmp_path / "parquet"
    folder.mkdir()
    documents = make_documents(1000, longest=800)
    write_parquet(folder / "x.parquet", documents, rows=100)
    whole = run_fineweb(folder, tmp_path / "whole", shard_size=8000)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "data.fineweb", f"--parquet={folder}", f"--out_dir={out}"]
    command += ["--shard_size=8000", "--workers=2"]
    for kill_at in (2, len(whole) // 3):
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 30
        while len(list(out.glob("*.bin"))) < kill_at and time.monotonic() < deadline:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.002)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
        assert not (out / shards.META).exists()
        assert len(children) >= 2
        while (alive := [c for c in children if is_running(c)]) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not alive
    assert kill_at <= len(read_json(out / shards.PROGRESS)["shards"]) + 1 < len(whole)
    refusal = subprocess.run(
        [*command, "--shard_size=9000"], cwd=ROOT, capture_output=True, text=True
    )
    assert refusal.returncode == 2 and "shard_size 8000, not 9000" in refusal.stderr
    finish = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finish.returncode == 0, finish.stderr
    assert "shards exist; continuing after them" in finish.stdout
    assert contents(out) == whole


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_dead_worker_is_reported(corpus, tmp_path, monkeypatch, refused):
    _, folder = corpus
    monkeypatch.setattr(build, "partial", lambda f, _: exit_now)
    line = refused(fineweb.main, "--parquet", folder, "--out_dir", tmp_path / "out", "--workers", 2)
    assert "was killed" in line and "fewer --workers than 2" in line


def exit_now(task):
    os._exit(9)


def test_two_makers_of_one_set_are_refused(corpus, tmp_path, refused):
    _, folder = corpus
    settings = {"tokenizer": "gpt2", "shard_size": 1, "fingerprint": "", "source": ""}
    with build.claim(tmp_path / "out", settings):
        line = refused(fineweb.main, "--parquet", folder, "--out_dir", tmp_path / "out")
    assert "another process is making this set" in line


@pytest.mark.parametrize(
    "change, says",
    [
        ({"shards": None}, "Expected `array`, got `null` - at `$.shards`"),
        ({"shards": [1]}, "Expected `object`, got `int` - at `$.shards[0]`"),
        ({"name": "../outside_train_000000.bin"}, "at `$.shards[0].name`"),
        ({"name": "/outside_train_000000.bin"}, "at `$.shards[0].name`"),
        ({"following": [0, 0]}, "at `$.shards[0].following`"),
    ],
)
def test_a_progress_that_was_tampered_with_is_refused(corpus, tmp_path, refused, change, says):
    """A name in it that leads out of the folder once deleted that file."""
    _, folder = corpus
    out, outside = tmp_path / "out", tmp_path / "outside_train_000000.bin"
    shards.write_shard(outside, np.ones(3, np.uint16))
    out.mkdir()
    (out / "x_train_000001.bin").touch()
    settings = {"tokenizer": "gpt2", "shard_size": 3, "fingerprint": "", "source": ""}
    entry = {
        "name": "a_train_000000.bin", "tokens": 3, "sha256": "", "split": "train", "stream": 0,
        "documents": 1, "following": [1, 0, 0, None],
    }  # fmt: skip
    listed = {"shards": [entry | change]} if "shards" not in change else change
    (out / "progress.json").write_text(json.dumps(settings | listed))
    line = refused(fineweb.main, "--parquet", folder, "--out_dir", out, "--workers", 1)
    assert "progress.json: damaged: " in line or "made with" in line
    with pytest.raises(UserError, match=re.escape(says)):
        build._Writer(out, "a", settings, shards.WHOLE)
    assert outside.exists()


def test_fineweb_refusals(corpus, tmp_path, refused):
    _, folder = corpus
    out = tmp_path / "out"
    base = ("--out_dir", out, "--workers", 1, "--parquet")
    assert "fill only val shards" in refused(fineweb.main, *base, folder)
    assert not list(out.glob("*.bin")) and not (out / shards.PROGRESS).exists()
    assert f"{tmp_path / 'none'}: no parquet" in refused(fineweb.main, *base, tmp_path / "none")
    (tmp_path / "file").touch()
    line = refused(fineweb.main, "--parquet", folder, "--out_dir", tmp_path / "file/new")
    assert "file/new: no file can be written there: Not a directory" in line
    (tmp_path / "empty").mkdir()
    assert "empty: no parquet file" in refused(fineweb.main, *base, tmp_path / "empty")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    broken = refused(fineweb.main, *base, tmp_path / "broken.parquet")
    assert "broken.parquet: cannot be read as parquet" in broken
    other = write_parquet(tmp_path / "other.parquet", ["a"], column="content")
    assert "needs a column 'text' of strings; it has id, content" in refused(
        fineweb.main, *base, other
    )
    null = write_parquet(tmp_path / "null.parquet", ["a", "b", None])
    assert "null.parquet: document 2 has no text" in refused(fineweb.main, *base, null)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    shards.write_shard(foreign / "fineweb_train_000007.bin", np.array([1], dtype=np.uint16))
    line = refused(fineweb.main, "--parquet", folder, "--out_dir", foreign)
    assert "foreign: holds shards that this command did not make" in line
    assert "workers 0" in refused(fineweb.main, *base, folder, "--workers", 0)
    assert "shard_size 0" in refused(fineweb.main, *base, folder, "--shard_size", 0)
    assert "only for fineweb's" in refused(fineweb.main, "--ready", "--dataset", "fineweb-edu")
    assert "--ready_shards: it says how many" in refused(
        fineweb.main, *base, folder, "--ready_shards", 2
    )
    assert "--split: files given with --parquet" in refused(
        fineweb.main, *base, folder, "--split", "train"
    )
    assert "only for fineweb's" in refused(fineweb.main, "--ready", "--part", "1/2")
    os.mkfifo(tmp_path / "pipe.parquet")
    line = refused(fineweb.main, *base, tmp_path / "pipe.parquet")
    assert "pipe.parquet: cannot be read: it is not a regular file" in line
    assert "ready_shards 104: there are 1 to 103" in refused(
        fineweb.main, "--ready", "--ready_shards", 104, "--out_dir", out
    )


@pytest.mark.parametrize("rows_at_once", [1, 3, 16, 64])
def test_documents_from_any_one_on(corpus, monkeypatch, rows_at_once):
    """From the state of each document, in a reader of its own; batches cross row groups."""
    monkeypatch.setattr("data.documents.ROWS_AT_ONCE", rows_at_once)
    documents, folder = corpus
    files = sorted(folder.iterdir())
    whole = list(parquet_files("x", files).read())
    assert [text for text, _ in whole] == documents
    done = [parquet_files("x", files).done(n, state) for n, (_, state) in enumerate(whole)]
    assert parquet_files("x", files).size == 14 and done[0] == 0
    assert done == sorted(done) and 14 - 64 // 7 - 1 <= done[-1] <= 13
    reader = parquet_files("x", files)
    for start in range(rows_at_once % 5, len(documents), 17):
        state = json.loads(json.dumps(whole[start][1]))
        rest = list(reader.read(start, state))
        assert [text for text, _ in rest] == documents[start:]


def test_going_on_reads_no_earlier_row_group(corpus, monkeypatch):
    from datasets.packaged_modules.parquet.parquet import Parquet

    documents, folder = corpus
    files = sorted(folder.iterdir())
    generate, read = Parquet._generate_tables, []

    def counted(self, files, row_groups_list):
        read.extend(row_groups_list)
        return generate(self, files, row_groups_list)

    monkeypatch.setattr(Parquet, "_generate_tables", counted)
    monkeypatch.setattr("data.documents.ROWS_AT_ONCE", 7)
    *_, (_, state) = parquet_files("x", files).read()
    assert len(read) == 14
    read.clear()
    rest = parquet_files("x", files).read(len(documents) - 1, state)
    assert [text for text, _ in rest] == documents[-1:]
    assert read == [(5,), (6,), (7,)]  # of the second file; the last batch has rows of all three


def test_a_state_of_other_units_is_not_trusted(corpus):
    """Row groups in one way of reading, files in the other: what is passed over is counted."""
    documents, folder = corpus
    files = [str(file) for file in sorted(folder.iterdir())]
    by_file = Documents("x", "parquet", remote=True, data_files=files)
    by_group = parquet_files("x", files)
    assert (by_file.size, by_group.size) == (2, 14)
    for one, other in ((by_file, by_group), (by_group, by_file)):
        (_, state) = list(one.read())[80]
        assert [text for text, _ in other.read(80, state)] == documents[80:]
        assert [text for text, _ in one.read(80, state)] == documents[80:]


def run_parts(folder, out, count, shard_size=300):
    for i in range(1, count + 1):
        run_fineweb(folder, out(i), f"--part={i}/{count}", shard_size=shard_size)


def documents_in(paths):
    """The documents of these shards, each shard's file continuing the one before."""
    tok = get_tokenizer("gpt2")
    tokens = np.concatenate([shards.read_shard(path) for path in paths])
    starts = np.flatnonzero(tokens == tok.eot)
    assert starts[0] == 0
    return [tok.decode(part[1:]) for part in np.split(tokens, starts)[1:]]


def test_parts_make_one_set_together(corpus, tmp_path, refused):
    documents, folder = corpus
    out = tmp_path / "out"
    run_parts(folder, lambda i: out, 3)
    metas = [shards.read_meta(out, (i, 3)) for i in (1, 2, 3)]
    assert [meta["parts"] for meta in metas] == [3, 3, 3]
    found = []
    for i, meta in enumerate(metas):
        names = [shard["name"] for shard in meta["shards"]]
        assert names == [
            f"fineweb_{'train' if number else 'val'}_{number:06d}.bin"
            for number in range(i, i + 3 * len(names), 3)
        ]
        found += documents_in([out / name for name in names])
    assert sorted(found) == sorted(documents)
    assert len(found) == shards.read_meta(out)["documents"] == len(documents)
    listed = shards.list_shards(out, "val") + shards.list_shards(out, "train")
    assert sorted(p.name for p in listed) == sorted(p.name for p in out.glob("*.bin"))
    assert [s["name"] for s in shards.read_meta(out)["shards"]] == sorted(p.name for p in listed)
    assert shards.read_meta(out)["tokens"] == len(expected_tokens(documents))

    # in folders of their own, copied together
    run_parts(folder, lambda i: tmp_path / f"{i}", 3)
    shutil.copytree(tmp_path / "1", tmp_path / "copy")
    copies = [
        shutil.copytree(tmp_path / f"{i}", tmp_path / "copy", dirs_exist_ok=True) for i in (2, 3)
    ]
    assert all_but_locks(copies[0]) == all_but_locks(out)

    line = refused(fineweb.main, "--parquet", folder, "--out_dir", out, "--shard_size", 300)
    assert "out: made in 3 parts, not 1" in line
    again = run_fineweb(folder, out, "--part=2/3", shard_size=300)
    assert all_but_locks(out) == {k: v for k, v in again.items() if ".lock" not in k}
    base = ("--parquet", folder, "--out_dir", out, "--shard_size", 300, "--part")
    assert "part 4/3: give I/N" in refused(fineweb.main, *base, "4/3")
    assert "part 0/3: give I/N" in refused(fineweb.main, *base, "0/3")
    assert "14 row groups do not make 15 parts" in refused(fineweb.main, *base, "1/15")


def all_but_locks(folder):
    return {name: data for name, data in contents(folder).items() if ".lock" not in name}


def test_an_incomplete_set_of_parts_is_not_used(corpus, tmp_path):
    _, folder = corpus
    out = tmp_path / "out"
    run_parts(folder, lambda i: out, 3)
    (out / "meta.2-of-3.json").rename(out / "away")
    for split in ("train", "val"):
        with pytest.raises(UserError, match="out: of 3 parts 2 cannot be found: .*--part 2/3"):
            shards.list_shards(out, split)
    (out / "away").rename(out / "meta.2-of-3.json")
    (out / "progress.3-of-3.json").write_text("{}")
    with pytest.raises(UserError, match="unfinished"):
        shards.list_shards(out, "train")
    (out / "progress.3-of-3.json").unlink()
    (out / "fineweb_train_000004.bin").rename(out / "away")
    with pytest.raises(UserError, match="fineweb_train_000004.bin is missing"):
        shards.list_shards(out, "val")
    (out / "away").rename(out / "fineweb_train_000004.bin")
    assert shards.list_shards(out, "val")
    meta = shards.read_meta(out, (3, 3))
    for change, message in (
        ({"fingerprint": "x"}, r"meta.3-of-3.json: made with fingerprint x, but meta.1-of-3"),
        ({"parts": 4}, "parts of different sets"),
        ({"tokens": None}, "meta.3-of-3.json: damaged: .*at `\\$.tokens`"),
    ):
        shards.write_meta(out, meta | change, (3, 3))
        with pytest.raises(UserError, match=message):
            shards.list_shards(out, "train")


def test_parts_resume_after_every_shard_beside_each_other(corpus, tmp_path, monkeypatch):
    _, folder = corpus
    run_parts(folder, lambda i: tmp_path / "whole", 2, shard_size=1500)
    out = tmp_path / "out"
    for i in (2, 1):
        stop_after_each_shard(
            monkeypatch, lambda i=i: run_fineweb(folder, out, f"--part={i}/2", shard_size=1500)
        )
        monkeypatch.undo()
        monkeypatch.setattr("runtime.files.os.fsync", lambda descriptor: None)
    assert all_but_locks(out) == all_but_locks(tmp_path / "whole")


def test_parts_made_at_the_same_time_and_killed(corpus, tmp_path):
    """Two makers and one folder: kill -9 of one leaves the other alone."""
    folder, out = tmp_path / "big", tmp_path / "out"
    folder.mkdir()
    write_parquet(folder / "x.parquet", make_documents(2000, longest=800), rows=100)
    run_parts(folder, lambda i: tmp_path / "whole", 2, shard_size=8000)
    command = [sys.executable, "-m", "data.fineweb", f"--parquet={folder}", f"--out_dir={out}"]
    command += ["--shard_size=8000", "--workers=1"]
    first, second = (
        subprocess.Popen([*command, f"--part={i}/2"], cwd=ROOT, stderr=subprocess.PIPE)
        for i in (1, 2)
    )
    deadline = time.monotonic() + 60
    while not (out / "fineweb_train_000010.bin").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    first.kill()
    first.communicate()
    _, error = second.communicate()
    assert second.returncode == 0, error
    assert (out / "progress.1-of-2.json").exists() and not (out / "progress.2-of-2.json").exists()
    with pytest.raises(UserError, match="unfinished"):
        shards.list_shards(out, "train")
    with build.claim(out, read_json(out / "meta.2-of-2.json"), (2, 2)):  # a lock of its own
        run_fineweb(folder, out, "--part=1/2", shard_size=8000)
    assert all_but_locks(out) == all_but_locks(tmp_path / "whole")


def test_a_part_gets_files_or_row_groups():
    assert fineweb.share([1, 2, 3, 4, 5], (1, 1)) == ([1, 2, 3, 4, 5], (1, 1))
    assert fineweb.share([1, 2, 3, 4, 5], (2, 2)) == ([2, 4], (1, 1))
    assert fineweb.share([1, 2, 3, 4, 5], (5, 5)) == ([5], (1, 1))
    assert fineweb.share([1, 2, 3, 4, 5], (5, 6)) == ([1, 2, 3, 4, 5], (5, 6))


def test_parts_divide_the_row_groups(corpus):
    documents, folder = corpus
    files = sorted(folder.iterdir())
    parts = [[text for text, _ in parquet_files("x", files, part=(i, 3)).read()] for i in (1, 2, 3)]
    assert parts[1][:7] == documents[7:14]
    assert sorted(sum(parts, [])) == sorted(documents)


class Hub(BaseHTTPRequestHandler):
    """A folder, as the hub's API gives the files of any dataset."""

    protocol_version = "HTTP/1.1"
    root: Path
    sent: list[str]

    def do_GET(self):
        url = urlsplit(unquote(self.path))
        if match := re.fullmatch("/api/datasets/[^/]+/[^/]+/revision/.*", url.path):
            files = [{"rfilename": str(f.relative_to(self.root))} for f in self.files(self.root)]
            self.answer(json.dumps({"id": "owner/name", "sha": "0" * 40, "siblings": files}))
        elif match := re.fullmatch("/api/datasets/[^/]+/[^/]+/tree/[^/]+/?(.*)", url.path):
            deep = "recursive=true" in url.query.lower()
            self.answer(json.dumps([self.entry(f) for f in self.files(self.root / match[1], deep)]))
        elif match := re.fullmatch("/datasets/[^/]+/[^/]+/resolve/[^/]+/(.*)", url.path):
            file = self.root / match[1]
            if self.command == "GET" and file.suffix == ".parquet":
                self.sent.append(self.headers.get("Range"))
            self.answer(file.read_bytes() if file.is_file() else None)
        else:
            self.answer(None)

    do_HEAD = do_GET

    def files(self, folder, deep=True):
        return sorted(folder.rglob("*") if deep else folder.iterdir()) if folder.is_dir() else []

    def entry(self, file):
        kind = "file" if file.is_file() else "directory"
        path = file.relative_to(self.root).as_posix()
        return {"type": kind, "path": path, "size": file.stat().st_size, "oid": "0" * 40}

    def answer(self, data):
        found, data = data is not None, data.encode() if isinstance(data, str) else data or b""
        headers = {"X-Repo-Commit": "0" * 40, "ETag": f'"{len(data)}"'}
        status = 200
        if not found:
            status, headers["X-Error-Code"] = 404, "EntryNotFound"
        elif wanted := self.headers.get("Range"):
            first, last = wanted.removeprefix("bytes=").split("-")
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            status, data = 206, data[int(first) : int(last) + 1]
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    """A server that stands in for the hub: its folder, what it sent, and how to run a command."""
    root, sent = tmp_path / "hub", []
    root.mkdir()
    handler = type("Handler", (Hub,), {"root": root, "sent": sent})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "no_proxy": "127.0.0.1",
    }

    def run(*argv):
        command = [sys.executable, "-m", "data.fineweb", "--shard_size=1000", "--workers=1", *argv]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)

    yield root, sent, run
    server.shutdown()


def test_downloaded_streamed_and_local_shards_are_the_same(corpus, tmp_path, hub):
    """All three ways of reading a dataset give the same shards."""
    _, folder = corpus
    root, sent, run = hub
    shutil.copytree(folder, root / "sample" / "10BT")
    (root / "README.md").write_text(
        "---\nconfigs:\n- config_name: sample-10BT\n  data_files:\n"
        "  - split: train\n    path: sample/10BT/*\n---\n"
    )
    local = run_fineweb(folder, tmp_path / "local", "--dataset=fineweb-edu")
    assert "fineweb_edu_val_000000.bin" in local
    for name, option in (("streamed", ["--streaming"]), ("downloaded", [])):
        out = tmp_path / name
        made = run("--dataset=fineweb-edu", f"--out_dir={out}", *option)
        assert made.returncode == 0, made.stderr
        assert all(sent) if option else sent == [None, None]  # ranges of files, or files
        sent.clear()
        made = contents(out)
        meta, local_meta = (json.loads(c["meta.json"]) for c in (made, local))
        assert meta.pop("source") == "HuggingFaceFW/fineweb-edu sample-10BT"
        assert meta.items() <= local_meta.items()
        assert made | {"meta.json": None} == local | {"meta.json": None}

    # A part is made from some of the files, and no other is downloaded.
    run_fineweb(folder, tmp_path / "part", "--dataset=fineweb-edu", "--part=2/2")
    for name, option in (("streamed2", ["--streaming"]), ("downloaded2", [])):
        part = tmp_path / name
        made = run("--dataset=fineweb-edu", "--part=2/2", f"--out_dir={part}", *option)
        assert made.returncode == 0, made.stderr
        assert option or sent == []  # it is in the cache
        sent.clear()
        metas = [shards.read_meta(folder, (2, 2)) for folder in (tmp_path / "part", part)]
        assert metas[0] | {"source": None} == metas[1] | {"source": None}
    shutil.rmtree(tmp_path / "home")
    part = tmp_path / "downloaded3"
    assert run("--dataset=fineweb-edu", "--part=1/2", f"--out_dir={part}").returncode == 0
    assert sent == [None]

    # What is done needs no network.
    shutil.rmtree(root)
    done = run("--dataset=HuggingFaceFW/fineweb-edu", f"--out_dir={out}")
    assert "already done" in done.stdout, done.stderr
    none = run("--dataset=fineweb-edu", "--name=sample-1BT", f"--out_dir={tmp_path / 'none'}")
    assert none.returncode == 2
    assert none.stderr.splitlines()[-1].startswith("error: HuggingFaceFW/fineweb-edu: ")


def test_any_dataset_of_the_hub(tmp_path, hub):
    """JSON lines, a configuration, a split and a column of its own."""
    root, _, run = hub
    documents = make_documents(90)
    (root / "lines").mkdir()
    for k in (0, 1):
        lines = [json.dumps({"n": n, "body": text}) for n, text in enumerate(documents[k::2])]
        (root / "lines" / f"{k}.jsonl").write_text("\n".join(lines))
    (root / "README.md").write_text(
        "---\nconfigs:\n- config_name: small\n  data_files:\n"
        "  - split: held\n    path: lines/*\n---\n"
    )
    given = ["--dataset=some/Train-Set.v2", "--name=small", "--split=held", "--column=body"]
    for out, option in ((tmp_path / "a", "--streaming"), (tmp_path / "b", "--part=1/1")):
        made = run(*given, option, f"--out_dir={out}")
        assert made.returncode == 0, made.stderr
        tokens = np.concatenate([shards.read_shard(p) for p in ordered(out)])
        assert np.array_equal(tokens, expected_tokens(documents[::2] + documents[1::2]))
        assert shards.read_meta(out)["source"] == "some/Train-Set.v2 small held body"
        assert (out / "set_v2_val_000000.bin").exists()
    none = run(*given[:2], "--split=none", f"--out_dir={tmp_path / 'c'}")
    assert "no split 'none' of small" in none.stderr


def test_names_of_datasets():
    assert fineweb.names_of("HuggingFaceFW/fineweb", "sample-10BT") == ("fineweb", "fineweb10B")
    edu = fineweb.names_of("HuggingFaceFW/fineweb-edu", "sample-350BT")
    assert edu == ("fineweb_edu", "fineweb_edu350B")
    assert fineweb.names_of("a/My.Set", None) == ("my_set", "my_set")
    # *_train_* and *_val_* find the shards of a split
    assert fineweb.names_of("a/x-train-y", "val") == ("x_y", "x_y_")


def test_ready_shards(tmp_path, monkeypatch, capsys, refused):
    import huggingface_hub

    def download(repo, name, repo_type, local_dir):
        assert (repo, repo_type) == ("kjj0/fineweb10B-gpt2", "dataset")
        asked.append(name)
        if name == fails:
            raise OSError("connection lost")
        shards.write_shard(local_dir / name, np.arange(len(name), dtype=np.uint16))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(fineweb, "reach_hub", lambda: None)
    asked, fails, out = [], "fineweb_train_000002.bin", tmp_path / "out"
    ready = ("--ready", "--ready_shards", 2, "--out_dir", out)
    assert "fineweb_train_000002.bin: connection lost" in refused(fineweb.main, *ready)
    with pytest.raises(UserError, match="unfinished"):
        shards.list_shards(out, "train")
    asked, fails = [], None
    fineweb.main([str(arg) for arg in ready])
    assert asked == ["fineweb_train_000002.bin"]
    assert [p.name for p in shards.list_shards(out, "train")] == [
        "fineweb_train_000001.bin",
        "fineweb_train_000002.bin",
    ]
    meta = shards.read_meta(out)
    assert meta["tokens"] == 22 + 24 + 24 and len(meta["shards"]) == 3
    asked = []
    fineweb.main([str(arg) for arg in ready])
    assert not asked and "already done" in capsys.readouterr().out
    # A damaged shard is fetched anew.
    (out / "fineweb_val_000000.bin").write_bytes(b"short")
    fineweb.main([str(arg) for arg in ready])
    assert asked == ["fineweb_val_000000.bin"]
    file = write_parquet(tmp_path / "x.parquet", ["a"])
    line = refused(fineweb.main, "--parquet", file, "--out_dir", out)
    assert "made from other documents (kjj0/fineweb10B-gpt2)" in line


def test_no_network_is_said_at_once(tmp_path):
    # Nothing listens on the discard port of this machine.
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"}
    command = [sys.executable, "-m", "data.fineweb", f"--out_dir={tmp_path / 'x'}"]
    for option in ([], ["--streaming"], ["--ready"]):
        start = time.monotonic()
        run = subprocess.run([*command, *option], cwd=ROOT, env=env, capture_output=True, text=True)
        assert run.returncode == 2
        assert run.stderr.startswith("error: cannot reach http://127.0.0.1:9")
        assert run.stderr.count("\n") == 1
        assert time.monotonic() - start < 15


# --- any text -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Text files of every kind, and hidden and other files, which must not be read."""
    root = tmp_path / "texts"
    (root / "deep" / ".hidden").mkdir(parents=True)
    for k in range(21):
        (root / f"{k:02d}.txt").write_text(f"text {k}\n")
    (root / "deep" / "a.md").write_bytes(b"# A\r\nb\r\n")
    (root / "deep" / "b.py").write_text("x = 1\n")
    (root / "deep" / "c.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "x": 1}\n')
    write_parquet(root / "deep" / "d.parquet", ["first", "second", ""])
    (root / "deep" / "empty.txt").write_text("")
    (root / "deep" / ".hidden" / "h.txt").write_text("hidden")
    (root / "deep" / "e.html").write_text("<p>")
    return root


def run_text(*argv):
    text.main([*map(str, argv), "--workers=1"])


def documents_of(out, split, tokenizer="bytes"):
    tok = get_tokenizer(tokenizer)
    tokens = np.concatenate([shards.read_shard(p) for p in shards.list_shards(out, split)])
    assert tokens[0] == tok.eot
    return [
        tok.decode(part[1:]) for part in np.split(tokens, np.flatnonzero(tokens == tok.eot))[1:]
    ]


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_text_of_every_kind(folder, tmp_path, tokenizer):
    out = tmp_path / "out"
    run_text(folder, "--out_dir", out, "--tokenizer", tokenizer)
    train, val = (documents_of(out, split, tokenizer) for split in ("train", "val"))
    everything = [f"text {k}\n" for k in range(21)]
    everything += ["# A\r\nb\r\n", "x = 1\n", "one", "two", "first", "second"]
    assert sorted(train + val) == sorted(everything)
    names = {p.name for p in out.glob("*.bin")}
    assert names == {"text_val_000000.bin", "text_train_000001.bin"}
    meta = shards.read_meta(out)
    assert meta["tokenizer"] == tokenizer and meta["documents"] == 27
    assert meta["source"] == str(folder)


def test_the_validation_files_are_always_the_same_tenth(folder, tmp_path):
    chosen = []
    for copy in ("texts", "moved"):
        if copy == "moved":
            folder = folder.rename(tmp_path / copy)
        sources = text.inspect(text.list_files([folder]))
        train, val = text.choose_validation(sources)
        assert len(sources) == 25 and len(val) == 2
        assert not {s.name for s in train} & {s.name for s in val}
        chosen.append([s.name for s in val])
    assert chosen[0] == chosen[1] == ["18.txt", "20.txt"]
    train, val = text.choose_validation(sources[:2])
    assert (len(train), len(val)) == (1, 1)


def test_named_validation_files(folder, tmp_path):
    out = tmp_path / "out"
    run_text(folder, "--val", folder / "deep" / "c.jsonl", folder / "00.txt", "--out_dir", out)
    assert documents_of(out, "val") == ["text 0\n", "one", "two"]
    assert len(documents_of(out, "train")) == 24


def test_text_called_again(folder, tmp_path, capsys, refused):
    out = tmp_path / "out"
    run_text(folder, "--out_dir", out)
    before = contents(out)
    run_text(folder, "--out_dir", out)
    assert "already done" in capsys.readouterr().out
    (folder / "00.txt").write_text("text 9\n")  # of the same size
    assert "made from other documents" in refused(text.main, folder, "--out_dir", out)
    (folder / "00.txt").write_text("text 0\n")
    (folder / "later.txt").write_text("later")
    assert "made from other documents" in refused(text.main, folder, "--out_dir", out)
    line = refused(text.main, folder, "--out_dir", out, "--tokenizer", "gpt2")
    assert "made with tokenizer bytes, not gpt2" in line
    assert contents(out) == before


def test_text_resumes_after_every_shard(folder, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole", tmp_path / "out"
    run_text(folder, "--out_dir", whole, "--shard_size", 7)
    stop_after_each_shard(
        monkeypatch, lambda: run_text(folder, "--out_dir", out, "--shard_size", 7)
    )
    assert contents(out) == contents(whole)


def test_text_refusals(folder, tmp_path, refused):
    out = ("--out_dir", tmp_path / "out")
    assert "none: no such file or folder" in refused(text.main, tmp_path / "none", *out)
    assert "e.html: files must end in" in refused(text.main, folder / "deep" / "e.html", *out)
    assert "empty.txt: no text in any" in refused(text.main, folder / "deep" / "empty.txt", *out)
    (tmp_path / "void").mkdir()
    assert "void: no text in any .txt .md" in refused(text.main, tmp_path / "void", *out)
    line = refused(text.main, folder / "00.txt", *out)
    assert "00.txt: a single file cannot serve for both" in line and "--val" in line
    (folder / "bad.txt").write_bytes(b"ab\xff")
    line = refused(text.main, folder, *out)
    assert "bad.txt: not UTF-8 text: invalid start byte at byte 2" in line
    (folder / "bad.txt").unlink()
    for content, message in (
        ('{"text": "a"}\n{"body": 1}', 'line 2 has no JSON field "text"'),
        ('{"text": "a"}\n{broken', "line 2 has no JSON field"),
        ('{"text": 5}', '"text" is 5, not a string'),
    ):
        (folder / "bad.jsonl").write_text(content)
        assert f"bad.jsonl: {message}" in refused(text.main, folder, *out).replace(": line 1", "")
    assert not (tmp_path / "out").exists()


def test_the_standard_library_without_its_tests():
    names = [name for name, _ in text.list_stdlib()]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages"}


def test_unreadable_files_of_the_standard_library_are_counted(tmp_path, capsys):
    (tmp_path / "a.py").write_bytes(b"# \xe9\n")
    (tmp_path / "b.py").write_bytes(b"# fine\n")
    sources = text.inspect(text.list_files([tmp_path]), skip_unreadable=True)
    assert [source.name for source in sources] == ["b.py"]
    assert "skipped 1 files that are not UTF-8" in capsys.readouterr().out


def test_a_fifo_is_refused(tmp_path, refused):
    """Opening it would wait until somebody writes into it."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a")
    out = ("--out_dir", tmp_path / "out")
    for suffix in text.SUFFIXES:
        pipe = tmp_path / "in" / f"pipe{suffix}"
        os.mkfifo(pipe)
        for given in (pipe, tmp_path / "in"):
            line = refused(text.main, given, *out)
            assert f"pipe{suffix}: cannot be read: it is not a regular file" in line
        pipe.unlink()


def test_long_lines_of_json_are_refused(tmp_path, monkeypatch, refused):
    path, line = tmp_path / "x.jsonl", json.dumps({"text": "é" * 100}, ensure_ascii=False)
    path.write_text(f"{line}\n\n{line}", encoding="utf-8")
    size = len(line.encode())
    monkeypatch.setattr(text, "MAX_LINE", size + 1)
    assert list(text.read_file(path)) == ["é" * 100] * 2
    monkeypatch.setattr(text, "MAX_LINE", size - 1)
    line = refused(text.main, path, "--out_dir", tmp_path / "out")
    assert f"x.jsonl: line 1 is longer than {size - 1} bytes: divide the document" in line
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}')
    with pytest.raises(UserError, match="not UTF-8 text: invalid start byte at byte 24"):
        list(text.read_file(path))
