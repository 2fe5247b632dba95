"""Attention maps, the numbers of the attention sink, and where weights are positive."""

import json
import math

import numpy as np
import pytest
import torch

import evaluation
from data.shards import read_shard
from scripts import attention_maps
from scripts.attention_maps import TEXT, group_sums, mean_shares, row_statistics, summary
from scripts.common.runner import load_run
from tests.helpers import not_blank, saved_run, small_model


def read(run):
    """The run's measurements; what JSON has not, such as NaN, is an error."""
    text = (run / "attention_maps.json").read_text()
    return json.loads(text, parse_constant=pytest.fail)


def validation_ids(shards, length, count):
    """The first windows of the validation tokens, [count, length]."""
    tokens = read_shard(shards / "text_val_000000.bin")[: count * length].astype(np.int64)
    return torch.from_numpy(tokens).view(count, length)


def test_rows_that_are_no_distributions():
    keys = torch.arange(1, 6)[None]  # that the rows of a head without a window see
    A = torch.tensor([
        [1, 0, 0, 0, 0],
        [0.1, -0.3, 0, 0, 0],  # |A| makes 1/4, 3/4
        [0, 0, 0, 0, 0],  # dead
        [2, 2, 2, 2, 0],  # equal, of sum 8
        [0, 0, -3, 0, 0],  # all on one key
    ])[None]  # fmt: skip
    result = summary(group_sums(row_statistics(A).double(), keys), 5)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert result["keys"] == [2, 4, 5]
    groups = result["groups"]
    assert groups["dead"] == [[0, 0.5, 0]]
    wanted = {
        "first_token": [0.25, 0.25, 0],
        "entropy": [entropy, math.log(4), 0],
        "entropy_share": [entropy / math.log(2), 1, 0],
        "zeros": [0, 0, 0.8],
        "sum": [0.4, 8, 3],
    }
    for name, values in wanted.items():
        assert groups[name] == [pytest.approx(values, rel=1e-6)]
        assert result["heads"][name] == [pytest.approx(sum(values) / 3, rel=1e-6)]
    assert result["heads"]["dead"] == [0.25]
    zeros = row_statistics(torch.zeros(1, 4, 4)).double()
    nothing = summary(group_sums(zeros, keys[:, :4]), 4)
    assert nothing["groups"]["entropy"] == [[None, None]] and nothing["heads"]["sum"] == [None]


def test_blocks_of_rows_make_the_same_weights(monkeypatch):
    model = small_model("lssar_p15.py")
    idx = torch.randint(257, (2, 24))
    (whole,) = evaluation.attention_weights(model, idx, slice(None), layers=slice(1, 2))
    monkeypatch.setattr(evaluation, "BLOCK_QUERIES", 5)
    (numbers,) = evaluation.attention_weights(model, idx, slice(None), row_statistics, slice(1, 2))
    torch.testing.assert_close(numbers, row_statistics(whole), rtol=1e-10, atol=1e-12)


# ---- weights, by distance ----


def test_counts_of_a_window():
    """A negative weight is neither positive nor dead."""
    A = torch.zeros(2, 4, 4)
    for query, key in ((0, 0), (1, 0), (3, 3), (3, 1)):  # query 2 has none
        A[0, query, key] = 0.5
    A[1, 1, 0], A[1, 2, 2], A[1, 3, 3] = -1e-40, -0.5, 0.5  # query 0 has none, no later one key 1
    shares = attention_maps.shares(A.sign(), attention_maps.visible_pairs(4, [[None, None]])[0])
    # distance 0: 2 of 4; 1: 1 of 3; 2 and 3: 1 of 3. Dead: one query of 4, no key of 2.
    assert shares[0].tolist() == pytest.approx([2 / 4, 1 / 3, 1 / 3, 1 / 4, 0])
    assert shares[1].tolist() == [1 / 4, 0, 0, 1 / 4, 1 / 2]
    assert attention_maps.distances(4) == [0, 1, 3] and attention_maps.distances(6) == [0, 1, 3, 5]


@pytest.mark.parametrize(
    "settings, windows",
    [
        ("softmax.py", (None, None)),
        ("softmax.py --window=1", (1, 1)),
        ("hybrid.py --local_window=1 --window=6", (6, 1)),
        ("relu_li.py", (None, None)),
    ],
)
def test_what_a_window_hides_does_not_count(settings, windows, shards, call, tmp_path, request):
    if settings != "softmax.py":  # whose pictures are drawn
        request.getfixturevalue("pictures")
    model = small_model(settings, f"--data_dir={shards}").float()
    run = saved_run(tmp_path / "run", model)
    more = ("--lengths", "16", "--tokens", "32", "--text", TEXT[:20], "--rope", "none")
    call(attention_maps, run, *more, "--distances")
    (result,) = read(run)
    assert result["head_windows"] == [list(windows)] * 2
    limits = [window or 16 for window in windows]
    ids = validation_ids(shards, 16, 2)
    layers = evaluation.attention_weights(model, ids, slice(None))
    A = torch.stack(layers).double().numpy()  # [layers, windows, heads, queries, keys]
    i, j = np.indices((16, 16))
    seen = np.stack([(j <= i) & (j > i - limit) for limit in limits])
    # the entropies of the last layer, as shares of log n
    used, n = A[1].any(-1) & (i[:, 0] > 0), seen.sum(-1)
    rows = A[1] / np.where(used, A[1].sum(-1), 1)[..., None]
    entropies = -(rows * np.log(np.where(rows > 0, rows, 1))).sum(-1)
    entropies = np.where(n > 1, entropies / np.log(np.maximum(n, 2)), 1)
    by_keys, by_distance = result["parts"]["16 tokens"], result["parts"]["by distance"]
    for name, numbers in (("entropy_share", entropies), ("first_token", rows[..., 0])):
        if name == "entropy_share" or windows == (None, None):
            expected = [numbers[:, head][used[:, head]].mean() for head in range(2)]
            assert by_keys["heads"][name] == pytest.approx(expected, rel=1e-5)
    group = np.frexp(abs(i - j))[1]  # 0, 1, 2 to 3, 4 to 7, 8 to 15 keys back
    for layer, heads in enumerate(by_distance["positive"]):
        for head, shares in enumerate(heads):
            pairs = [seen[head] & (group == number) for number in range(5)]
            positive = A[layer, :, head] > 0
            expected = [positive[:, one].mean() if one.any() else None for one in pairs]
            assert shares == pytest.approx(expected)
    means = mean_shares(result)
    assert means["all"] == pytest.approx((A > 0)[..., seen].mean())
    assert means["dead rows"] == pytest.approx((~A.any(-1)).mean())
    assert means["dead keys"] == pytest.approx((~np.tril(A, -1)[..., :8].any(-2)).mean())
    assert (means["dead rows"] > 0) == settings.startswith("relu")
    if settings == "softmax.py":
        for name in ("weights_by_distance", "attention_maps"):
            assert not_blank(run / f"{name}.png")
    # what a head's window hides is white, as what comes after
    panels = attention_maps.plot_maps(load_run(run), 1, ids[0].tolist(), layers[1][0])
    drawn = [axes.images[0].get_array().count() for axes in panels.axes[:2]]
    assert drawn == [sum(min(i + 1, window) for i in range(16)) for window in limits]


# ---- the command ----


def test_several_runs_are_compared(shards, call, tmp_path, pictures):
    """A variant with dead rows, and a variant with negative weights."""
    runs = [tmp_path / "relu_wortsman", tmp_path / "softmax_inverse"]
    for run, case in zip(runs, ("relu_wortsman.py", "ablations/softmax_inverse.py"), strict=True):
        saved_run(run, small_model(case, f"--data_dir={shards}").float())
    call(attention_maps, *runs, "--layer=0", "--lengths=16,32", "--tokens=64")
    assert pictures == [run / "attention_maps.png" for run in runs]
    (relu,), (inverse,) = map(read, runs)
    assert [part["length"] for part in relu["parts"].values()] == [len(TEXT), 16, 32]
    assert min(relu["parts"]["32 tokens"]["heads"]["dead"]) > 0
    assert inverse["parts"]["32 tokens"]["heads"]["sum"] == pytest.approx([1, 1])
    call(attention_maps, run, "--tokens=0", "--data_dir=nowhere")
    assert (read(run)[-1]["tokens"], read(run)[-1]["layer"]) == (0, 1)


def test_refuses_before_anything_is_written(trained, call, refused):
    for argument, message in (
        ("--layer=2", "layers 0 to 1"), ("--text=a", "1 tokens"), ("--lengths=1", "at least 2"),
    ):  # fmt: skip
        refused(call, attention_maps, trained, argument, says=message)
    assert not list(trained.glob("attention_*"))
