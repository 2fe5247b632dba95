"""Making shards: kills and resumes, parts, what is refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data import build, fineweb, shards
from data.tokenizer import get_tokenizer
from errors import UserError
from runtime.files import read_json
from tests.corpora import (
    ROOT,
    contents,
    expected_tokens,
    is_running,
    make_documents,
    ordered,
    run_fineweb,
    stop_after_each_shard,
    write_parquet,
)

pytestmark = pytest.mark.usefixtures("no_fsync")


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


def test_a_dead_worker_is_reported(corpus, tmp_path, monkeypatch, refused):
    _, folder = corpus
    monkeypatch.setattr(build, "partial", lambda f, _: exit_now)
    more = ("--workers", 2, "--shard_size", 1000)
    line = refused(fineweb.main, "--parquet", folder, "--out_dir", tmp_path / "out", *more)
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
        build._Writer(out, "a", "gpt2", settings, shards.WHOLE)
    assert outside.exists()


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
