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
from tests.helpers import not_blank


def test_counts_of_a_window():
    positive = torch.zeros(1, 4, 4, dtype=torch.bool)
    for query, key in ((0, 0), (1, 0), (3, 3), (3, 1)):  # query 2 has none
        positive[0, query, key] = True
    # distance 0: 2 of 4; 1: 1 of 3; 2 and 3: 1 of 3. Dead: one query of 4, no key of 2.
    assert sparsity.counts(positive)[0].tolist() == pytest.approx([2 / 4, 1 / 3, 1 / 3, 1 / 4, 0])
    assert sparsity.distances(4) == [0, 1, 3] and sparsity.distances(6) == [0, 1, 3, 5]


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
