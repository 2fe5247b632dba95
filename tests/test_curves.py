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
    logged = {key: metrics(run, key) for key in ("loss", "val_loss", "lr", "grad_norm")}
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    call(curves, run, "--smooth=3")
    assert not_blank(run / "curves.png")

    for smooth in (1, 3):
        figure = curves.plot({"run": curves.read_steps(run)}, curves.Curves(smooth=smooth))
        for panel, (key, values) in zip(figure.axes, logged.items(), strict=True):
            steps = list(values)
            expected = list(values.values())
            if smooth == 3 and key in ("loss", "grad_norm"):
                steps = steps[1:-1]
                expected = np.convolve(expected, [1 / 3] * 3, "valid")
            curve = panel.lines[-1]
            assert list(curve.get_xdata()) == steps
            assert curve.get_ydata() == pytest.approx(expected)
