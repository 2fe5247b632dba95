"""Where weights are positive, against loops over queries and keys."""

import json

import numpy as np
import pytest
import torch

from data.shards import read_shard
from evaluation import attention_weights
from model import GPT
from runtime import checkpoint
from scripts import sparsity
from tests.helpers import not_blank, saved_run, small_config


def test_counts_of_a_window():
    A = torch.zeros(1, 4, 4)
    for query, key in ((0, 0), (1, 0), (3, 3), (3, 1)):  # query 2 has none
        A[0, query, key] = 0.5
    # distance 0: 2 of 4; 1: 1 of 3; 2 and 3: 1 of 3. Dead: one query of 4, no key of 2.
    shares = sparsity.counts(sparsity.signs(A), sparsity.visible_pairs(4, [None]))
    assert shares[0].tolist() == pytest.approx([2 / 4, 1 / 3, 1 / 3, 1 / 4, 0])
    assert sparsity.distances(4) == [0, 1, 3] and sparsity.distances(6) == [0, 1, 3, 5]


def test_negative_weights_are_neither_positive_nor_dead():
    A = torch.zeros(1, 4, 4)
    A[0, 1, 0], A[0, 2, 2], A[0, 3, 3] = -1e-40, -0.5, 0.5  # query 0 has none, no later one key 1
    shares = sparsity.counts(sparsity.signs(A), sparsity.visible_pairs(4, [None]))
    assert shares[0].tolist() == [1 / 4, 0, 0, 1 / 4, 1 / 2]


@pytest.mark.parametrize(
    "settings, far",
    [
        ("softmax.py --window=1", "no pairs"),
        ("hybrid.py --local_window=6", "1.0000"),
        ("ablations/softmax_inverse.py --window=11", "0.0000"),
    ],
)
def test_pairs_beyond_a_window_do_not_count(settings, far, shards, call, tmp_path, capsys):
    model = GPT(small_config(settings, f"--data_dir={shards}"))
    run = saved_run(tmp_path / "run", model)
    call(sparsity, run, "--tokens", "32")
    (result,) = json.loads((run / "sparsity.json").read_text(), parse_constant=pytest.fail)
    parts = [part for part, _ in model.attention_layers()[0].parts()]
    windows = [part.window for part in parts for _ in range(part.n_head)]
    assert result["head_windows"] == windows
    tokens = read_shard(shards / "text_val_000000.bin")[:32].astype(np.int64)
    positive, dead_rows, dead_keys = {}, [], []
    for ids in torch.from_numpy(tokens).view(2, 1, 16):
        for layer, A in enumerate(attention_weights(model, ids, slice(None))):
            for head, window in enumerate(windows):
                rows = A[0, head].tolist()
                dead_rows += [not any(row) for row in rows]
                dead_keys += [not any(row[j] for row in rows[j + 1 :]) for j in range(8)]
                for i, row in enumerate(rows):
                    for j in range(0 if window is None else max(0, i + 1 - window), i + 1):
                        group = positive.setdefault((layer, head, (i - j).bit_length()), [])
                        group.append(row[j] > 0)
    for layer, heads in enumerate(result["positive"]):
        for head, shares in enumerate(heads):
            groups = [positive.get((layer, head, group)) for group in range(5)]
            assert shares == pytest.approx([group and np.mean(group) for group in groups])
    shares = sparsity.mean_shares(result)
    assert shares["all"] == pytest.approx(np.mean(sum(positive.values(), [])))
    assert shares["dead rows"] == np.mean(dead_rows) == 0
    assert shares["dead keys"] == np.mean(dead_keys) == (windows == [1, 1])
    printed = capsys.readouterr().out.splitlines()
    (row,) = (line for line in printed if line.startswith(model.config.variant_name))
    assert [cell.strip() for cell in row.split("  ") if cell][2] == far
    assert not_blank(run / "sparsity.png")


def test_sparsity_of_a_run(train, call, shards, monkeypatch, capsys):
    runs = [train(name, f"configs/{name}.py") for name in ("relu_li", "softmax")]
    call(sparsity, *runs, "--tokens", "64", "--rope", "none")
    (result,) = json.loads((runs[0] / "sparsity.json").read_text())
    assert (result["length"], result["tokens"], result["distances"]) == (16, 64, [0, 1, 3, 7, 15])
    model = GPT(checkpoint.read_config(runs[0])).eval()
    checkpoint.load_weights(model, runs[0])
    tokens = read_shard(shards / "text_val_000000.bin")[:64]
    x = torch.from_numpy(tokens.astype(np.int64))
    near, far, dead = [], [], []
    for window in x.view(4, 16):
        for A in attention_weights(model, window[None], slice(None)):
            for i in range(16):
                dead += [not (A[0, head, i] > 0).any() for head in range(2)]
                for j in range(i + 1):
                    (near if i == j else far if i - j >= 8 else []).extend(A[0, :, i, j] > 0)
    shares = sparsity.mean_shares(result)
    for name, values in (("near", near), ("far", far), ("dead rows", dead)):
        assert shares[name] == pytest.approx(sum(map(float, values)) / len(values)), name
    (softmax,) = json.loads((runs[1] / "sparsity.json").read_text())
    assert sparsity.mean_shares(softmax) == pytest.approx(
        {"near": 1, "far": 1, "all": 1, "dead rows": 0, "dead keys": 0}
    )
    assert "relu_li" in capsys.readouterr().out
    assert not_blank(runs[0].parent / "sparsity_relu_li_softmax.png")
    monkeypatch.setattr(sparsity, "counts", None)  # nothing is measured twice
    call(sparsity, runs[0], "--tokens", "64", "--rope", "none")
    with pytest.raises(SystemExit) as stop:
        call(sparsity, runs[0], "--length", "1")
    assert stop.value.code == 2 and "at least 2" in capsys.readouterr().err
