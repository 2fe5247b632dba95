"""Making shards: stops and resumes, repeats, what is refused."""

import hashlib
import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from data import build, fineweb
from runtime.files import lock_folder, read_json
from tests.corpora import (
    contents,
    expected_tokens,
    make_documents,
    run_fineweb,
    stop_after_each_shard,
    tokens_in,
    write_parquet,
)


@pytest.mark.parametrize("shard_size, piece", [(1, 60), (97, 9), (97, 2000), (1000, 60)])
def test_resume_after_every_shard(tmp_path, monkeypatch, shard_size, piece):
    """Stopped once after each shard, wherever in a document, a batch or a task it ends."""
    monkeypatch.setattr(build, "PIECE_CHARS", piece)
    monkeypatch.setattr("data.fineweb.BATCH", 3)
    count, longest = {1: (2, 8), 97: (12, 80), 1000: (12, 400)}[shard_size]
    documents = ["", *make_documents(count, longest, seed=shard_size), "", "", "end"]
    folder = tmp_path / "parquet"
    out = tmp_path / "out"
    folder.mkdir()
    write_parquet(folder / "x.parquet", documents, rows=4)
    whole = run_fineweb(folder, tmp_path / "whole", shard_size=shard_size)
    assert np.array_equal(tokens_in(tmp_path / "whole"), expected_tokens(documents))
    stop_after_each_shard(monkeypatch, lambda: run_fineweb(folder, out, shard_size=shard_size))
    assert contents(out) == whole


@pytest.mark.parametrize("lose", [Path.unlink, lambda path: path.write_bytes(b"damaged")])
def test_a_lost_shard_is_made_again_without_what_is_before_it(tmp_path, monkeypatch, lose):
    path = write_parquet(tmp_path / "x.parquet", ["some words " * 9] * 400)
    out = tmp_path / "out"
    whole = run_fineweb(path, out)
    tokenise = build.tokenise
    tokenised = []

    def counted(*arguments):
        for state, tokens in tokenise(*arguments):
            tokenised.append(len(tokens))
            yield state, tokens

    monkeypatch.setattr(fineweb, "tokenise", counted)
    lose(max(out.glob("*train*.bin")))
    assert run_fineweb(path, out) == whole
    assert len(tokens_in(out)) == 8000
    assert 1000 <= sum(tokenised) < 1700


def test_a_worker_takes_one_piece_at_once(monkeypatch):
    """So that long documents take little memory; reading starts again where a batch begins."""
    monkeypatch.setattr(build, "PIECE_CHARS", 10)
    batches = [["x" * 6, "x" * 12], [], ["x" * 9 + " x" * 9, "x"]]

    def read(first):
        return enumerate(batches[first:], first)

    options = Namespace(tokenizer="bytes", workers=2)
    pieces = list(build.tokenise([read], options, 0, None))
    assert [len(tokens) for _, tokens in pieces] == [7, 13, 12, 10, 6, 2]
    assert [state for state, _ in pieces] == [(0, 0), None, (0, 2), None, None, None]
    tokens = np.concatenate([tokens for _, tokens in pieces])
    documents = ["".join(document) for batch in batches for document in batch]
    assert np.array_equal(tokens, expected_tokens(documents, "bytes"))
    assert list(build.tokenise([], options, 0, None)) == []


def test_meta_has_the_checksum_of_every_shard(corpus, tmp_path):
    _, folder = corpus
    files = run_fineweb(folder, tmp_path / "out")
    entries = files["meta.json"]["shards"]
    assert len(entries) > 2
    for entry in entries:
        assert entry["sha256"] == hashlib.sha256(files[entry["name"]]).hexdigest()


def test_a_finished_set_is_left_alone(corpus, tmp_path, call, capsys, refused):
    _, folder = corpus
    out = tmp_path / "out"
    before = run_fineweb(folder, out)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir() if path.name != ".lock"}
    capsys.readouterr()
    assert run_fineweb(folder, out) == before
    assert "already done" in capsys.readouterr().out
    for path, time in times.items():
        assert path.stat().st_mtime_ns == time

    again = (call, fineweb, "--parquet", folder, "--out_dir", out)
    refused(*again, "--shard_size=999", says="shard_size 1000, not 999")
    with lock_folder(out, ""):
        refused(*again, "--shard_size=1000", says="another process is making this set")
    write_parquet(folder / "002_00000.parquet", ["more"])
    refused(*again, "--shard_size=1000", says="made from other documents")
    meta = read_json(out / "meta.json")
    meta["shards"][0]["name"] = "../x_train_000000.bin"
    (out / "meta.json").write_text(json.dumps(meta))
    refused(*again, says="meta.json: damaged")


@pytest.mark.parametrize("share, n", [(0.25, 400_000), (1, 5120), (1, 90), (1, 3), (1, 0)])
def test_excerpts_follow_passages(share, n):
    """Tokens that are numbered through show what was copied, and from how far."""
    tokens = np.arange(n)
    T = 128
    out = build.with_repeats(tokens, share, T)
    assert np.array_equal(out, build.with_repeats(tokens.copy(), share, T))
    last = np.maximum.accumulate(out)  # the text's last token so far
    copied = np.diff(last, prepend=-1) == 0
    assert np.array_equal(out[~copied], tokens)
    starts = np.flatnonzero(np.diff(out) < 0) + 1
    lags = []
    lengths = []
    for start in starts:
        before = last[start]
        assert (before + 1) % T == 0 or before == n - 1  # a passage ends there
        length = np.count_nonzero(copied & (last == before))
        lag = before + 1 - out[start]
        assert 16 <= length <= 32
        assert length <= lag <= T - length
        assert np.array_equal(out[start : start + length], out[start] + np.arange(length))
        lags.append(lag)
        lengths.append(length)
    if n == 400_000:
        assert 0.23 * n / T < len(starts) < 0.27 * n / T
        assert min(lags) < T / 6
        assert max(lags) > 5 * T / 6
        assert {16, 32} <= set(lengths)
    else:
        assert len(starts) == {5120: 40, 90: 1}.get(n, 0)
