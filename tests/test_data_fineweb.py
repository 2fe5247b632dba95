"""`python -m data.fineweb`: the tokens, the hub, published shards, refusals."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

from data import build, fineweb, shards
from data.documents import parquet_files
from errors import UserError
from runtime.files import sha256_of
from tests.corpora import (
    ROOT,
    contents,
    expected_tokens,
    make_documents,
    ordered,
    run_fineweb,
    write_parquet,
)

pytestmark = pytest.mark.usefixtures("no_fsync")


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


def test_too_little_text_is_refused_before_it_is_tokenised(tmp_path, monkeypatch, refused):
    documents = ["word " * 200] * 50  # 200 or 201 tokens each, and 1,000 bytes
    path, out = write_parquet(tmp_path / "x.parquet", documents, rows=50), tmp_path / "out"
    assert path.stat().st_size < 9000
    run_fineweb(path, out, shard_size=9000)
    tokens = np.concatenate([shards.read_shard(p) for p in ordered(out)])
    assert np.array_equal(tokens, expected_tokens(documents))
    monkeypatch.setattr(build, "_make", None)
    none = ("--out_dir", tmp_path / "none")
    line = refused(fineweb.main, "--parquet", path, "--shard_size", 50051, *none)
    assert "x.parquet: at most 50,050 tokens, which fill only val shards" in line
    assert not (tmp_path / "none").exists()


def test_another_tokenizer(corpus, tmp_path, gpt2_file):
    """The vocabulary of GPT-2 as a file gives the shards of GPT-2, made on one core or two."""
    _, folder = corpus
    gpt2 = run_fineweb(folder, tmp_path / "gpt2")
    own = run_fineweb(folder, tmp_path / "own", f"--tokenizer={gpt2_file}", workers=2)
    assert own.pop("tokenizer.json") == gpt2_file.read_bytes()
    assert json.loads(own.pop("meta.json"))["tokenizer"].startswith("sha256:")
    del gpt2["meta.json"]
    assert own == gpt2


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
