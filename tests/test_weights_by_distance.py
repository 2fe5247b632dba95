"""The share of positive weights by distance, and of rows and keys without any."""

import json

import numpy as np
import pytest
import torch

import evaluation
from scripts import weights_by_distance
from scripts.common.groups import distances
from scripts.weights_by_distance import mean_shares
from tests.helpers import (
    HEAD_WINDOWS,
    not_blank,
    saved_run,
    small_model,
    validation_ids,
    visible_keys,
)


def test_groups_of_distances():
    assert distances(4) == [0, 1, 3]
    assert distances(6) == [0, 1, 3, 5]


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
    (pairs,) = weights_by_distance.visible_pairs(4, [[None, None]])
    shares = weights_by_distance.shares(A.sign(), pairs)
    first_head, second_head = shares["positive"].tolist()
    # distance 0: 2 of 4; 1: 1 of 3; 2 and 3: 1 of 3. Dead: one query of 4, no key of 2.
    assert first_head == pytest.approx([2 / 4, 1 / 3, 1 / 3])
    assert second_head == [1 / 4, 0, 0]
    assert shares["dead_rows"].tolist() == [1 / 4, 1 / 4]
    assert shares["dead_keys"].tolist() == [0, 1 / 2]


@pytest.mark.parametrize("settings, windows", HEAD_WINDOWS)
def test_what_a_window_hides_does_not_count(settings, windows, shards, call, tmp_path, request):
    if settings != "softmax.py":  # whose picture is drawn
        request.getfixturevalue("pictures")
    model = small_model(settings, f"--data_dir={shards}").float()
    run = saved_run(tmp_path / "run", model)
    call(weights_by_distance, run, "--tokens=32", "--rope=none")
    text = (run / "weights_by_distance.json").read_text()
    (result,) = json.loads(text, parse_constant=pytest.fail)  # JSON has no NaN
    assert result["head_windows"] == [list(windows)] * 2
    ids = validation_ids(shards)
    layers = evaluation.layer_attention_weights(model, ids, slice(None))
    A = torch.stack(layers).double().numpy()  # [layers, windows, heads, queries, keys]
    visible = visible_keys(windows)
    (part,) = result["parts"].values()
    check_distances(part["positive"], A, visible)
    check_means(mean_shares(result), A, visible, has_dead_rows=settings.startswith("relu"))
    if settings == "softmax.py":
        assert not_blank(run / "weights_by_distance.png")


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
