"""The optimizers' parameters, and the learning rate over a run."""

import pytest
import torch

from config import Config
from layers.build import build_model
from optim import (
    Muon,
    build_optimizers,
    learning_rate,
    set_learning_rate,
)
from runtime.config_files import load_config
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


@pytest.mark.parametrize("projections", ["linear", "tpa"])
def test_muon_takes_the_trunks_matrices_only(projections):
    adam = ("--beta1=0.8", "--beta2=0.97", "--adam_eps=1e-7")
    config = load_config([*SMALL, "--optimizer=muon", f"--projections={projections}", *adam])
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
    assert group["weight_decay"] == config.weight_decay
    assert group["adjust_lr_fn"] == "match_rms_adamw"
    set_learning_rate([muon, adamw], 0.5)
    assert group["lr"] == 0.5
    for adamw_group in adamw.param_groups:
        assert adamw_group["lr"] == 0.5
        assert adamw_group["betas"] == (0.8, 0.97)
        assert adamw_group["eps"] == 1e-7


def test_muon_orthogonalises_in_float32_on_a_cpu():
    """Against Newton-Schulz in float64: in bfloat16 the error would be about 1e-2."""
    torch.manual_seed(0)
    p = torch.zeros(12, 8, requires_grad=True)
    p.grad = torch.randn(12, 8)
    muon = Muon([p], lr=1.0, weight_decay=0.0, nesterov=False)
    muon.step()
    torch.testing.assert_close(muon.state[p]["momentum_buffer"], 0.05 * p.grad)
    x = p.grad.double().T
    x = x / x.norm()
    for _ in range(5):  # with Muon's coefficients
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    update = -p.detach().double().T
    unit_update = update / update.norm()
    unit_x = x / x.norm()
    assert (unit_update - unit_x).norm() < 1e-5
