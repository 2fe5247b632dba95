"""The device: refusals, and what is recorded of it."""

import json
import subprocess
from contextlib import contextmanager

import pytest
import torch

from config import Config
from errors import UserError
from runtime import checkpoint, device


def test_devices_are_refused_by_name(train, refused):
    for name in ("gpu", "cuda:70", "cpu:1"):
        says = f"device = '{name}'; this machine has"
        refused(train, "run", f"--device={name}", says=(says, "cpu"))


def test_mps_takes_one_process(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="device = 'mps' takes one process, not 2"):
        device.open_device("auto" if torch.cuda.device_count() == 0 else "mps")


def test_bfloat16_is_automatic_only_where_the_named_gpu_computes_it(monkeypatch):
    """A T4 emulates it: cuda:0 here, and the current device."""
    current = [0]

    @contextmanager
    def using(gpu):
        current.append(gpu.index)
        yield
        current.pop()

    def supported(including_emulation=True):
        return including_emulation or current[-1] == 1

    monkeypatch.setattr(torch.cuda, "device", using)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert device.pick_dtype("auto", torch.device("cuda", 0)) == torch.float16
    assert device.pick_dtype("auto", torch.device("cuda", 1)) == torch.bfloat16
    assert not device.pick_compile(None, torch.device("cuda"), slow=True)


def git(folder, *command):
    subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository of one file, instead of this one."""
    root = tmp_path / "repository"
    root.mkdir()
    (root / "model.py").write_text("one\ntwo\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    git(root, "init")
    git(root, "add", "model.py")
    git(root, *author, "commit", "-m", "first")
    monkeypatch.setattr(device, "ROOT", root)
    return root


def test_a_run_keeps_the_changes_that_its_commit_has_not(repository, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    checkpoint.write_header(run, Config(), {}, None)
    assert not device.environment()["modified"]
    assert (run / "uncommitted.patch").read_bytes() == b""
    changed = b"one\nthree\xff\n"  # a diff is bytes, whatever a file holds
    (repository / "model.py").write_bytes(changed)
    (repository / "notes.txt").write_text("not tracked")
    (repository / "mine.py").write_text("attention = 'mine'\n")
    checkpoint.write_header(run, Config(), {}, None)
    saved = json.loads((run / "environment.json").read_text())
    assert saved["modified"]
    assert saved["commit"] == device.environment()["commit"]
    (repository / "mine.py").unlink()
    git(repository, "checkout", "model.py")
    git(repository, "apply", run / "uncommitted.patch")
    assert (repository / "model.py").read_bytes() == changed
    assert (repository / "mine.py").read_text() == "attention = 'mine'\n"
