"""The optimizers' parameters, and the learning rate over a run."""

import pytest
import torch

from config import Config, load_config
from layers.build import build_model
from optim import build_optimizers, learning_rate, set_learning_rate
from tests.helpers import SMALL

BASE = {"learning_rate": 1.0, "warmup_iters": 10, "max_iters": 110}


def test_cosine_schedule():
    config = Config(**BASE, min_lr=0.1)
    assert learning_rate(0, config) == pytest.approx(0.1)
    assert learning_rate(9, config) == 1.0
    assert learning_rate(10, config) == 1.0
    assert learning_rate(60, config) == pytest.approx(0.55)
    assert learning_rate(110, config) == pytest.approx(0.1)


def test_constant_schedule():
    config = Config(**BASE, schedule="constant")
    assert learning_rate(109, config) == 1.0


def test_trapezoidal_schedule():
    config = Config(**BASE, min_lr=0.1, schedule="trapezoidal", cooldown_iters=50)
    assert learning_rate(60, config) == 1.0
    assert learning_rate(85, config) == pytest.approx(0.55)
    assert learning_rate(110, config) == pytest.approx(0.1)


def test_a_rate_is_set_for_all_groups_times_their_lr_scale():
    """Also when it is set again."""
    p = torch.zeros(1)
    groups = [{"params": [p], "lr_scale": 10.0}, {"params": [p.clone()]}]
    first = torch.optim.SGD(groups, lr=1.0)
    second = torch.optim.SGD([p.clone()], lr=1.0)
    for lr in (0.5, 0.25, 0.25):
        set_learning_rate([first, second], lr)
        scaled, unscaled = first.param_groups
        assert scaled["lr"] == 10 * lr
        assert unscaled["lr"] == lr
        assert second.param_groups[0]["lr"] == lr


@pytest.mark.parametrize("projections", ["linear", "tpa"])
def test_muon_takes_the_trunks_matrices_only(projections):
    config = load_config([*SMALL, "--optimizer=muon", f"--projections={projections}"])
    model = build_model(config)
    muon, adamw = build_optimizers(model, config)
    (group,) = muon.param_groups
    matrices = group["params"]
    assert len(matrices) == 4 * config.n_layer
    for p in matrices:
        assert p.dim() == 2
        assert p is not model.wte.weight
    decayed, not_decayed = adamw.param_groups
    assert decayed["weight_decay"] == config.weight_decay
    assert not_decayed["weight_decay"] == 0.0
