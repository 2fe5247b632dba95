"""The training loop as a user runs it: folders, losses, resuming, refusals, divergence."""

import functools
import json
import math
import os
import re
import shlex
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo import lookup_backend

import train as train_module
from config import Config
from data.shards import write_shard
from layers.build import build_model
from model import GPT
from runtime import checkpoint, run_folder
from runtime.checkpoint import Training
from runtime.distributed import EXIT_STOPPED
from runtime.files import read_json
from tests.helpers import reverse_shards, small_config
from tests.runs import (
    agree,
    assert_same_run,
    checkpoint_bytes,
    identical,
    metrics,
    run_train,
    saved,
    weights,
)
from train import Monitor, StepBatch, may_continue, train_step


def test_a_run_learns_and_its_folder_says_everything(train, shards):
    run = train("run", "configs/lssar_p15.py", "--max_iters=40", "--eval_interval=20")
    losses = metrics(run)
    validation = metrics(run, "val_loss")
    assert list(losses) == list(range(1, 41))
    assert list(validation) == [0, 20, 40]
    assert abs(losses[1] - math.log(257)) < 0.1
    assert losses[40] < 0.6 * losses[1]
    assert validation[40] < 0.6 * validation[0]

    text = (run / "metrics.jsonl").read_text()
    first_step = json.loads(text.splitlines()[1])
    keys = {"step", "loss", "lr", "grad_norm", "ms", "tokens_per_s", "memory_mb"}
    assert keys <= first_step.keys()

    config = json.loads((run / "config.json").read_text())
    assert config["attention"] == "lssar"
    assert config["p"] == 15.0
    assert config["n_embd"] == 32
    assert Config(**config).data_dir == str(shards)

    environment = json.loads((run / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert "commit" in environment

    state = saved(run)
    assert state["step"] == 40
    assert state["config"] == config
    model = build_model(Config(**config))
    assert set(state["model"]) == set(model.state_dict())


def test_a_run_continues_in_the_data_order_of_another(train):
    """Its first loss is the whole run's fourth: the same weights and batch, as SSMax (f) begins."""
    whole = train("whole", "configs/softmax.py", "--keep_every=3", "--learning_rate=0")
    start = f"--init_from={whole / 'step_000003.pt'}"
    branch = train("branch", "configs/softmax.py", start, "--first_batch=3", "--max_iters=3")
    losses = metrics(whole)
    assert losses[4] != losses[1]
    assert metrics(branch)[1] == losses[4]
    stopped = train("stopped", "configs/softmax.py", start, "--first_batch=3", "--max_iters=1")
    train("stopped", "configs/softmax.py", "--first_batch=3", "--max_iters=3", "--resume")
    assert metrics(stopped) == metrics(branch)


def test_accumulation_splits_agree(train):
    whole = train("whole", "configs/ssmax.py")
    for size in (4, 1):
        split = train(f"split{size}", "configs/ssmax.py", f"--batch_size={size}")
        agree(split, whole)


def test_a_batch_size_that_does_not_divide_a_step_is_fitted(train, capsys):
    run = train("run", "--batch_size=3", "--max_iters=2")
    assert (
        "batch_size = 2: the largest that is at most 3 and divides the 8 sequences of a step"
        in capsys.readouterr().out
    )
    assert json.loads((run / "config.json").read_text())["batch_size"] == 2
    agree(run, train("whole", "--batch_size=2", "--max_iters=2"))


def test_a_batch_size_of_zero_is_what_fits_up_to_a_limit(train, capsys):
    train("run", "--batch_size=0", "--total_batch_size=2048", "--dry_run")
    says = "batch_size = 64: the largest that is at most 64, fits and divides the 128 sequences of"
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    "first, then",
    [
        ("float32", "float16"),
        ("float16", "bfloat16"),
    ],
)
def test_low_precision_trains_and_a_run_continues_in_another_dtype(train, first, then):
    run = train("run", "--max_iters=3", f"--dtype={first}")
    train("run", "--max_iters=15", f"--dtype={then}", "--resume")
    losses = metrics(run)
    assert sorted(losses) == list(range(1, 16))
    assert losses[15] < 0.95 * losses[1]
    for tensor in weights(run).values():
        assert tensor.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_are_rounded_to_the_dtype(train, dtype):
    exact = metrics(train("exact", "--max_iters=1"))[1]
    rounded = metrics(train("rounded", "--max_iters=1", f"--dtype={dtype}"))[1]
    assert 0 < abs(rounded - exact) < 1e-2


@pytest.mark.parametrize(
    "setting",
    [
        "--grad_clip=0.01",
        "--weight_decay=5",
        "--beta1=0.5",
        "--beta2=0.5",
        "--adam_eps=0.1",
        "--rope_theta=500",
        "--optimizer=muon",
    ],
)
def test_a_setting_changes_what_is_learned(train, setting):
    plain = train("plain", "--max_iters=3")
    assert metrics(train("other", "--max_iters=3", setting))[3] != metrics(plain)[3]


def test_the_seed_draws_the_initial_weights(train):
    def initial(name, seed):
        run = train(name, "--max_iters=0", f"--seed={seed}")
        return torch.load(run / "step_000000.pt")["model"]["wte.weight"]

    first = initial("first", 1)
    assert torch.equal(initial("again", 1), first)
    assert not torch.equal(initial("other", 2), first)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_every_signal_of_the_documentation_stops_a_run(train, monkeypatch, name):
    forward = GPT.forward

    def signalled(self, *tensors):
        if self.training:
            os.kill(os.getpid(), getattr(signal, name))
        return forward(self, *tensors)

    monkeypatch.setattr(GPT, "forward", signalled)
    with pytest.raises(SystemExit) as stop:
        train("run")
    assert stop.value.code == EXIT_STOPPED


@pytest.mark.parametrize(
    "settings",
    [["configs/lssar_p15.py"], ["configs/ssmax.py", "--document_mask"]],
)
def test_compiled_agrees_and_saves_plain_names(train, documents, monkeypatch, settings):
    """With the graphs that torch.compile captures, but without its C++ compiler, which is slow."""
    graphs = []

    def without_compiler(graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend=without_compiler)
    )
    arguments = (*settings, f"--data_dir={documents}", "--max_iters=2", "--n_layer=1")
    plain = train("plain", *arguments)
    assert not graphs
    compiled = train("compiled", *arguments, "--compile")
    assert graphs
    assert metrics(compiled) == pytest.approx(metrics(plain), rel=1e-4)
    assert weights(compiled).keys() == weights(plain).keys()


# ---- stopping and resuming ----

ORBITS = (
    "--task=orbits",
    "--tie_embeddings=False",
    "--positions=learned",
    "--planets=2",
    "--systems=20",
    "--bins=50",
    "--val_tokens=64",
    "--data_dir=none",
)


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("--optimizer=muon", "--projections=tpa"),
        ORBITS,
    ],
)
def test_resumed_equals_uninterrupted_bit_for_bit(train, monkeypatch, settings):
    """Also if a user's variant draws random numbers in a step: here noise on the loss."""
    forward = GPT.forward

    def noisy(self, idx, targets=None):
        out = forward(self, idx, targets)
        if targets is None:
            return out
        return out * torch.rand(())

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
    weights_before = weights(run)
    metrics_before = (run / "metrics.jsonl").read_text()
    capsys.readouterr()
    train("run", "--resume=auto")
    printed = capsys.readouterr().out
    assert printed.splitlines()[4:] == ["step 6 of 6 is saved: finished"]
    assert identical(weights(run), weights_before)
    assert (run / "metrics.jsonl").read_text() == metrics_before


@pytest.mark.parametrize(
    "where, calls, step",
    [
        ("token_losses", 11, 3),
        ("forward", 14, 4),
    ],
)
def test_a_stop_within_a_step_or_a_validation(train, monkeypatch, where, calls, step):
    """The step, or the validation, is finished and saved."""
    arguments = ("configs/lssar_p3.py", "--optimizer=muon", "--batch_size=2")
    whole = train("whole", *arguments)
    real = getattr(GPT, where)
    count = 0

    def signalled(self, *tensors):
        nonlocal count
        count += 1  # a step has 4 micro-batches, a validation 8 batches
        if count == calls:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, *tensors)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(GPT, where, signalled)
        train("stopped", *arguments)
    stopped = whole.parent / "stopped"
    assert stop.value.code == EXIT_STOPPED
    assert saved(stopped)["step"] == step
    assert max(metrics(stopped)) == step
    train("stopped", *arguments, "--resume")
    assert_same_run(stopped, whole)


def test_a_run_goes_on_with_its_data_in_another_folder(train, shards, tmp_path):
    data = shutil.copytree(shards, tmp_path / "data")
    train("run", "--max_iters=2", f"--data_dir={data}")
    moved = data.rename(tmp_path / "moved")
    run = train("run", "--resume", "--max_iters=4", f"--data_dir={moved}")
    assert list(metrics(run)) == [1, 2, 3, 4]


def test_resuming_on_edited_data_is_refused(train, shards, tmp_path, refused):
    """Files of the same names and sizes: the batches would have other tokens."""
    train("run", "--max_iters=2")
    for split in ("train", "val"):
        data = shutil.copytree(shards, tmp_path / split)
        reverse_shards(data, split)
        what = {"train": "training shards", "val": "validation shards"}[split]
        says = (f"{data}: its {what} differ from the data that the run was trained on",)
        refused(train, "run", "--resume", "--max_iters=4", f"--data_dir={data}", says=says)


# ---- starting from weights and data ----


def test_initial_weights_that_are_not_finite_are_refused(train, refused, tmp_path):
    content = torch.load(train("first", "--max_iters=0") / "step_000000.pt")
    content["model"]["wte.weight"][0] = math.nan
    torch.save(content, tmp_path / "nan.pt")
    start = f"--init_from={tmp_path / 'nan.pt'}"
    refused(train, "new", start, says=("initial weights are not finite", "nan.pt"))


def test_init_from_another_variant(train, refused, capsys):
    first = train("first", "configs/softmax.py")
    arguments = ("configs/ssmax.py", "--s_init=0.5", "--max_iters=0", f"--init_from={first}")
    second = train("second", *arguments)
    assert f"attention = 'ssmax'; {first} was trained with 'softmax'\n" in capsys.readouterr().out
    old = weights(first)
    new = weights(second)
    added = new.keys() - old.keys()
    assert len(added) == 2
    for name in added:
        assert name.endswith(".s")
        assert torch.all(new[name] == 0.5)
    for name, weight in old.items():
        assert torch.equal(new[name], weight)
    # it can be resumed like any other run
    resumed = ("second", "configs/ssmax.py", "--s_init=0.5", "--max_iters=3", "--resume=auto")
    says = f"{second} began with --init_from={first}, not with --init_from={second}"
    refused(train, *resumed, f"--init_from={second}", says=says)
    again = ("first", "configs/softmax.py", "--resume=auto", "--init_from=.")
    refused(train, *again, says=f"{first} began with random weights, not with --init_from=.")
    train(*resumed, f"--init_from={first}")
    assert list(metrics(second)) == [1, 2, 3]
    assert run_folder.read_config(second).init_from == str(first)
    began_with = json.loads((second / "environment.json").read_text())["began_with"]
    assert began_with == checkpoint.find(first).id
    assert began_with["step"] == 6


@pytest.mark.parametrize(
    "settings, says",
    [
        (("--projections=linear",), "its model differs: projections is tpa there, linear here; "),
        # as many rows of c_attn: 10 ranks in all
        (
            ("--projections=tpa", "--q_rank=4", "--kv_rank=3"),
            "q_rank is 6 there, 4 here; kv_rank is 2 there, 3 here. Only",
        ),
    ],
)
def test_weights_of_another_model_are_refused_by_name(train, refused, settings, says):
    tpa = train("tpa", "--max_iters=1", "--projections=tpa")
    refused(train, "new", *settings, f"--init_from={tpa}", says=says)


def test_data_is_checked_before_any_work(train, tmp_path, shards, refused):
    refused(train, "run", "--data_dir=none", says=("none", "python -m data.text"))
    other = shutil.copytree(shards, tmp_path / "other")
    beyond_vocabulary = np.full(200, 300, dtype=np.uint16)
    write_shard(other / "text_val_000000.bin", beyond_vocabulary)
    refused(train, "run", f"--data_dir={other}", says=("text_val_000000.bin", "300"))
    refused(train, "run", "--tokenizer=gpt2", says=("'bytes'", "'gpt2'"))
    assert not (tmp_path / "run").exists()


# ---- one step ----


def training_of(model, lr, optimizer=torch.optim.SGD, scaler=None):
    """The state of a training with an optimizer for each of the model's children."""
    if scaler is None:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizers = []
    for child in model.children():
        optimizers.append(optimizer(child.parameters(), lr=lr))
    return Training(model, torch.float32, optimizers, scaler)


def copy_of_parameters(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_a_step_is_one_update_by_the_gradient_of_the_sum(clip):
    """Against the gradient, the clipping and the update written out for SGD, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1, bias=False))
    model.double()
    weight = model[0].weight
    first = weight.detach().clone()
    x = torch.randn(6, 3, dtype=torch.float64)
    y = torch.randn(6, 1, dtype=torch.float64)

    def loss_fn(x, y):
        return (model(x) - y).square().sum()

    training = training_of(model, lr=0.5)
    micro_batches = list(zip(x.split(4), y.split(4), strict=True))
    batch = StepBatch(micro_batches, divisor=1, tokens=0)
    loss, norm = train_step(training, loss_fn, batch, clip)
    errors = x @ first.T - y
    gradient = 2 * errors.T @ x
    expected = errors.square().sum()
    assert loss == pytest.approx(expected.item(), rel=1e-6)  # summed in float32
    expected = gradient.norm()
    assert norm == pytest.approx(expected.item(), rel=1e-12)
    if clip:
        gradient *= clip / (norm + 1e-6)  # torch's epsilon
    expected = first - 0.5 * gradient
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=0)
    assert weight.grad is None


@pytest.mark.parametrize(
    "case, path, expected",
    [
        ("softmax.py", "sdpa", False),
        ("hybrid.py", "sdpa", True),  # as on a T4
        ("hybrid.py", "sdpa and varlen", False),
        ("lssar_p3.py", "blocked", True),
    ],
)
def test_recall_has_many_graphs_where_queries_are_in_blocks(case, path, expected, monkeypatch):
    answers = []
    monkeypatch.setattr(train_module, "pick_compile", lambda *arguments: answers.append(arguments))
    config = small_config(case, "--task=recall")
    train_module.compile_and_distribute(build_model(config), config, path)
    ((_, _, many_graphs),) = answers
    assert many_graphs == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_micro_batch_that_is_not_finite_shows_in_the_loss_and_the_norm(bad):
    model = nn.Sequential(nn.Linear(2, 1))

    def loss_fn(x, y):
        return model(x).square().sum()

    y = torch.zeros(1)
    good_pair = (torch.ones(1, 2), y)
    bad_pair = (torch.full((1, 2), bad), y)
    batch = StepBatch([good_pair, bad_pair], divisor=1, tokens=0)
    loss, norm = train_step(training_of(model, lr=1.0), loss_fn, batch, grad_clip=1.0)
    assert not math.isfinite(loss)
    assert not math.isfinite(norm)


@pytest.mark.parametrize("fused", [True, False])
def test_a_float16_step_that_overflows_only_lowers_the_scale(fused):
    """In one layer alone; the optimizer of the other one is skipped, too."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    before = copy_of_parameters(model)
    first_weight = model[0].weight
    first_weight.register_hook(lambda gradient: gradient * (math.inf if overflows else 1.0))

    def loss_fn(x, y):
        return model(x).square().sum()

    x = torch.ones(1, 2)
    batch = StepBatch([(x, x)], divisor=1, tokens=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, backoff_factor=0.5)
    adamw = functools.partial(torch.optim.AdamW, fused=fused)
    training = training_of(model, 1e-3, adamw, scaler)
    step = functools.partial(train_step, training, loss_fn, batch, grad_clip=1.0)
    overflows = True
    loss, norm = step()
    assert math.isfinite(loss)
    assert not math.isfinite(norm)
    assert identical(copy_of_parameters(model), before)
    assert all(p.grad is None for p in model.parameters())
    assert scaler.get_scale() == 2.0**11
    for optimizer in training.optimizers:
        for state in optimizer.state.values():
            assert not any(value.any() for value in state.values())
    overflows = False
    loss, norm = step()
    assert math.isfinite(norm)
    for p, old in zip(model.parameters(), before, strict=True):
        assert not torch.equal(p, old)
    for optimizer in training.optimizers:
        for state in optimizer.state.values():
            assert state["step"] == 1


class LogsLate(Monitor):
    """As on CUDA."""

    logs_late = True


def test_steps_that_are_logged_late_are_logged_alike(train, monkeypatch):
    """Also where a run stops, and where a step begins after a validation or a checkpoint."""
    arguments = ("--max_iters=8", "--eval_interval=3", "--checkpoint_interval=4", "--keep_last=9")
    expected = train("expected", *arguments)
    monkeypatch.setattr(train_module, "Monitor", LogsLate)
    late = train("late", *arguments)
    assert_same_run(late, expected)
    assert (metrics(late, "grad_norm"), metrics(late, "lr")) == (
        metrics(expected, "grad_norm"),
        metrics(expected, "lr"),
    )
    assert all(ms > 0 for ms in metrics(late, "ms").values())
    train("stopped", *arguments, "--max_iters=3")
    stopped = train("stopped", *arguments, "--resume")
    assert_same_run(stopped, expected)


def test_a_step_that_is_logged_late_is_not_waited_for(train, monkeypatch):
    """The next step is launched first, but for what a diverged run must not do."""
    events = []
    real_step = train_module.train_step
    real_log = Monitor.log_pending

    def step(training, *arguments):
        events.append(f"launch {training.step + 1}")
        return real_step(training, *arguments)

    class Noting(LogsLate):
        def log_pending(self):
            if self.pending is not None:
                events.append(f"log {self.pending.step}")
            real_log(self)

    monkeypatch.setattr(train_module, "train_step", step)
    monkeypatch.setattr(train_module, "Monitor", Noting)
    train("run", "--max_iters=3", "--eval_interval=2", "--checkpoint_interval=100")
    assert events == ["launch 1", "launch 2", "log 1", "log 2", "launch 3", "log 3"]


# ---- divergence ----


@pytest.mark.parametrize("monitor", [Monitor, LogsLate])
def test_what_is_not_finite_stops_the_run_and_is_not_saved(train, capsys, monkeypatch, monitor):
    monkeypatch.setattr(train_module, "Monitor", monitor)
    folder = train("run", "--max_iters=3")
    before = checkpoint_bytes(folder)
    monkeypatch.setattr(train_module, "learning_rate", lambda step, config: 1e300)
    for interval, error in ((3, "step 5: loss"), (1, "step 4: its update")):
        with pytest.raises(SystemExit) as stop:
            train("run", "--resume", "--max_iters=6", f"--checkpoint_interval={interval}")
        assert stop.value.code == 1
        message = capsys.readouterr().err
        assert error in message
        assert "is good" in message
        assert checkpoint_bytes(folder) == before


def test_a_first_loss_that_is_not_finite_is_not_blamed_on_the_rate(train, capsys, monkeypatch):
    monkeypatch.setattr(GPT, "forward", lambda model, x, y: model.wte.weight.sum() * math.nan)
    with pytest.raises(SystemExit) as stop:
        train("run", "--eval_interval=9")
    assert stop.value.code == 1
    message = capsys.readouterr().err
    assert "step 1: loss = nan" in message
    assert "before the first update, so a lower learning rate cannot help" in message
    assert "is good" not in message


def test_the_advised_min_lr_is_not_above_half_the_rate():
    config = Config(learning_rate=6e-4, min_lr=4e-4)
    advice = train_module.how_to_continue(config, 6, saved=4)
    assert "--learning_rate=0.0003 --min_lr=0.0003 at its end" in advice


def arguments_in(message):
    """The arguments of train.py in a message, as a user copies them."""
    (arguments,) = re.findall("python train.py ([^,;]+)", message)
    return arguments.split()


def test_a_diverged_run_continues_past_its_step(train, tmp_path, capsys, monkeypatch):
    """As its last message says, at a lower rate and past the batch that broke it."""
    settings = ("--learning_rate=0.02", "--max_iters=8", "--checkpoint_interval=2")
    real = train_module.train_step
    batches = []

    def diverges(training, loss_fn, batch, grad_clip):
        batches.append(batch.micro_batches[0][0])
        loss, norm = real(training, loss_fn, batch, grad_clip)
        return (loss.new_tensor(math.nan) if len(batches) == 6 else loss), norm

    write = checkpoint.Saver._write

    def slow_write(*arguments):
        time.sleep(0.3)
        write(*arguments)

    monkeypatch.setattr(train_module, "train_step", diverges)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(checkpoint.Saver, "_write", slow_write)
        train("run", *settings)
    assert stop.value.code == 1
    message = capsys.readouterr().err
    assert "step 6: loss = nan" in message
    (more,) = re.findall("with (--resume .*) at its end; (?=--first_batch=2 )", message)
    train("run", *settings, *more.split(), "--first_batch=2")
    printed = capsys.readouterr().out
    assert "from step 4 on, learning_rate = 0.01 (before: 0.02)" in printed

    run = tmp_path / "run"
    rates = metrics(run, "lr")
    assert rates[4] == 0.02
    assert rates[5] == rates[8] == 0.01
    seen = batches[:6]
    for batch in batches[6:]:  # the batches of steps 4 and 5 are not repeated
        assert not any(torch.equal(batch, other) for other in seen)
        seen.append(batch)
    assert len(seen) == 10

    expected = [{"step": 4, "learning_rate": [0.02, 0.01], "first_batch": [0, 2]}]
    assert changes_of(run) == expected
    run_train("--resume", run, "--max_iters=9")
    assert changes_of(run) == [*expected, {"step": 8, "max_iters": [8, 9]}]


def changes_of(run):
    return json.loads((run / "environment.json").read_text())["changes"]


def test_what_a_resume_refuses_is_a_new_run_by_what_the_refusal_says(train, capsys):
    """With all settings of the refused command that count in training."""
    run = train("a run", "--max_iters=2")
    with pytest.raises(SystemExit):
        train("a run", "--resume", "--max_iters=3", "--weight_decay=0", "--seed=4")
    (command,) = re.findall("if they fit: python train.py (.*)", capsys.readouterr().err)
    new = run.with_name("new")
    run_train(*shlex.split(command.replace("NEW", str(new))))
    config = read_json(new / "config.json")
    assert (config["weight_decay"], config["seed"], config["max_iters"]) == (0, 4, 3)
    assert config["init_from"] == str(run)


def test_a_finished_schedule_is_extended_by_what_the_refusal_says(train, capsys, refused):
    """Of the two commands in it each does what was asked, from the last rate or a tenth."""
    schedule = ("--schedule=cosine", "--max_iters=6", "--min_lr=1e-3")
    run = train("run", *schedule)
    copy = shutil.copytree(run, run.with_name("copy"))
    for folder in (run, copy):
        with pytest.raises(SystemExit) as stop:
            train(folder.name, *schedule, "--resume", "--max_iters=12")
        assert stop.value.code == 2
        message = capsys.readouterr().err
        assert "followed a cosine schedule of 6 steps up to step 6" in message
        words = " constant rate, " if folder == run else " cosine from here, "
        arguments = arguments_in(message.partition(words)[2].partition(", or")[0])
        run_train(*arguments)
    constant = metrics(run, "lr")
    cosine = metrics(copy, "lr")
    last = constant[6]
    assert 1e-3 < last < 5e-3
    for step in range(7, 13):
        assert constant[step] == pytest.approx(last, rel=1e-5)
        coeff = 0.5 * (1 + math.cos(math.pi * (step - 7) / 6))
        assert cosine[step] == pytest.approx(coeff * last, rel=1e-5)
    # a rate that is set is taken as it is
    train("run", *schedule, "--resume", "--max_iters=14", "--learning_rate=2e-3")
    assert metrics(run, "lr")[13] < 2e-3
    train("copy", *schedule, "--resume", "--max_iters=14", "--min_lr=0", "--schedule=constant")
    assert "from step 12 on, schedule = 'constant' (before: 'cosine')" in capsys.readouterr().out
    says = f"{run} has 14 steps: max_iters = 13 is fewer"
    refused(train, "run", *schedule, "--resume", "--max_iters=13", says=says)


def test_gradients_that_are_not_finite_at_any_scale_are_no_overflow():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.ones(()))
    assert may_continue(1.0, math.inf, scaler)
    assert not may_continue(math.nan, 1.0, scaler)
    overflows = 0
    while may_continue(1.0, math.nan, scaler) and overflows < 100:
        scaler.update(scaler.get_scale() * 0.5)
        overflows += 1
    assert 20 < overflows < 40
    unscaled = torch.amp.GradScaler("cpu", enabled=False)
    assert may_continue(1.0, 1.0, unscaled)
    assert not may_continue(1.0, math.inf, unscaled)
