"""The training loop as a user runs it: folders, losses, resuming, refusals."""

import functools
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import train as train_module
from config import Config
from data.shards import write_shard
from model import GPT
from runtime import checkpoint
from runtime.distributed import EXIT_STOPPED
from tests.helpers import SMALL
from tests.runs import (
    assert_same_run,
    identical,
    launch,
    lines,
    metrics,
    refused,
    same_weights,
    saved,
    weights,
)


@pytest.mark.parametrize("stop", [1, 4])
def test_resumed_is_identical_whatever_is_random(train, monkeypatch, stop):
    """Also what a variant of one's own might draw in a step: here noise on the loss."""
    forward = GPT.forward

    def noisy(self, idx, targets=None, cache=None):
        out = forward(self, idx, targets, cache)
        return out if targets is None else out * torch.rand(())

    monkeypatch.setattr(GPT, "forward", noisy)
    whole = train("whole", "configs/ssmax.py", "--optimizer=muon")
    part = train("part", "configs/ssmax.py", "--optimizer=muon", f"--max_iters={stop}")
    torch.rand(7)  # what else drew from the generator does not matter
    train("part", "configs/ssmax.py", "--optimizer=muon", "--resume")
    text = [line for line in lines(part) if line["step"] != stop or "val_loss" not in line]
    assert text == [line for line in lines(whole) if line in text]
    assert identical(saved(part)["model"], saved(whole)["model"])
    assert identical(saved(part)["optimizers"], saved(whole)["optimizers"])


def test_orbits_are_trained_as_language_is(train, capsys):
    """Nothing stored is read; a resumed run is the same, with all that is written of a step."""
    settings = ["--task=orbits", "--tie_embeddings=False", "--positions=learned", "--planets=2",
                "--systems=20", "--bins=50", "--learning_rate=0.03", "--val_tokens=64",
                "--data_dir=none"]  # fmt: skip
    whole = train("whole", "configs/lssar_p3.py", *settings, "--max_iters=30")
    said = capsys.readouterr().out
    assert "320 training tokens in simulated orbits of 1 to 2 planets, 20 windows" in said
    losses, validation = metrics(whole), metrics(whole, "val_loss")
    # uniform over 50 bins, or 2 time steps, at first
    assert losses[1] == pytest.approx(math.log(53), abs=0.3) and losses[30] < losses[1] - 0.5
    assert validation[30] < validation[0]
    train("part", "configs/lssar_p3.py", *settings, "--max_iters=7")
    part = train("part", "configs/lssar_p3.py", *settings, "--max_iters=30", "--resume")
    assert identical(saved(whole)["model"], saved(part)["model"])


def test_a_run_learns_and_its_folder_says_everything(train, shards):
    run = train("run", "configs/lssar_p15.py", "--max_iters=40", "--eval_interval=20")
    losses, validation = metrics(run), metrics(run, "val_loss")
    assert list(losses) == list(range(1, 41))
    assert list(validation) == [0, 20, 40]
    assert abs(losses[1] - math.log(257)) < 0.1
    assert losses[40] < 0.6 * losses[1]
    assert validation[40] < 0.6 * validation[0]
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[2])
    assert {"step", "loss", "lr", "grad_norm", "ms", "tokens_per_s", "memory_mb"} <= line.keys()
    config = json.loads((run / "config.json").read_text())
    assert config["attention"] == "lssar" and config["p"] == 15.0 and config["n_embd"] == 32
    assert Config(**config).data_dir == str(shards)
    environment = json.loads((run / "environment.json").read_text())
    assert environment["torch"] == torch.__version__ and "commit" in environment
    state = saved(run)
    assert state["step"] == 40 and state["config"] == config
    assert set(state["model"]) == set(GPT(Config(**config)).state_dict())


def test_a_run_goes_on_in_the_data_order_of_another(train):
    """From its weights at step 3, and the batch after: the losses of SSMax (f)'s first step."""
    whole = train("whole", "configs/softmax.py", "--keep_every=3", "--learning_rate=0")
    start = f"--init_from={whole / 'step_000003.pt'}"
    part = train("part", "configs/softmax.py", start, "--first_batch=3", "--max_iters=3")
    assert metrics(part)[1] == metrics(whole)[4] != metrics(whole)[1]
    stopped = train("stopped", "configs/softmax.py", start, "--first_batch=3", "--max_iters=1")
    train("stopped", "configs/softmax.py", "--first_batch=3", "--max_iters=3", "--resume")
    assert metrics(stopped) == metrics(part)


@pytest.mark.parametrize("variant", ["softmax", "lssar_p15", "ssmax"])
def test_accumulation_splits_agree(train, variant):
    whole = train("whole", f"configs/{variant}.py")
    for size in (4, 1):
        split = train(f"split{size}", f"configs/{variant}.py", f"--batch_size={size}")
        for key in ("loss", "val_loss", "grad_norm"):
            assert metrics(split, key) == pytest.approx(metrics(whole, key), rel=1e-5)
        for name, tensor in weights(whole).items():
            assert torch.allclose(weights(split)[name], tensor, atol=1e-4), name


# Its output projections begin at 0, so that the first gradients of the others are near 0, and Adam
# would make whole steps of their rounding.
T6_SMALL = ["configs/t6.py", "--head_size=16", "--mlp_hidden=64", "--adam_eps=1e-4"]


def test_two_processes_agree_with_one(train, shards, tmp_path):
    # with and without accumulation
    for size, arguments in ((4, ["configs/ssmax.py"]), (2, T6_SMALL)):
        one, two = train(f"one{size}", *arguments), tmp_path / f"two{size}"
        arguments = [*SMALL, f"--data_dir={shards}", *arguments]
        done = launch(2, *arguments, f"--out_dir={two}", f"--batch_size={size}")
        assert done.returncode == 0, done.stderr
        for key in ("loss", "val_loss", "grad_norm"):
            assert metrics(two, key) == pytest.approx(metrics(one, key), rel=1e-5)
        for name, tensor in weights(one).items():
            assert torch.allclose(weights(two)[name], tensor, atol=1e-4), name


@pytest.mark.parametrize("optimizer, projections", [("adamw", "linear"), ("muon", "tpa")])
def test_resumed_equals_uninterrupted_bit_for_bit(train, optimizer, projections):
    arguments = ("configs/lssar_p3.py", f"--optimizer={optimizer}", f"--projections={projections}")
    whole = train("whole", *arguments, "--max_iters=8")
    run = train("run", *arguments, "--max_iters=3")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "loss": 9.0}\n{"step": 5, "lo')  # logged after the checkpoint
    assert train("run", *arguments, "--max_iters=8", "--resume") == run
    assert same_weights(weights(run), weights(whole))
    for key in ("loss", "grad_norm", "lr"):
        assert metrics(run, key) == metrics(whole, key)
    # the last step of the first part validates too; it is no multiple of the interval otherwise
    assert metrics(run, "val_loss") == metrics(whole, "val_loss")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines.pop(0)) == {"run_id": saved(run)["run_id"]}
    assert len(lines) == len({(json.loads(x)["step"], "val_loss" in x) for x in lines})


def test_a_finished_run_resumed_stays_as_it_is(train, capsys):
    run = train("run")
    before = weights(run), (run / "metrics.jsonl").read_text()
    capsys.readouterr()
    train("run", "--resume")
    assert capsys.readouterr().out.splitlines()[1:] == ["finished: step 6 of 6 is saved"]
    assert same_weights(weights(run), before[0])
    assert (run / "metrics.jsonl").read_text() == before[1]


@pytest.mark.parametrize(
    "where, calls, step",
    [("token_losses", 3, 0), ("token_losses", 11, 3), ("token_losses", 19, 6), ("forward", 14, 3)],
)
def test_a_stop_within_a_step_or_a_validation(train, monkeypatch, where, calls, step):
    """It leaves the state before the step, and the validation is repeated."""
    arguments = ("configs/lssar_p3.py", "--optimizer=muon", "--batch_size=2", "--keep_last=3")
    whole = train("whole", *arguments)
    real, count = getattr(GPT, where), 0

    def signalled(self, idx, *more):
        nonlocal count
        count += len(idx) == 2  # of the 4 micro-batches of a step, the 8 batches of a validation
        if count == calls and len(idx) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)  # a thread handles it
        return real(self, idx, *more)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(GPT, where, signalled)
        train("part", *arguments)
    part = whole.parent / "part"
    assert stop.value.code == EXIT_STOPPED and count == calls
    assert saved(part)["step"] == step and max(metrics(part), default=0) == step
    before = torch.load(whole / f"step_{step:06d}.pt", weights_only=True)
    for key in ("model", "optimizers"):
        assert identical(saved(part)[key], before[key])
    train("part", *arguments, "--resume")
    if step < 6:
        assert_same_run(part, whole)
    assert lines(part) == lines(whole) and same_weights(weights(part), weights(whole))
    assert identical(saved(part, "best")["model"], saved(whole, "best")["model"])


def test_an_existing_run_is_never_overwritten(train, capsys):
    run = train("run")
    refused(capsys, lambda: train("run"), str(run), "--resume", "--out_dir")
    refused(capsys, lambda: train("run", "--resume", "--n_layer=1"), "n_layer = 2", "--init_from")


def test_resume_without_a_checkpoint_is_refused(train, capsys):
    refused(capsys, lambda: train("new", "--resume"), "new: no such run")


def test_resuming_on_other_data_is_refused(train, capsys, shards, tmp_path):
    """The batches of an epoch are a permutation of all windows: of fewer, it is another one."""
    train("run", "--max_iters=2")
    fewer = shutil.copytree(shards, tmp_path / "fewer")
    (fewer / "text_train_000002.bin").unlink()
    again = ("run", "--resume", "--max_iters=4")
    says = ("fewer has 3,000 training tokens", "was trained on 3,999", "give the same data")
    refused(capsys, lambda: train(*again, f"--data_dir={fewer}"), *says)
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
    began_with = json.loads((second / "began_with.json").read_text())
    assert began_with == checkpoint.checkpoint_id(first) and began_with["step"] == 6
    refused(capsys, lambda: train("third", "--n_embd=64", f"--init_from={first}"), "model differs")


def test_a_checkpoint_of_the_other_projections_is_refused_by_name(train, capsys):
    linear, tpa = train("linear", "--max_iters=1"), train("t", "--max_iters=1", "--projections=tpa")
    for run, own, other in ((linear, "linear", "tpa"), (tpa, "tpa", "linear")):
        arguments = ("new", f"--projections={other}", f"--init_from={run}")
        says = f"its model differs: projections {own} for {other}, "
        refused(capsys, lambda arguments=arguments: train(*arguments), says)
    again = ("t", "--projections=linear", "--resume")
    refused(capsys, lambda: train(*again), "t was trained with projections = 'tpa'")
    # 10 ranks in all, of as many columns
    ranks = ("new", "--projections=tpa", "--q_rank=4", "--kv_rank=3", f"--init_from={tpa}")
    refused(capsys, lambda: train(*ranks), "q_rank 6 for 4, kv_rank 2 for 3 do not fit")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_trains(train, dtype):
    # at 1e-2 the loss of so small a model with p = 15 jumps now and then, in float32 too
    settings = [f"--dtype={dtype}", "--max_iters=20", "--learning_rate=3e-3"]
    run = train("run", "configs/lssar_p15.py", *settings)
    losses = metrics(run)
    assert losses[20] < 0.9 * losses[1]
    assert all(tensor.dtype == torch.float32 for tensor in weights(run).values())


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a compiler")
def test_compiled_agrees_and_saves_plain_names(train):
    plain = train("plain", "configs/lssar_p15.py", "--max_iters=3")
    compiled = train("compiled", "configs/lssar_p15.py", "--max_iters=3", "--compile")
    assert metrics(compiled) == pytest.approx(metrics(plain), rel=1e-4)
    assert weights(compiled).keys() == weights(plain).keys()


@pytest.mark.parametrize("processes", [1, 2])
def test_refusals_of_the_command(processes, shards, tmp_path):
    done = launch(
        processes, *SMALL, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--lerning_rate=1"
    )
    assert done.returncode == (2 if processes == 1 else 1)
    assert "did you mean learning_rate" in done.stderr
    if processes == 1:
        assert "Traceback" not in done.stderr


def test_three_processes_that_do_not_divide_the_batch(train, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    refused(
        capsys, lambda: train("run"), "total_batch_size = 128", "8 x 16 x 3 = 384", "384 or 768"
    )


def test_an_out_dir_that_cannot_be_made_is_refused_before_any_work(train, capsys, tmp_path):
    (tmp_path / "file").touch()
    where = f"{tmp_path / 'file/run'}: no file can be written there: Not a directory"
    refused(capsys, lambda: train("file/run", "--data_dir=nowhere"), where)


def test_data_is_checked_before_any_work(train, capsys, tmp_path, shards):
    def data(folder):
        return lambda: train("run", f"--data_dir={folder}")

    refused(capsys, data(tmp_path / "none"), "none", "python -m data.text")
    refused(capsys, data(tmp_path / "fineweb10B"), "python -m data.fineweb")

    def copy(name):
        return Path(shutil.copytree(shards, tmp_path / name))

    folder = copy("beyond")
    write_shard(folder / "text_train_000002.bin", np.array([1, 2, 300], dtype=np.uint16))
    refused(capsys, data(folder), "text_train_000002.bin", "300", "256")
    folder = copy("short")
    shard = folder / "text_train_000001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    refused(capsys, data(folder), "text_train_000001.bin", "truncated")
    folder = copy("magic")
    shard = folder / "text_val_000000.bin"
    shard.write_bytes(b"\0\0\0\0" + shard.read_bytes()[4:])
    refused(capsys, data(folder), "text_val_000000.bin")
    folder = copy("few")
    (folder / "text_train_000002.bin").unlink()
    write_shard(folder / "text_train_000001.bin", np.arange(100, dtype=np.uint16))
    refused(capsys, data(folder), "few", "100", "129")
    refused(capsys, lambda: train("run", "--tokenizer=gpt2"), "'bytes'", "'gpt2'")
    assert not (tmp_path / "run").exists()


def test_help(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    with pytest.raises(SystemExit) as stop:
        train_module.main()
    assert not stop.value.code
    text = capsys.readouterr().out
    assert "--learning_rate=0.0006" in text and "--total_batch_size=524288" in text


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_a_step_is_one_update_by_the_gradient_of_the_sum(clip):
    """Against the gradient, the clipping and the update written out for SGD, in float64."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1, bias=False).double()
    first = model.weight.detach().clone()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
    optimizers = [torch.optim.SGD(model.parameters(), lr=99.0)]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loss, norm = train_module.train_step(
        lambda x, y: (model(x) - y).square().sum(),
        [(x[:4], y[:4]), (x[4:], y[4:])], 2,
        model, optimizers, scaler, 0.5, clip, torch.float32,
    )  # fmt: skip
    errors = x @ first.T - y
    gradient = 2 * errors.T @ x
    assert loss == pytest.approx(errors.square().sum().item(), rel=1e-6)  # summed in float32
    assert norm == pytest.approx(gradient.norm().item(), rel=1e-12)
    if clip:
        gradient *= clip / (norm + 1e-6)  # torch's own
    torch.testing.assert_close(model.weight.detach(), first - 0.5 * gradient, rtol=1e-12, atol=0)
    assert model.weight.grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_leaves_the_weights(bad):
    model = torch.nn.Linear(2, 1)
    before = [p.detach().clone() for p in model.parameters()]
    optimizers = [torch.optim.AdamW(model.parameters())]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    batches = [(torch.ones(1, 2), torch.zeros(1)), (torch.full((1, 2), bad), torch.zeros(1))]
    loss, norm = train_module.train_step(
        lambda x, y: model(x).square().sum(), batches, 2, model, optimizers, scaler, 1.0, 1.0,
        torch.float32,
    )  # fmt: skip
    assert not math.isfinite(loss) and not math.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizers[0].state and all(p.grad is None for p in model.parameters())


def test_a_float16_step_that_overflows_only_lowers_the_scale():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    model = torch.nn.Sequential(first, second)
    before = [p.detach().clone() for p in model.parameters()]
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (first, second)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, backoff_factor=0.5)
    batches = [(torch.ones(1, 2), torch.zeros(1))]
    step = functools.partial(
        train_module.train_step, lambda x, y: model(x).square().sum() * 1e4, batches, 1, model,
        optimizers, scaler, 1e-3, 1.0, torch.float32,
    )  # fmt: skip
    loss, norm = step()
    assert math.isfinite(loss) and not math.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert scaler.get_scale() == 2.0**119 and not any(o.state for o in optimizers)
    while not math.isfinite(norm):
        loss, norm = step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("first, then", [("float32", "float16"), ("float16", "bfloat16")])
def test_a_run_goes_on_in_another_precision(train, first, then):
    run = train("run", "--max_iters=3", f"--dtype={first}")
    train("run", "--max_iters=9", f"--dtype={then}", "--resume")
    assert sorted(metrics(run)) == list(range(1, 10)) and metrics(run)[9] < metrics(run)[1]
