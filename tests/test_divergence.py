"""A run that diverges ends, with its last good checkpoint untouched."""

import math

import pytest
import torch

import train as train_module


def test_what_is_not_finite_stops_the_run_and_is_not_saved(train, capsys, monkeypatch):
    folder = train("run", "--max_iters=3")
    before = {path.name: path.read_bytes() for path in folder.glob("*.pt")}
    monkeypatch.setattr(train_module, "learning_rate", lambda step, config: 1e300)
    for interval, where in ((3, "step 5: loss"), (1, "step 4: its update")):
        with pytest.raises(SystemExit) as stop:
            train("run", "--resume", "--max_iters=6", f"--checkpoint_interval={interval}")
        message = capsys.readouterr().err
        assert stop.value.code == 1
        for part in (where, "is good"):
            assert part in message
        assert {path.name: path.read_bytes() for path in folder.glob("*.pt")} == before


def test_gradients_that_are_not_finite_at_any_scale_are_no_overflow():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.ones(()))
    assert train_module.is_finite_step(1.0, math.inf, scaler)
    assert not train_module.is_finite_step(math.nan, 1.0, scaler)
    overflows = 0
    while train_module.is_finite_step(1.0, math.nan, scaler):
        scaler.update(scaler.get_scale() * 0.5)
        overflows += 1
    assert 20 < overflows < 40
    plain = torch.amp.GradScaler("cpu", enabled=False)
    assert train_module.is_finite_step(1.0, 1.0, plain)
    assert not train_module.is_finite_step(1.0, math.inf, plain)
