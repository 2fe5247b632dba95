"""The optimizers' parameters, and the learning rate over a run."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from config import Config
from layers.build import build_model
from optim import (
    InFloat32,
    ShardedMuon,
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
    muon = ShardedMuon([p], lr=1.0, weight_decay=0.0, nesterov=False)
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


def set_gradients(parameters, gradients):
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient


def test_ranks_share_muons_matrices_and_have_the_whole_state(monkeypatch):
    """Against torch's Muon, bit for bit, with three ranks that take turns."""

    def broadcast(tensor, owner, async_op):
        if owner == rank:
            matrices[owner].append(tensor.clone())
        owners.append(owner)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "broadcast", broadcast)
    torch.manual_seed(0)
    shapes = [(4, 4), (8, 4), (4, 8), (12, 4), (4, 4)]
    before = [torch.randn(shape, requires_grad=True) for shape in shapes]
    expected = copy.deepcopy(before)
    whole = torch.optim.Muon(expected, lr=0.1)
    ranks = [copy.deepcopy(before) for _ in range(3)]
    optimizers = [ShardedMuon(parameters, lr=0.1) for parameters in ranks]
    for _ in range(2):
        gradients = [torch.randn(shape) for shape in shapes]
        set_gradients(expected, gradients)
        with InFloat32():
            whole.step()
        matrices = [[], [], []]
        for rank in range(3):
            owners = []
            set_gradients(ranks[rank], gradients)
            optimizers[rank].step()
            changed = [p for p in ranks[rank] if p.grad is not None]
            share = [2, 2, 1][rank]
            assert len(changed) == share
            assert owners.count(rank) == share
        # what the broadcasts do
        by_size = sorted(range(5), key=lambda i: -expected[i].numel())
        for parameters in ranks:
            for place, i in enumerate(by_size):
                matrix = matrices[place % 3][place // 3]
                parameters[i].data.copy_(matrix)
        for parameters, optimizer in zip(ranks, optimizers, strict=True):
            for p, q in zip(parameters, expected, strict=True):
                assert torch.equal(p, q)
                momentum = optimizer.state[p]["momentum_buffer"]
                assert torch.equal(momentum, whole.state[q]["momentum_buffer"])
        assert whole.state_dict().keys() == optimizers[0].state_dict().keys()
