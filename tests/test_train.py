"""The training loop as a user runs it: folders, losses, resuming, several processes, refusals."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import optim
import train as train_module
from config import Config, load_config
from data.shards import write_shard
from model import GPT
from runtime import checkpoint, device
from tests.conftest import SMALL

ROOT = Path(__file__).parent.parent


def metrics(run, key="loss"):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def saved(run, which="latest"):
    return torch.load(checkpoint.find(run, which), weights_only=True)


def weights(run):
    return saved(run)["model"]


def same_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def launch(processes, *arguments):
    """train.py as a command: under torchrun for several processes. Returns the finished process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *(torchrun if processes > 1 else []), "train.py", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


def refused(capsys, call, *parts):
    """The call exits with 2 and its message has all parts."""
    with pytest.raises(SystemExit) as stop:
        call()
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert all(part in message for part in parts), message
    assert "Traceback" not in message


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
    assert set(state["model"]) == set(GPT(Config(**config)).state_dict())


def test_best_checkpoint_is_the_best_validation(train):
    run = train("run", "--max_iters=12")
    validation = metrics(run, "val_loss")
    best = saved(run, "best")
    assert best["val_loss"] == min(validation.values()) == validation[best["step"]]


@pytest.mark.parametrize("variant", ["softmax", "lssar_p15", "ssmax"])
def test_accumulation_splits_agree(train, variant):
    whole = train("whole", f"configs/{variant}.py")
    for size in (4, 1):
        split = train(f"split{size}", f"configs/{variant}.py", f"--batch_size={size}")
        for key in ("loss", "val_loss", "grad_norm"):
            assert metrics(split, key) == pytest.approx(metrics(whole, key), rel=1e-5)
        for name, tensor in weights(whole).items():
            assert torch.allclose(weights(split)[name], tensor, atol=1e-4), name


def test_two_processes_agree_with_one(train, shards, tmp_path):
    one = train("one", "configs/ssmax.py")
    common = [f"--data_dir={shards}", "configs/ssmax.py"]
    for size in (4, 2):  # with and without accumulation
        two = tmp_path / f"two{size}"
        done = launch(2, *SMALL, *common, f"--out_dir={two}", f"--batch_size={size}")
        assert done.returncode == 0, done.stderr
        for key in ("loss", "val_loss", "grad_norm"):
            assert metrics(two, key) == pytest.approx(metrics(one, key), rel=1e-5)
        for name, tensor in weights(one).items():
            assert torch.allclose(weights(two)[name], tensor, atol=1e-4), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_equals_uninterrupted_bit_for_bit(train, optimizer):
    arguments = ("configs/lssar_p3.py", f"--optimizer={optimizer}")
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
    assert len(lines) == len({(json.loads(x)["step"], "val_loss" in x) for x in lines})


def test_a_finished_run_resumed_stays_as_it_is(train):
    run = train("run")
    before = weights(run), (run / "metrics.jsonl").read_text()
    train("run", "--resume")
    assert same_weights(weights(run), before[0])
    assert (run / "metrics.jsonl").read_text() == before[1]


def test_an_existing_run_is_never_overwritten(train, capsys):
    run = train("run")
    refused(capsys, lambda: train("run"), str(run), "--resume", "--out_dir")
    refused(capsys, lambda: train("run", "--resume", "--n_layer=1"), "n_layer = 2", "--init_from")


def test_resume_without_a_checkpoint_is_refused(train, capsys):
    refused(capsys, lambda: train("new", "--resume"), "new: no checkpoint in it")


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
    refused(capsys, lambda: train("third", "--n_embd=64", f"--init_from={first}"), "another one")


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
    refused(capsys, data(folder), "text_train_000001.bin", "cut short")
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


def test_devices_are_refused_by_name(train, capsys):
    refused(capsys, lambda: train("run", "--device=gpu"), "'gpu'", "'cuda'")
    if not torch.cuda.is_available():
        refused(capsys, lambda: train("run", "--device=cuda:7"), "cuda:7", "not on this machine")


def test_help(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    train_module.main()
    text = capsys.readouterr().out
    assert "--learning_rate=0.0006" in text and "--total_batch_size=524288" in text


def test_schedules():
    base = dict(learning_rate=1.0, min_lr=0.1, warmup_iters=10, max_iters=110)
    cosine = Config(**base)
    assert optim.learning_rate(0, cosine) == pytest.approx(0.1)
    assert optim.learning_rate(9, cosine) == train_module.learning_rate(10, cosine) == 1.0
    assert optim.learning_rate(60, cosine) == pytest.approx(0.55)
    assert optim.learning_rate(110, cosine) == pytest.approx(0.1)
    constant = Config(**base, schedule="constant")
    assert optim.learning_rate(109, constant) == 1.0
    trapezoidal = Config(**base, schedule="trapezoidal", cooldown_iters=50)
    assert optim.learning_rate(60, trapezoidal) == 1.0
    assert optim.learning_rate(85, trapezoidal) == pytest.approx(0.55)
    assert optim.learning_rate(110, trapezoidal) == pytest.approx(0.1)


def test_muon_takes_the_trunks_matrices_only():
    config = load_config([*SMALL, "--optimizer=muon"])
    model = GPT(config)
    muon, adamw = optim.build_optimizers(model, config)
    matrices = [p for group in muon.param_groups for p in group["params"]]
    assert len(matrices) == 4 * config.n_layer
    assert all(p.dim() == 2 and p is not model.wte.weight for p in matrices)
    decay = {group["weight_decay"] for group in adamw.param_groups}
    assert decay == {config.weight_decay, 0.0}


def test_mfu_is_silent_where_the_peak_is_unknown():
    assert device.peak_flops(torch.device("cpu")) is None


def test_wandb_offline_says_how_to_sync_and_resumes_the_same_run(train, capsys, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run = train("run", "--wandb_mode=offline", "--max_iters=3")
    assert "wandb sync" in capsys.readouterr().out
    assert list(run.glob("wandb/offline-run-*/*.wandb"))
    identity = json.loads((run / "wandb.json").read_text())["id"]
    train("run", "--wandb_mode=offline", "--resume")
    assert json.loads((run / "wandb.json").read_text())["id"] == identity
    assert len(list(run.glob(f"wandb/offline-run-*-{identity}*"))) >= 1


def test_disabled_wandb_is_not_imported(shards, tmp_path):
    (tmp_path / "wandb.py").write_text("raise RuntimeError('imported')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "train.py", *SMALL, "--max_iters=1", f"--data_dir={shards}"]
    done = subprocess.run(
        [*command, f"--out_dir={tmp_path / 'run'}"], cwd=ROOT, env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr
