"""The curves of runs while they train."""

import numpy as np
import pytest

from scripts import curves
from tests.helpers import not_blank
from tests.runs import metrics


def test_the_curves_of_a_run_in_training(run, call):
    losses, validated = (metrics(run, key) for key in ("loss", "val_loss"))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    call(curves, run, "--smooth=3")
    assert not_blank(run / "curves.png")
    smoothed = np.convolve([*losses.values()], [1 / 3] * 3, "valid")
    for smooth, means in ((1, losses.values()), (3, smoothed)):
        figure = curves.plot({"run": curves.read_steps(run)}, curves.Curves(smooth=smooth))
        loss, validation = (axes.lines[-1] for axes in figure.axes[:2])
        skipped = smooth // 2
        assert list(loss.get_xdata()) == list(losses)[skipped : len(losses) - skipped]
        assert loss.get_ydata() == pytest.approx(list(means))
        assert list(validation.get_ydata()) == list(validated.values())
