"""The device: refusals, and what is recorded of it."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from config import Config
from runtime import checkpoint, device
from tests.runs import refused

ROOT = Path(__file__).parent.parent


def test_devices_are_refused_by_name(train, capsys):
    refused(capsys, lambda: train("run", "--device=gpu"), "'gpu'", "'cuda'")
    if not torch.cuda.is_available():
        refused(capsys, lambda: train("run", "--device=cuda:7"), "cuda:7", "not on this machine")


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
    checkpoint.write_header(run, Config())
    assert not device.environment()["modified"] and not (run / "uncommitted.patch").exists()
    changed = b"one\nthree\xff\n"  # a diff is bytes, whatever a file holds
    (repository / "model.py").write_bytes(changed)
    (repository / "notes.txt").write_text("not tracked")
    checkpoint.write_header(run, Config())
    saved = json.loads((run / "environment.json").read_text())
    assert saved["modified"] and saved["commit"] == device.environment()["commit"]
    for command in (["checkout", "model.py"], ["apply", str(run / "uncommitted.patch")]):
        subprocess.run(["git", *command], cwd=repository, check=True, capture_output=True)
    assert (repository / "model.py").read_bytes() == changed
    subprocess.run(["git", "checkout", "model.py"], cwd=repository, check=True)
    checkpoint.write_header(run, Config())  # as when the run is resumed
    assert not (run / "uncommitted.patch").exists()
