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
from scripts.common.runs import load_run
from tests.helpers import not_blank, saved_run, small_model

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


def validation_ids(shards, length, count):
    """The first windows of the validation tokens, [count, length]."""
    tokens = read_shard(shards / "text_val_000000.bin")
    first = tokens[: count * length].astype(np.int64)
    return torch.from_numpy(first).view(count, length)


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


# ---- weights, by distance ----


def test_groups_of_distances():
    assert attention_maps.distances(4) == [0, 1, 3]
    assert attention_maps.distances(6) == [0, 1, 3, 5]


def test_counts_of_a_window():
    """A negative weight is neither positive nor dead."""
    A = torch.zeros(2, 4, 4)
    A[0, 0, 0] = 0.5  # query 2 of this head has no weight
    A[0, 1, 0] = 0.5
    A[0, 3, 1] = 0.5
    A[0, 3, 3] = 0.5
    A[1, 1, 0] = -1e-40  # query 0 of this head has no weight, and key 1 none from a later query
    A[1, 2, 2] = -0.5
    A[1, 3, 3] = 0.5
    (pairs,) = attention_maps.visible_pairs(4, [[None, None]])
    shares = attention_maps.shares(A.sign(), pairs)
    first_head, second_head = shares["positive"].tolist()
    # distance 0: 2 of 4; 1: 1 of 3; 2 and 3: 1 of 3. Dead: one query of 4, no key of 2.
    assert first_head == pytest.approx([2 / 4, 1 / 3, 1 / 3])
    assert second_head == [1 / 4, 0, 0]
    assert shares["dead_rows"].tolist() == [1 / 4, 1 / 4]
    assert shares["dead_keys"].tolist() == [0, 1 / 2]


def test_windows_by_layer(shards, call, tmp_path, pictures):
    """With a pattern, and a limit of --window."""
    model = small_model("softmax.py --window=4 --window_pattern=SL", f"--data_dir={shards}")
    run = saved_run(tmp_path / "run", model.float())
    call(attention_maps, run, *FEW)
    call(attention_maps, run, *FEW, "--window=9")
    by_pattern, limited = read(run)
    assert by_pattern["head_windows"] == [[4, 4], [None, None]]
    assert limited["head_windows"] == [[4, 4], [9, 9]]


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
    call(attention_maps, run, *FEW, "--distances")
    (result,) = read(run)
    assert result["head_windows"] == [list(windows)] * 2
    ids = validation_ids(shards, 16, 2)
    layers = evaluation.layer_attention_weights(model, ids, slice(None))
    A = torch.stack(layers).double().numpy()  # [layers, windows, heads, queries, keys]
    visible = visible_keys(windows)
    check_rows(result["parts"]["16 tokens"]["heads"], A[1], visible)
    check_distances(result["parts"]["by distance"]["positive"], A, visible)
    check_means(mean_shares(result), A, visible, has_dead_rows=settings.startswith("relu"))
    if settings == "softmax.py":
        assert not_blank(run / "weights_by_distance.png")
        assert not_blank(run / "attention_maps.png")
    # what a head's window hides is white, as what comes after
    first_ids = ids[0].tolist()
    first_maps = layers[1][0]
    keys = torch.from_numpy(visible.sum(-1))
    figure = attention_maps.plot_maps(load_run(run), 1, first_ids, first_maps, keys)
    for head in range(2):
        (image,) = figure.axes[head].images
        drawn = image.get_array().count()
        assert drawn == visible[head].sum()


def visible_keys(windows):
    """Which of 16 keys each of 16 queries sees, [heads, 16, 16], for the window of each head."""
    i, j = np.indices((16, 16))
    heads = []
    for window in windows:
        first = i - (window or 16) + 1
        is_visible = (first <= j) & (j <= i)
        heads.append(is_visible)
    return np.stack(heads)


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
    first_token = shares[..., 0]
    for head in range(2):
        rows = alive[:, head]
        expected = entropy_share[:, head][rows].mean()
        assert measured["entropy_share"][head] == pytest.approx(expected, rel=1e-5)
        has_no_window = visible[head, -1].all()
        if has_no_window:
            expected = first_token[:, head][rows].mean()
            assert measured["first_token"][head] == pytest.approx(expected, rel=1e-5)


def check_distances(measured, A, visible):
    """The shares of positive weights by distance, from A [layers, windows, heads, 16, 16]."""
    i, j = np.indices((16, 16))
    group = np.frexp(abs(i - j))[1]  # 0, 1, 2 to 3, 4 to 7, 8 to 15 keys back
    for layer in range(2):
        for head in range(2):
            positive = A[layer, :, head] > 0
            expected = []
            for number in range(5):
                pairs = visible[head] & (group == number)
                share = positive[:, pairs].mean() if pairs.any() else None
                expected.append(share)
            assert measured[layer][head] == pytest.approx(expected)


def check_means(measured, A, visible, has_dead_rows):
    """The means over all layers and heads, from A [layers, windows, heads, 16, 16]."""
    positive = A > 0
    dead_rows = ~A.any(-1)
    by_later_queries = np.tril(A, -1)
    dead_keys = ~by_later_queries[..., :8].any(-2)
    assert measured["all"] == pytest.approx(positive[..., visible].mean())
    assert measured["dead rows"] == pytest.approx(dead_rows.mean())
    assert measured["dead keys"] == pytest.approx(dead_keys.mean())
    assert (measured["dead rows"] > 0) == has_dead_rows


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


def test_a_text_alone_needs_no_data(shards, call, tmp_path, pictures):
    model = small_model("softmax.py", f"--data_dir={shards}").float()
    run = saved_run(tmp_path / "run", model)
    call(attention_maps, run, "--tokens=0", "--data_dir=nowhere")
    (result,) = read(run)
    assert result["tokens"] == 0
    assert result["layer"] == 1


def test_refuses_before_anything_is_written(trained, call, refused):
    refused(call, attention_maps, trained, "--layer=2", says="layers 0 to 1")
    refused(call, attention_maps, trained, "--text=a", says="1 tokens")
    refused(call, attention_maps, trained, "--lengths=1", says="at least 2")
    assert not list(trained.glob("attention_*"))


def test_a_text_beyond_learned_positions_is_refused_at_once(shards, call, tmp_path, refused):
    model = small_model("softmax.py", "--positions=learned", f"--data_dir={shards}").float()
    run = saved_run(tmp_path / "run", model)
    refused(call, attention_maps, run, says=["the text has 185 tokens", "--text ''"])
