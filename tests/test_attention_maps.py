"""Attention maps, and the numbers of the attention sink."""

import json
import math
import re

import numpy as np
import pytest
import torch

import evaluation
from scripts import attention_maps
from scripts.attention_maps import TEXT, AttentionMaps, group_sums, row_statistics, summary
from tests.helpers import (
    HEAD_WINDOWS,
    not_blank,
    saved_run,
    small_model,
    validation_ids,
    visible_keys,
)

# Two windows of 16 validation tokens, and a short text.
FEW = [
    "--lengths=16",
    "--tokens=32",
    f"--text={TEXT[:20]}",
    "--rope=none",
]


def read(run):
    """The run's measurements; what JSON has not, such as NaN, is an error."""
    text = (run / "attention_maps.json").read_text()
    return json.loads(text, parse_constant=pytest.fail)


def statistics_of(A, keys):
    """The measurement of weights A [1, L, L] whose rows see `keys` [1, L] keys."""
    statistics = row_statistics(A).double()
    sums = group_sums(statistics, keys)
    return summary(sums, length=A.shape[-1])


def test_rows_that_are_no_distributions():
    rows = [
        [1, 0, 0, 0, 0],
        [0.1, -0.3, 0, 0, 0],  # |A| makes 1/4, 3/4
        [0, 0, 0, 0, 0],  # dead
        [2, 2, 2, 2, 0],  # equal, of sum 8
        [0, 0, -3, 0, 0],  # all on one key
    ]
    keys = torch.arange(1, 6)[None]  # of a head without a window
    result = statistics_of(torch.tensor([rows]), keys)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert result["keys"] == [2, 4, 5]
    assert result["groups"]["dead"] == [[0, 0.5, 0]]
    assert result["heads"]["dead"] == [0.25]
    expected = {
        "first_token": [0.25, 0.25, 0],
        "entropy": [entropy, math.log(4), 0],
        "entropy_share": [entropy / math.log(2), 1, 0],
        "zeros": [0, 0, 0.8],
        "sum": [0.4, 8, 3],
    }
    for name, values in expected.items():
        (groups,) = result["groups"][name]
        (mean,) = result["heads"][name]
        expected_mean = sum(values) / 3
        assert groups == pytest.approx(values, rel=1e-6)
        assert mean == pytest.approx(expected_mean, rel=1e-6)


def test_dead_rows_have_no_means():
    keys = torch.arange(1, 5)[None]
    result = statistics_of(torch.zeros(1, 4, 4), keys)
    assert result["groups"]["entropy"] == [[None, None]]
    assert result["heads"]["sum"] == [None]


def test_blocks_of_rows_make_the_same_weights(monkeypatch):
    model = small_model("lssar_p15.py")
    idx = torch.randint(257, (2, 24))
    all_rows = slice(None)
    layer = slice(1, 2)
    (A,) = evaluation.layer_attention_weights(model, idx, all_rows, layers=layer)
    expected = row_statistics(A)
    monkeypatch.setattr(evaluation, "BLOCK_QUERIES", 5)
    (statistics,) = evaluation.layer_attention_weights(
        model,
        idx,
        all_rows,
        row_statistics,
        layer,
    )
    torch.testing.assert_close(statistics, expected, rtol=1e-10, atol=1e-12)


# ---- windows ----


def test_windows_by_layer(shards, call, tmp_path, pictures, capsys):
    """With a pattern, and a limit of --window, which the table and the picture name."""
    model = small_model("softmax.py --window=4 --window_pattern=SL", f"--data_dir={shards}")
    run = saved_run(tmp_path / "run", model.float())
    call(attention_maps, run, *FEW)
    call(attention_maps, run, *FEW, "--window=9")
    by_pattern, limited = read(run)
    assert by_pattern["window"] is None
    assert limited["window"] == 9
    row = by_pattern["parts"]["16 tokens"]
    limited_row = limited["parts"]["16 tokens"]
    assert row["heads"] != limited_row["heads"]
    _, limited_table = capsys.readouterr().out.split("layer -1, '16 tokens'")[1:]
    assert limited_table.startswith(", rope none, window 9; means")
    figure = AttentionMaps(window=9).draw_run(run, limited)
    assert "layer 1, rope none, window 9" in figure.get_suptitle()


@pytest.mark.parametrize("settings, windows", HEAD_WINDOWS)
def test_what_a_window_hides_does_not_count(settings, windows, shards, call, tmp_path, request):
    if settings != "softmax.py":  # whose picture is drawn
        request.getfixturevalue("pictures")
    model = small_model(settings, f"--data_dir={shards}").float()
    run = saved_run(tmp_path / "run", model)
    call(attention_maps, run, *FEW)
    (result,) = read(run)
    ids = validation_ids(shards)
    layers = evaluation.layer_attention_weights(model, ids, slice(None))
    A = layers[1].double().numpy()  # [windows, heads, queries, keys]
    visible = visible_keys(windows)
    check_rows(result["parts"]["16 tokens"]["heads"], A, visible)
    if settings == "softmax.py":
        assert not_blank(run / "attention_maps.png")
    # what a head's window hides is white, as what comes after
    first_ids = ids[0].tolist()
    first_maps = layers[1][0]
    keys = torch.from_numpy(visible.sum(-1))
    figure = attention_maps.plot_maps(model.config, "", first_ids, first_maps, keys)
    for head in range(2):
        (image,) = figure.axes[head].images
        drawn = image.get_array().count()
        assert drawn == visible[head].sum()


def check_rows(measured, A, visible):
    """The means over the rows of a layer's weights A [windows, heads, queries, keys]."""
    alive = A.any(-1)
    alive[..., 0] = False  # the first query has no choice
    total = np.where(alive, A.sum(-1), 1)
    shares = A / total[..., None]
    logs = np.log(np.where(shares > 0, shares, 1))
    entropy = -(shares * logs).sum(-1)
    n = visible.sum(-1)
    largest = np.log(np.maximum(n, 2))
    entropy_share = np.where(n > 1, entropy / largest, 1)
    expected = {
        "first_token": shares[..., 0],
        "entropy_share": entropy_share,
        "zeros": 1 - (A != 0).sum(-1) / n,
    }
    for name, values in expected.items():
        for head in range(2):
            rows = alive[:, head]
            mean = values[:, head][rows].mean()
            assert measured[name][head] == pytest.approx(mean, rel=1e-5, abs=1e-9)


# ---- the command ----


def test_several_runs_are_compared(shards, call, tmp_path, pictures):
    """A variant with dead rows, and a variant with negative weights."""
    relu = tmp_path / "relu_wortsman"
    inverse = tmp_path / "softmax_inverse"
    data = f"--data_dir={shards}"
    saved_run(relu, small_model("relu_wortsman.py", data).float())
    saved_run(inverse, small_model("ablations/softmax_inverse.py", data).float())
    call(attention_maps, relu, inverse, "--layer=0", "--lengths=16,32", "--tokens=64")
    assert pictures == [
        relu / "attention_maps.png",
        inverse / "attention_maps.png",
    ]
    (of_relu,) = read(relu)
    lengths = [chunk["length"] for chunk in of_relu["parts"].values()]
    assert lengths == [len(TEXT), 16, 32]
    heads = of_relu["parts"]["32 tokens"]["heads"]
    assert min(heads["dead"]) > 0
    (of_inverse,) = read(inverse)
    heads = of_inverse["parts"]["32 tokens"]["heads"]
    assert heads["sum"] == pytest.approx([1, 1])


def test_runs_of_other_training_lengths_have_the_same_lengths(
    shards, call, tmp_path, pictures, capsys
):
    runs = []
    for length in (8, 16):
        model = small_model("softmax.py", f"--data_dir={shards}", f"--block_size={length}").float()
        runs.append(saved_run(tmp_path / f"run{length}", model))
    call(attention_maps, *runs, "--tokens=128", "--text=")
    for run in runs:
        (result,) = read(run)
        lengths = [part["length"] for part in result["parts"].values()]
        assert lengths == [8, 16, 64, 128]
    _, *tables = capsys.readouterr().out.split("layer -1, '")
    for table, length in zip(tables, (8, 16, 64, 128), strict=True):
        assert table.startswith(f"{length} tokens'")
        for trained_length in (8, 16):
            assert re.search(rf"^block_size {trained_length} +{length} ", table, re.M)


def test_a_text_alone_needs_no_data(shards, call, tmp_path, pictures):
    model = small_model("softmax.py", f"--data_dir={shards}").float()
    run = saved_run(tmp_path / "run", model)
    call(attention_maps, run, "--tokens=0", "--data_dir=nowhere")
    (result,) = read(run)
    assert result["tokens"] is None
    assert result["layer"] == 1


def test_refuses_before_anything_is_written(trained, call, refused):
    refused(call, attention_maps, trained, "--layer=2", says="layers 0 to 1")
    refused(call, attention_maps, trained, "--text=a", says="1 tokens; a map takes 2 to 2048")
    refused(call, attention_maps, trained, f"--text={'a' * 2049}", says="--text has 2049 tokens")
    refused(call, attention_maps, trained, "--lengths=1", says="--lengths must be at least 2")
    nothing = ("--text=", "--tokens=0")
    refused(call, attention_maps, trained, *nothing, says="leave nothing to measure")
    assert not list(trained.glob("attention_*"))


def test_a_text_beyond_learned_positions_is_refused_at_once(shards, call, tmp_path, refused):
    model = small_model("softmax.py", "--positions=learned", f"--data_dir={shards}").float()
    run = saved_run(tmp_path / "run", model)
    refused(call, attention_maps, run, says=["the text has 185 tokens", "--text ''"])
