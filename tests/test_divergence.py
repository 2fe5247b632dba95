"""A run that diverges ends, with its last good checkpoint untouched."""

import pytest

import train as train_module
from runtime import divergence


def test_what_is_not_finite_stops_the_run_and_is_not_saved(train, capsys, monkeypatch):
    folder = train("run", "--max_iters=3")
    before = {path.name: path.read_bytes() for path in folder.glob("*.pt")}
    for module in (train_module, divergence):
        monkeypatch.setattr(module, "learning_rate", lambda step, config: 1e300)
    for interval, where in ((3, "step 5: loss"), (1, "step 4: its update")):
        with pytest.raises(SystemExit) as stop:
            train("run", "--resume", "--max_iters=6", f"--checkpoint_interval={interval}")
        message = capsys.readouterr().err
        assert stop.value.code == 1
        for part in (where, ".bin at token", "is good", "lower learning_rate (now 1.00e+300)"):
            assert part in message
        assert {path.name: path.read_bytes() for path in folder.glob("*.pt")} == before
