"""The training loop as a user runs it: folders, losses, resuming, refusals."""

import functools
import json
import math
import os
import shutil
import signal

import numpy as np
import pytest
import torch

import train as train_module
from config import Config
from data.shards import write_shard
from layers.build import build_model
from model import GPT
from runtime import checkpoint
from runtime.checkpoint import Training
from runtime.distributed import EXIT_STOPPED
from tests.runs import agree, assert_same_run, identical, metrics, saved, weights


def test_a_run_learns_and_its_folder_says_everything(train, shards):
    run = train("run", "configs/lssar_p15.py", "--max_iters=40", "--eval_interval=20")
    losses, validation = metrics(run), metrics(run, "val_loss")
    assert list(losses) == list(range(1, 41))
    assert list(validation) == [0, 20, 40]
    assert abs(losses[1] - math.log(257)) < 0.1
    assert losses[40] < 0.6 * losses[1]
    assert validation[40] < 0.6 * validation[0]
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    assert {"step", "loss", "lr", "grad_norm", "ms", "tokens_per_s", "memory_mb"} <= line.keys()
    config = json.loads((run / "config.json").read_text())
    assert config["attention"] == "lssar" and config["p"] == 15.0 and config["n_embd"] == 32
    assert Config(**config).data_dir == str(shards)
    environment = json.loads((run / "environment.json").read_text())
    assert environment["torch"] == torch.__version__ and "commit" in environment
    state = saved(run)
    assert state["step"] == 40 and state["config"] == config
    assert set(state["model"]) == set(build_model(Config(**config)).state_dict())


def test_a_run_goes_on_in_the_data_order_of_another(train):
    """From its weights at step 3, and the batch after: the losses of SSMax (f)'s first step."""
    whole = train("whole", "configs/softmax.py", "--keep_every=3", "--learning_rate=0")
    start = f"--init_from={whole / 'step_000003.pt'}"
    part = train("part", "configs/softmax.py", start, "--first_batch=3", "--max_iters=3")
    assert metrics(part)[1] == metrics(whole)[4] != metrics(whole)[1]
    stopped = train("stopped", "configs/softmax.py", start, "--first_batch=3", "--max_iters=1")
    train("stopped", "configs/softmax.py", "--first_batch=3", "--max_iters=3", "--resume")
    assert metrics(stopped) == metrics(part)


def test_accumulation_splits_agree(train):
    whole = train("whole", "configs/ssmax.py")
    for size in (4, 1):
        split = train(f"split{size}", "configs/ssmax.py", f"--batch_size={size}")
        agree(split, whole)


ORBITS = ("--task=orbits", "--tie_embeddings=False", "--positions=learned", "--planets=2",
          "--systems=20", "--bins=50", "--val_tokens=64", "--data_dir=none")  # fmt: skip


@pytest.mark.parametrize("settings", [(), ("--optimizer=muon", "--projections=tpa"), ORBITS])
def test_resumed_equals_uninterrupted_bit_for_bit(train, monkeypatch, settings):
    """Also what a variant of one's own might draw in a step: here noise on the loss."""
    forward = GPT.forward

    def noisy(self, idx, targets=None):
        out = forward(self, idx, targets)
        return out if targets is None else out * torch.rand(())

    monkeypatch.setattr(GPT, "forward", noisy)
    arguments = ("configs/lssar_p3.py", *settings)
    whole = train("whole", *arguments, "--max_iters=8")
    run = train("run", *arguments, "--max_iters=3")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "loss": 9.0}\n{"step": 5, "lo')  # logged after the checkpoint
    torch.rand(7)  # what else drew from the generator does not matter
    assert train("run", *arguments, "--max_iters=8", "--resume") == run
    assert_same_run(run, whole)


def test_a_finished_run_resumed_stays_as_it_is(train, capsys):
    run = train("run", "--resume=auto")  # with nothing to resume: a new run
    before = weights(run), (run / "metrics.jsonl").read_text()
    capsys.readouterr()
    train("run", "--resume=auto")
    assert capsys.readouterr().out.splitlines()[4:] == ["step 6 of 6 is saved: finished"]
    assert identical(weights(run), before[0])
    assert (run / "metrics.jsonl").read_text() == before[1]


@pytest.mark.parametrize("where, calls, step", [("token_losses", 11, 3), ("forward", 14, 4)])
def test_a_stop_within_a_step_or_a_validation(train, monkeypatch, where, calls, step):
    """The step, or the validation, is finished and saved."""
    arguments = ("configs/lssar_p3.py", "--optimizer=muon", "--batch_size=2")
    whole = train("whole", *arguments)
    real, count = getattr(GPT, where), 0

    def signalled(self, *tensors):
        nonlocal count
        count += 1  # a step has 4 micro-batches, a validation 8 batches
        if count == calls:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, *tensors)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(GPT, where, signalled)
        train("part", *arguments)
    part = whole.parent / "part"
    assert stop.value.code == EXIT_STOPPED
    assert saved(part)["step"] == step and max(metrics(part)) == step
    train("part", *arguments, "--resume")
    assert_same_run(part, whole)


def test_resuming_on_other_data_is_refused(train, shards, tmp_path, refused):
    """The batches of an epoch are a permutation of all windows: of fewer, it is another one."""
    train("run", "--max_iters=2")
    fewer = shutil.copytree(shards, tmp_path / "fewer")
    (fewer / "text_train_000002.bin").unlink()
    again = ("run", "--resume", "--max_iters=4")
    says = ("fewer has 3,000 tokens", "was trained on 3,999", "give the same data")
    refused(train, *again, f"--data_dir={fewer}", says=says)
    moved = shutil.copytree(shards, tmp_path / "moved")
    train(*again, f"--data_dir={moved}")


def test_init_from_another_variant(train, capsys):
    first = train("first", "configs/softmax.py")
    arguments = ("configs/ssmax.py", "--s_init=0.5", "--max_iters=0", f"--init_from={first}")
    second = train("second", *arguments)
    old, new = weights(first), weights(second)
    added = new.keys() - old.keys()
    assert all(name.endswith(".s") and torch.all(new[name] == 0.5) for name in added)
    assert len(added) == 2 and all(torch.equal(new[name], old[name]) for name in old)
    # it can be resumed like any other run
    train("second", "configs/ssmax.py", "--s_init=0.5", "--max_iters=3", "--resume")
    assert list(metrics(second)) == [1, 2, 3]
    assert checkpoint.read_config(second).init_from == str(first)
    began_with = json.loads((second / "began_with.json").read_text())
    assert began_with == checkpoint.find(first).id and began_with["step"] == 6


def test_weights_of_another_model_are_refused_by_name(train, refused):
    tpa = train("t", "--max_iters=1", "--projections=tpa")
    for settings, says in (
        (["--projections=linear"], "its model differs: projections tpa for linear, "),
        # 10 ranks in all, of as many columns
        (["--projections=tpa", "--q_rank=4", "--kv_rank=3"], "q_rank 6 for 4, kv_rank 2 for 3 do"),
    ):
        new = ("new", *settings, f"--init_from={tpa}")
        refused(train, *new, says=says)


@pytest.mark.parametrize("first, then", [("float32", "float16"), ("float16", "bfloat16")])
def test_low_precision_trains_and_a_run_goes_on_in_another(train, first, then):
    run = train("run", "--max_iters=3", f"--dtype={first}")
    train("run", "--max_iters=15", f"--dtype={then}", "--resume")
    losses = metrics(run)
    assert sorted(losses) == list(range(1, 16)) and losses[15] < 0.95 * losses[1]
    assert all(tensor.dtype == torch.float32 for tensor in weights(run).values())


def test_compiled_agrees_and_saves_plain_names(train, monkeypatch):
    """With the graphs that torch.compile captures, but without its C++ compiler, which is slow."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    arguments = ("configs/lssar_p15.py", "--max_iters=2", "--n_layer=1")
    plain = train("plain", *arguments)
    compiled = train("compiled", *arguments, "--compile")
    assert metrics(compiled) == pytest.approx(metrics(plain), rel=1e-4)
    assert weights(compiled).keys() == weights(plain).keys()


def test_data_is_checked_before_any_work(train, tmp_path, shards, refused):
    refused(train, "run", "--data_dir=none", says=("none", "python -m data.text"))
    other = shutil.copytree(shards, tmp_path / "other")
    write_shard(other / "text_val_000000.bin", np.full(200, 300, dtype=np.uint16))
    refused(train, "run", f"--data_dir={other}", says=("text_val_000000.bin", "300"))
    refused(train, "run", "--tokenizer=gpt2", says=("'bytes'", "'gpt2'"))
    assert not (tmp_path / "run").exists()


def one_step(model, loss_fn, pairs, lr, grad_clip=0.0, optimizer=torch.optim.SGD, scale=None):
    """The training state, and a function that takes a step and returns its loss and norm."""
    enabled = scale is not None
    scaler = torch.amp.GradScaler("cpu", scale or 1.0, backoff_factor=0.5, enabled=enabled)
    optimizers = [optimizer(part.parameters(), lr=lr) for part in model.children()]
    training = Training(model, torch.float32, optimizers, scaler)
    batch = train_module.Batch(pairs, divisor=1, tokens=0)
    call = (training, loss_fn, batch, grad_clip)
    return training, functools.partial(train_module.train_step, *call)


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_a_step_is_one_update_by_the_gradient_of_the_sum(clip):
    """Against the gradient, the clipping and the update written out for SGD, in float64."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 1, bias=False)).double()
    (weight,) = model.parameters()
    first = weight.detach().clone()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
    pairs = [(x[:4], y[:4]), (x[4:], y[4:])]
    _, step = one_step(model, lambda x, y: (model(x) - y).square().sum(), pairs, 0.5, clip)
    loss, norm = step()
    errors = x @ first.T - y
    gradient = 2 * errors.T @ x
    assert loss == pytest.approx(errors.square().sum().item(), rel=1e-6)  # summed in float32
    assert norm == pytest.approx(gradient.norm().item(), rel=1e-12)
    if clip:
        gradient *= clip / (norm + 1e-6)  # torch's own
    torch.testing.assert_close(weight.detach(), first - 0.5 * gradient, rtol=1e-12, atol=0)
    assert weight.grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_leaves_the_weights(bad):
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    before = [p.detach().clone() for p in model.parameters()]
    pairs = [(torch.ones(1, 2), torch.zeros(1)), (torch.full((1, 2), bad), torch.zeros(1))]
    loss_fn = lambda x, y: model(x).square().sum()  # noqa: E731
    training, step = one_step(model, loss_fn, pairs, 1.0, 1.0, torch.optim.AdamW)
    assert not any(map(math.isfinite, step()))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not training.optimizers[0].state and all(p.grad is None for p in model.parameters())


def test_a_float16_step_that_overflows_only_lowers_the_scale():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    before = [p.detach().clone() for p in model.parameters()]
    pairs, loss_fn = [(torch.ones(1, 2), 0)], lambda x, y: 1e4 * model(x).square().sum()
    training, step = one_step(model, loss_fn, pairs, 1e-3, 1.0, torch.optim.AdamW, scale=2.0**120)
    loss, norm = step()
    assert math.isfinite(loss) and not math.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert training.scaler.get_scale() == 2.0**119
    assert not any(optimizer.state for optimizer in training.optimizers)
    while not math.isfinite(norm):
        loss, norm = step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
