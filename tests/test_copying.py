"""What the first copy of a passage is worth on the second."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data.shards import read_shard, write_shard
from layers.build import build_model
from runtime import checkpoint, run_folder
from scripts import copying
from scripts.common.plots import draw_by_length
from tests.helpers import not_blank, read_table, saved_run, small_config, stub_run


class Inducing:
    """A model that predicts what followed the last two tokens where it has seen them before.

    It sees the last `window` tokens.
    """

    def __init__(self, window):
        self.window = window

    def token_losses(self, idx, targets):
        predicted = torch.full_like(idx, -1)  # -1: nothing
        for row, ids in zip(predicted, idx.tolist(), strict=True):
            for i in range(1, len(ids)):
                last_two = ids[i - 1 : i + 1]
                for j in range(max(1, i - self.window + 2), i):
                    if ids[j - 1 : j + 1] == last_two:
                        row[i] = ids[j + 1]
        logits = 20.0 * F.one_hot(predicted + 1, 258)[..., 1:]
        return F.cross_entropy(logits.mT, targets, reduction="none")


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """Random bytes, where two tokens hardly ever repeat."""
    folder = tmp_path_factory.mktemp("noise")
    tokens = np.random.default_rng(0).integers(0, 256, 999, np.uint16)
    write_shard(folder / "text_val_000000.bin", tokens)
    return folder


@pytest.mark.parametrize(
    "window, worths, shares",
    [
        (1000, [1, 1, 1, 1, 1], [1, 1]),
        (40, [1, 1, 1, 1, 0], [1, 0]),
        (10, [1, 1, 0, 0, 0], [0, 0]),
        (0, [0, 0, 0, 0, 0], ["undecided", "undecided"]),  # no memory
    ],
)
def test_a_model_that_copies_and_what_a_window_hides(noise, tmp_path, window, worths, shares):
    """Passages of 4 tokens; the first token that is announced by two is the third."""
    run = stub_run(tmp_path, "bytes", Inducing(window))
    evaluation = copying.Copying(data_dir=str(noise), lags=(32, 64), passages=8)
    run = replace(run, config=evaluation.apply_to(run.config))
    chunks = evaluation.chunks(run.config)
    assert list(chunks) == ["4", "8", "12", "32", "64"]
    parts = {name: evaluation.measure(run, lag) for name, lag in chunks.items()}
    result = run.facts | {"parts": parts}
    full = 2 / 3 * np.log(257)  # two of the three tokens after the first
    for lag, expected in zip(chunks.values(), worths, strict=True):
        worth, _ = copying.worth_at(result, [lag])
        assert worth == pytest.approx(full * expected, abs=0.02)
    expected = pytest.approx(shares, abs=0.02) if window else shares
    assert list(copying.shares_kept(result).values()) == expected


def test_where_there_is_no_share():
    parts = {}
    for lag in ("4", "8", "12"):
        parts[lag] = {"loss": 2.0, "worth": [0.0, 1.0]}
    for lag in ("13", "16", "32"):  # 13: asked for too
        parts[lag] = {"loss": 3.0, "worth": [1.0, 1.0]}
    result = {"trained_length": 16, "parts": parts}
    # the error is 0.5, as the worth
    assert copying.shares_kept(result) == {16: "undecided", 32: "undecided"}
    for lag in ("4", "8", "12"):
        parts[lag]["worth"] = [1.0, 2.0]
    assert copying.shares_kept(result) == {16: 1 / 1.5, 32: 1 / 1.5}
    parts["32"]["loss"] = 3.6  # above the 3.5 within 16 tokens without the first copy
    assert copying.shares_kept(result) == {16: 1 / 1.5, 32: "hurt"}


def test_the_legend_says_what_the_band_is():
    parts = {lag: {"loss": 2.0, "worth": [0.5, 1.5]} for lag in ("4", "8", "12", "32")}
    curve = copying.worth_curve("run", {"trained_length": 16, "parts": parts}, is_control=False)
    figure = draw_by_length([], "", [curve], "lag", copying.UNIT)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts] == ["run", "standard error"]
    assert curve.deviation == pytest.approx([0.5] * 4)
    assert list(curve.y) == [1] * 4
    parts["32"]["loss"] = 9.0  # the long context hurts: a gap
    curve = copying.worth_curve("run", {"trained_length": 16, "parts": parts}, is_control=False)
    assert list(curve.y) == pytest.approx([1, 1, 1, math.nan], nan_ok=True)


def test_the_command(shards, call, tmp_path, capsys, refused):
    torch.manual_seed(0)
    runs = []
    for name in ("softmax", "lssa"):
        config = small_config(f"{name}.py", f"--data_dir={shards}")
        runs.append(saved_run(tmp_path / name, build_model(config)))
    call(copying, *runs, "--passages=5", "--lags=32,40", "--rope=yarn")
    assert not_blank(tmp_path / "copying_softmax_lssa.png")
    printed = capsys.readouterr().out
    assert "rope yarn\n\nsoftmax, 5 passages of 4 tokens\n" in printed
    assert "softmax, sliding window of 16, 5 passages" in printed
    assert "undecided" in printed
    result, control = json.loads((runs[0] / "copying.json").read_text())
    assert (control["rope"], control["window"]) == ("none", 16)
    # one passage, by hand
    tokens = read_shard(shards / "text_val_000000.bin").astype(np.int64)
    model = build_model(run_folder.read_config(runs[0])).eval().scale_rope("yarn")
    checkpoint.load_weights(model, checkpoint.find(runs[0]))

    def loss(first):
        ids = np.concatenate((first, tokens[124:160], tokens[120:124]))
        window = torch.from_numpy(ids)
        with torch.no_grad():
            logits = model(window[None, :-1]).double()
        return F.cross_entropy(logits[0, -3:], window[-3:]).item()

    worth = loss(tokens[480:484]) - loss(tokens[120:124])  # the second passage; the last
    assert result["parts"]["40"]["worth"][1] == pytest.approx(worth, abs=1e-6)
    says = "600 validation tokens, but 64 passages of 4 tokens and a lag of 1000"
    refused(call, copying, runs[0], "--lags=1000", says=says)
    short = build_model(small_config("softmax.py", "--block_size=4", f"--data_dir={shards}"))
    refused(call, copying, saved_run(tmp_path / "short", short), says="T must be at least 8")


def test_lags_end_with_the_learned_positions(shards, call, tmp_path):
    learned = build_model(small_config("softmax.py", "--positions=learned", f"--data_dir={shards}"))
    run = saved_run(tmp_path / "learned", learned)
    call(copying, run, "--passages=5")
    (result,) = json.loads((run / "copying.json").read_text())
    assert list(result["parts"]) == ["4", "8", "12"]  # its positions end at 16


def test_both_copies_are_one_document(shards, tmp_path, call):
    """Of a model with document_mask too, whose attention would not reach the first copy."""
    results = []
    for name, settings in (("joined", ()), ("masked", ("--document_mask",))):
        torch.manual_seed(0)
        config = small_config("lssa.py", f"--data_dir={shards}", *settings)
        run = saved_run(tmp_path / name, build_model(config))
        call(copying, run, "--passages=5", "--lags=32")
        results.append(json.loads((run / "copying.json").read_text()))
    joined, masked = results
    assert masked[0]["parts"] == joined[0]["parts"]


def test_the_table_of_what_is_kept(reproduced, monkeypatch):
    def losses(run, windows, lag):
        copied = (windows[:, :4] == windows[:, lag:]).all(-1)
        worth = 1 if lag < 64 else 0.5
        loss = 2 - copied * worth
        if lag >= 16 and run.config.positions == "rope" and run.config.window is None:
            loss += 5  # a long context hurts softmax
        return loss

    monkeypatch.setattr(copying, "copy_losses", losses)
    folder = reproduced("copying", "--only=softmax,ssmax_nope")
    table = read_table(folder)
    assert table["columns"][:4] == ["0.25x, 4", "0.5x, 8", "0.75x, 12", "2x, 32"]
    rows = table["rows"]
    assert list(rows) == ["softmax", "ssmax_nope"]
    assert rows["softmax"]["mean"] == [1, 1, 1, None, None, None, None, None]
    assert rows["ssmax_nope"]["mean"] == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5]
    text = (folder / "table.md").read_text()
    assert "Share kept, by seed: `softmax` –; `ssmax_nope` 0.500." in text
    assert not_blank(folder / "copying.png")
