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

    monkeypatch.setattr(torch.cuda, "device", using)
    supported = lambda including_emulation=True: including_emulation or current[-1] == 1  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    chosen = [device.pick_dtype("auto", torch.device("cuda", index)) for index in range(2)]
    assert chosen == [torch.float16, torch.bfloat16]
    assert not device.pick_compile(None, torch.device("cuda"), slow=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository of one file in the place of this one."""
    root = tmp_path / "repository"
    root.mkdir()
    (root / "model.py").write_text("one\ntwo\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init"], ["add", "model.py"], [*who, "commit", "-m", "first"]):
        subprocess.run(["git", *command], cwd=root, check=True, capture_output=True)
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
    assert saved["modified"] and saved["commit"] == device.environment()["commit"]
    (repository / "mine.py").unlink()
    for command in (["checkout", "model.py"], ["apply", str(run / "uncommitted.patch")]):
        subprocess.run(["git", *command], cwd=repository, check=True, capture_output=True)
    assert (repository / "model.py").read_bytes() == changed
    assert (repository / "mine.py").read_text() == "attention = 'mine'\n"
