"""`python -m data.fineweb`: the tokens, the hub, published shards, refusals."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

from data import fineweb, shards
from tests.corpora import (
    ROOT,
    contents,
    expected_tokens,
    make_documents,
    run_fineweb,
    tokens_in,
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
    assert (meta["tokenizer"], meta["source"]) == ("gpt2", str(folder))
    assert [s["name"] for s in meta["shards"]] == names
    assert sorted(p.name for p in out.iterdir() if p.suffix != ".bin") == [".lock", "meta.json"]
    assert f"done, {len(tokens):,} tokens" in capsys.readouterr().out


def test_another_tokenizer(corpus, tmp_path, gpt2_file):
    """The vocabulary of GPT-2 as a file gives the shards of GPT-2, made on one core or two."""
    _, folder = corpus
    gpt2 = run_fineweb(folder, tmp_path / "gpt2")
    own = run_fineweb(folder, tmp_path / "own", f"--tokenizer={gpt2_file}", workers=2)
    assert own.pop("tokenizer.json") == gpt2_file.read_bytes()
    assert own.pop("meta.json")["tokenizer"].startswith("sha256:")
    del gpt2["meta.json"]
    assert own == gpt2


def test_fineweb_refusals(corpus, tmp_path, refused):
    _, folder = corpus
    out = tmp_path / "out"
    base = ("--out_dir", out, "--workers", 1, "--parquet")

    def says(message, *arguments):
        assert message in refused(fineweb.main, *arguments)

    says("tokens fill only one shard, for validation", *base, folder)
    says("made with shard_size 100000000, not 99", *base, folder, "--shard_size", 99)
    shutil.rmtree(out)
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.parquet")  # opening it would wait for ever
    for path in (tmp_path / name for name in ("none", "empty", "pipe.parquet")):
        says(f"{path}: cannot be read: ", *base, path)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    says("broken.parquet: cannot be read: ", *base, tmp_path / "broken.parquet")
    other = write_parquet(tmp_path / "other.parquet", ["a"], column="content")
    says("Column name ['text'] not in the dataset. Columns in the dataset: ['id'", *base, other)
    null = write_parquet(tmp_path / "null.parquet", ["a", "b", None])
    says("null.parquet: a document has no text, or it is not a string", *base, null)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    shards.write_shard(foreign / "fineweb_train_000007.bin", np.array([1], dtype=np.uint16))
    says("foreign: holds shards that this", "--parquet", folder, "--out_dir", foreign)
    says("--workers 0 at least 1", *base, folder, "--workers", 0)
    says("--shard_size 0 must be", *base, folder, "--shard_size", 0)
    says("Bad split: test. Available splits: ['train']", *base, folder, "--split", "test")


def test_no_network_is_said_at_once(tmp_path, monkeypatch, refused):
    # nothing listens on the discard port of this machine
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    line = refused(fineweb.main, f"--out_dir={tmp_path / 'x'}")
    assert line.startswith("error: HuggingFaceFW/fineweb: cannot be read: ")
    assert not (tmp_path / "x").exists()


class Hub(BaseHTTPRequestHandler):
    """A folder, as the hub's API gives the files of any dataset."""

    protocol_version = "HTTP/1.1"
    root: Path

    def do_GET(self):
        pattern = "/(?:api/)?datasets/[^/]+/[^/]+(?:/(revision|tree|resolve)/[^/]+/?(.*))?"
        kind, path = re.fullmatch(pattern, urlsplit(unquote(self.path)).path).groups()
        place = self.root / (path or "")
        if kind == "resolve":
            self.answer(place.read_bytes() if place.is_file() else None)
        elif kind == "tree":
            deep = "recursive=true" in self.path.lower()
            found = (place.rglob("*") if deep else place.iterdir()) if place.is_dir() else []
            self.answer(json.dumps([self.entry(file) for file in sorted(found)]).encode())
        else:
            files = [{"rfilename": self.entry(file)["path"]} for file in self.root.rglob("*")]
            content = {"id": "owner/name", "sha": "0" * 40, "siblings": files}
            self.answer(json.dumps(content).encode())

    do_HEAD = do_GET

    def entry(self, file):
        kind = "file" if file.is_file() else "directory"
        path = file.relative_to(self.root).as_posix()
        return {"type": kind, "path": path, "size": file.stat().st_size, "oid": "0" * 40}

    def answer(self, data):
        headers = {"X-Repo-Commit": "0" * 40, "ETag": f'"{len(data or b"")}"'}
        status = 404 if data is None else 200
        if data is None:
            data, headers["X-Error-Code"] = b"", "EntryNotFound"
        elif wanted := self.headers.get("Range"):
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            status, data = 206, data[first : last + 1]
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


# Runs data.fineweb for each line of its input, a JSON list of arguments.
DRIVER = """
import contextlib, io, json, sys
from data import fineweb
for line in sys.stdin:
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            fineweb.main(json.loads(line))
        except SystemExit as stop:
            code = stop.code
    print(json.dumps([code, out.getvalue()]), flush=True)
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A server that stands in for the hub: its folder, and how to run a command.

    The commands run in one process, as libraries read the hub's address when they are imported.
    """
    root, home = tmp_path_factory.mktemp("hub"), tmp_path_factory.mktemp("home")
    handler = type("Handler", (Hub,), {"root": root})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(home),
        "no_proxy": "127.0.0.1",
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", DRIVER], cwd=ROOT, env=env, **pipes)

    def run(*argv):
        """Exit code and output."""
        process.stdin.write(json.dumps([*argv, "--shard_size=1000", "--workers=1"]) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield root, run
    process.communicate()
    server.shutdown()


def put(root, name, split, path):
    """Make the hub's dataset one configuration with one split."""
    (root / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {name}\n  data_files:\n"
        f"  - split: {split}\n    path: {path}\n---\n"
    )


def test_the_shards_are_the_same_from_the_hub_and_from_disk(corpus, tmp_path, hub):
    _, folder = corpus
    root, run = hub
    shutil.copytree(folder, root / "sample" / "10BT")
    put(root, "sample-10BT", "train", "sample/10BT/*")
    local = run_fineweb(folder, tmp_path / "local", "--dataset=fineweb-edu")
    assert "fineweb_edu_val_000000.bin" in local
    done = run("--dataset=fineweb-edu", f"--out_dir={tmp_path / 'hub'}")
    assert done[0] == 0, done
    made = contents(tmp_path / "hub")
    meta, local_meta = (files.pop("meta.json") for files in (made, local))
    assert made == local and meta["documents"] == local_meta["documents"]
    assert meta["source"] == "HuggingFaceFW/fineweb-edu sample-10BT train text"
    part = run("--dataset=fineweb-edu", "--part=2/2", f"--out_dir={tmp_path}")
    assert part[0] == 0, part
    run_fineweb(folder / "001_00000.parquet", tmp_path / "second")
    assert np.array_equal(tokens_in(tmp_path / "part-2-of-2"), tokens_in(tmp_path / "second"))


def test_any_dataset_of_the_hub(tmp_path, hub):
    """JSON lines, a configuration, a split and a column of its own."""
    root, run = hub
    documents = make_documents(90)
    (root / "lines").mkdir()
    for k in (0, 1):
        lines = [json.dumps({"n": n, "body": text}) for n, text in enumerate(documents[k::2])]
        (root / "lines" / f"{k}.jsonl").write_text("\n".join(lines))
    put(root, "small", "held", "lines/*")
    options, out = ["--dataset=some/Train-Set.v2", "--name=small", "--column=body"], tmp_path / "a"
    made = run(*options, "--split=held", f"--out_dir={out}")
    assert made[0] == 0, made
    assert np.array_equal(tokens_in(out), expected_tokens(documents[::2] + documents[1::2]))
    assert (out / "set_v2_val_000000.bin").exists()
    code, output = run(*options, "--split=none", f"--out_dir={tmp_path / 'c'}")
    assert code == 2 and "Bad split: none. Available splits: ['held']" in output


def test_names_of_datasets():
    assert fineweb.names_of("HuggingFaceFW/fineweb", "sample-10BT") == ("fineweb", "fineweb10B")
    edu = fineweb.names_of("HuggingFaceFW/fineweb-edu", "sample-350BT")
    assert edu == ("fineweb_edu", "fineweb_edu350B")
    assert fineweb.names_of("a/My.Set", None) == ("my_set", "my_set")
    # *_train_* and *_val_* find the shards of a split
    assert fineweb.names_of("a/x-train-y", "val") == ("x_y", "x_y_")
