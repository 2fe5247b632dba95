"""The optimizers' parameters, and the learning rate over a run."""

import pytest

import optim
from config import Config, load_config
from layers.build import build_model
from tests.helpers import SMALL


def test_schedules():
    base = dict(learning_rate=1.0, warmup_iters=10, max_iters=110)
    cosine = Config(**base, min_lr=0.1)
    assert optim.learning_rate(0, cosine) == pytest.approx(0.1)
    assert optim.learning_rate(9, cosine) == optim.learning_rate(10, cosine) == 1.0
    assert optim.learning_rate(60, cosine) == pytest.approx(0.55)
    assert optim.learning_rate(110, cosine) == pytest.approx(0.1)
    constant = Config(**base, schedule="constant")
    assert optim.learning_rate(109, constant) == 1.0
    trapezoidal = Config(**base, min_lr=0.1, schedule="trapezoidal", cooldown_iters=50)
    assert optim.learning_rate(60, trapezoidal) == 1.0
    assert optim.learning_rate(85, trapezoidal) == pytest.approx(0.55)
    assert optim.learning_rate(110, trapezoidal) == pytest.approx(0.1)


@pytest.mark.parametrize("projections", ["linear", "tpa"])
def test_muon_takes_the_trunks_matrices_only(projections):
    config = load_config([*SMALL, "--optimizer=muon", f"--projections={projections}"])
    model = build_model(config)
    muon, adamw = optim.build_optimizers(model, config)
    matrices = [p for group in muon.param_groups for p in group["params"]]
    assert len(matrices) == 4 * config.n_layer
    assert all(p.dim() == 2 and p is not model.wte.weight for p in matrices)
    assert {group["weight_decay"] for group in adamw.param_groups} == {config.weight_decay, 0.0}
