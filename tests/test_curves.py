"""The curves of runs while they train."""

import subprocess
import sys

import numpy as np
import pytest

from scripts import curves
from tests.helpers import not_blank
from tests.runs import ROOT, metrics


def test_curves_are_drawn_without_torch(run):
    """Its import takes most of the seconds that a user waits for the picture."""
    code = f"""
import sys
from scripts import curves
sys.argv = ["curves", {str(run)!r}]
curves.main()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert not_blank(run / "curves.png")


def test_a_missing_run_is_refused_with_the_nearest_name(run, call, refused):
    missing = run.with_name(run.name + "x")
    refused(call, curves, missing, says=("does not exist", f"did you mean {run}?"))


def test_the_curves_of_a_run_in_training(run, call):
    losses = metrics(run, "loss")
    val_losses = metrics(run, "val_loss")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    call(curves, run, "--smooth=3")
    assert not_blank(run / "curves.png")

    steps = list(losses)
    means_of_3 = np.convolve(list(losses.values()), [1 / 3] * 3, "valid")
    expected = {
        1: (steps, list(losses.values())),
        3: (steps[1:-1], list(means_of_3)),
    }
    for smooth, (loss_steps, means) in expected.items():
        figure = curves.plot({"run": curves.read_steps(run)}, curves.Curves(smooth=smooth))
        loss_panel, val_loss_panel, *_ = figure.axes
        loss = loss_panel.lines[-1]
        assert list(loss.get_xdata()) == loss_steps
        assert loss.get_ydata() == pytest.approx(means)
        assert list(val_loss_panel.lines[-1].get_ydata()) == list(val_losses.values())
