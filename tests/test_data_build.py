"""Making shards: kills and resumes, parts, what is refused."""

import json
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

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("shard_size, piece", [(1, 60), (97, 9), (97, 2000), (1000, 60)])
def test_resume_after_every_shard(tmp_path, monkeypatch, shard_size, piece, workers):
    """Stopped once after each shard, wherever in a document, a batch or a task it ends."""
    monkeypatch.setattr(build, "PIECE_CHARS", piece)
    monkeypatch.setattr("data.fineweb.BATCH", 3)
    sizes = {1: (4, 8), 97: (12, 80), 1000: (12, 400)}[shard_size]
    documents = ["", *make_documents(*sizes, seed=shard_size), "", "", "end"]
    folder, out = tmp_path / "parquet", tmp_path / "out"
    folder.mkdir()
    write_parquet(folder / "x.parquet", documents, rows=4)
    whole = run_fineweb(folder, tmp_path / "whole", shard_size=shard_size, workers=workers)
    assert np.array_equal(tokens_in(tmp_path / "whole"), expected_tokens(documents))
    stop_after_each_shard(monkeypatch, lambda: run_fineweb(folder, out, shard_size=shard_size))
    assert contents(out) == whole


@pytest.mark.parametrize("lose", [Path.unlink, lambda path: path.write_bytes(b"damaged")])
def test_a_lost_shard_is_made_again_without_what_is_before_it(tmp_path, monkeypatch, lose):
    path, out = write_parquet(tmp_path / "x.parquet", ["some words " * 9] * 400), tmp_path / "out"
    whole = run_fineweb(path, out)
    tokenise, tokenised = build._tokenise, []

    def counted(*arguments):
        for state, tokens in tokenise(*arguments):
            tokenised.append(len(tokens))
            yield state, tokens

    monkeypatch.setattr(build, "_tokenise", counted)
    lose(max(out.glob("*train*.bin")))
    assert run_fineweb(path, out) == whole
    assert len(tokens_in(out)) == 8000 and 1000 <= sum(tokenised) < 1700


def test_a_finished_set_is_left_alone(corpus, tmp_path, call, capsys, refused):
    _, folder = corpus
    out = tmp_path / "out"
    before = run_fineweb(folder, out)
    times = {p: p.stat().st_mtime_ns for p in out.iterdir() if p.name != ".lock"}
    capsys.readouterr()
    assert run_fineweb(folder, out) == before
    assert "already done" in capsys.readouterr().out
    assert times == {p: p.stat().st_mtime_ns for p in times}

    again = (call, fineweb, "--parquet", folder, "--out_dir", out)
    refused(*again, "--shard_size=999", says="shard_size 1000, not 999")
    with lock_folder(out, ""):
        refused(*again, says="another process is making this set")
    write_parquet(folder / "002_00000.parquet", ["more"])
    refused(*again, "--shard_size=1000", says="made with documents")
    meta = read_json(out / "meta.json")
    meta["shards"][0]["name"] = "../x_train_000000.bin"
    (out / "meta.json").write_text(json.dumps(meta))
    refused(*again, says="meta.json: damaged")


@pytest.mark.parametrize("share, n", [(0.25, 400_000), (1, 5120), (1, 90), (1, 3), (1, 0)])
def test_excerpts_follow_passages(share, n):
    """Tokens that are numbered through show what was copied, and from how far."""
    tokens, T = np.arange(n), 128
    out = build.with_repeats(tokens, share, T)
    assert np.array_equal(out, build.with_repeats(tokens.copy(), share, T))
    last = np.maximum.accumulate(out)  # of the text's tokens so far
    copied = np.diff(last, prepend=-1) == 0
    assert np.array_equal(out[~copied], tokens)
    starts = np.flatnonzero(np.diff(out) < 0) + 1
    lags = last[starts] + 1 - out[starts]
    lengths = np.array([np.count_nonzero(copied & (last == last[start])) for start in starts])
    for start, length in zip(starts, lengths, strict=True):
        assert np.array_equal(out[start : start + length], out[start] + np.arange(length))
    assert ((lengths <= lags) & (lags <= T - lengths)).all() and {*lengths} <= {*range(16, 33)}
    assert (((last[starts] + 1) % T == 0) | (last[starts] == n - 1)).all()  # a passage ends there
    if n == 400_000:
        assert 0.23 * n / T < len(starts) < 0.27 * n / T
        assert min(lags) < T / 6 and max(lags) > 5 * T / 6 and {16, 32} <= {*lengths}
    else:
        assert len(starts) == {5120: 40, 90: 1}.get(n, 0)
