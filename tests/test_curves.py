"""The curves of runs while they train."""

import csv
import json

import pytest

from scripts import curves
from tests.helpers import not_blank
from tests.runs import metrics


def test_the_numbers_and_the_picture_of_a_run(run, call, capsys):
    logged = {key: metrics(run, key) for key in ("loss", "val_loss", "lr", "grad_norm", "ms")}
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')  # a run in training
    call(curves, run, "--x=tokens", "--smooth=3")
    assert not_blank(run / "curves.png") and "curves.csv" in capsys.readouterr().out
    with open(run / "curves.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(7))
    assert [int(row["tokens"]) for row in rows] == [1024 * step for step in range(7)]
    for key in ("loss", "val_loss", "lr", "grad_norm"):
        assert {int(row["step"]): float(row[key]) for row in rows if row[key]} == logged[key]
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds[-1] == pytest.approx(sum(logged["ms"].values()) / 1000)


def test_tokens_of_a_fine_tuned_run_are_those_of_its_examples(run, call):
    """Its steps have fewer than total_batch_size, and the last of an epoch has fewer still."""
    lines = []
    for step, tokens in ((1, 300), (2, 200), (3, 77)):
        seconds = 0.1 * step
        lines.append({"step": step, "loss": 1.0, "lr": 1e-5, "grad_norm": 1.0,
                      "ms": 1000 * seconds, "tokens_per_s": tokens / seconds})  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "squad.json").write_text("{}")
    assert [row["tokens"] for row in curves.read_steps(run)] == [300, 500, 577]
