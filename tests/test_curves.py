"""The curves of runs while they train."""

import json

import numpy as np
import pytest

from scripts import curves
from tests.helpers import not_blank
from tests.runs import metrics


def test_the_curves_of_a_run_in_training(run, call):
    losses, validated, ms = (metrics(run, key) for key in ("loss", "val_loss", "ms"))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    call(curves, run, "--x=tokens", "--smooth=3")
    assert not_blank(run / "curves.png")
    for x, places in (
        ("steps", list(range(1, 7))),
        ("tokens", [1024 * step for step in range(1, 7)]),
        ("hours", np.cumsum(list(ms.values())) / 3.6e6),
    ):
        figure = curves.plot({"run": curves.read_steps(run)}, curves.Curves(x=x))
        loss, validation, *_ = (axes.lines[0] for axes in figure.axes)
        np.testing.assert_allclose(loss.get_xdata(), places, rtol=1e-9)
        assert list(loss.get_ydata()) == list(losses.values())
        assert list(validation.get_ydata()) == list(validated.values())


def test_tokens_of_a_fine_tuned_run_are_the_tokens_of_its_examples(run):
    lines = [{"step": 1, "ms": 100.0, "tokens_per_s": 3000.0}, {"step": 2, "val_loss": 1.0},
             {"step": 2, "ms": 700.0, "tokens_per_s": 110.0}]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [step["tokens"] for step in curves.read_steps(run)] == [300, 300, 377]
    (run / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="no step yet"):
        curves.read_steps(run)
