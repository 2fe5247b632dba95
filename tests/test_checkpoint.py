"""A run's folder: which checkpoints are kept, damage, failed writes, and what is refused."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch

from errors import UserError
from model import GPT
from runtime import checkpoint, files
from tests.runs import assert_same_run, metrics, refused, saved


def test_resuming_reads_each_tensor_once(train, monkeypatch):
    """Straight from the file's pages into the parameters: there is no other copy in memory."""
    train("run", "--max_iters=3")
    real, sources = GPT.load_state_dict, []

    def mapped_file(tensor):
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start <= tensor.data_ptr() < end:
                return line.split()[-1]

    def load(self, state):
        sources.extend(mapped_file(tensor) for tensor in state.values())
        assert state["wte.weight"].data_ptr() == state["lm_head.weight"].data_ptr()
        return real(self, state)

    monkeypatch.setattr(GPT, "load_state_dict", load)
    train("run", "--resume")
    assert sources and all(source.endswith("step_000003.pt") for source in sources)


def test_which_checkpoints_are_kept(train):
    folder = train("run", "--max_iters=14", "--checkpoint_interval=2", "--keep_every=6")
    names = [f"step_{step:06d}.pt" for step in (0, 6, 12, 14)]
    best = f"best_{saved(folder, 'best')['step']:06d}.pt"
    assert sorted(checkpoint.read_index(folder)) == sorted([*names, best])
    assert sorted(path.name for path in folder.glob("*.pt")) == sorted([*names, best])
    train("run", "--max_iters=16", "--checkpoint_interval=2", "--keep_last=1", "--resume")
    assert [path.name for path in folder.glob("step_*.pt")] == ["step_000016.pt"]


def test_best_checkpoint_is_the_best_validation(train):
    run = train("run", "--max_iters=12")
    validation = metrics(run, "val_loss")
    best = saved(run, "best")
    assert best["val_loss"] == min(validation.values()) == validation[best["step"]]


def test_checkpoints_without_their_index_are_not_overwritten(train, capsys):
    folder = train("run")
    (folder / "checkpoints.json").unlink()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    refused(capsys, lambda: train("run"), "step_000006.pt", "checkpoints.json is missing")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def damaged(path, how):
    data = bytearray(path.read_bytes())
    if how == "a bit flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif how == "cut short":
        path.write_bytes(data[:-1000])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["a bit flipped", "cut short", "empty", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(train, capsys, how):
    whole = train("whole", "--max_iters=9")
    folder = train("run")
    damaged(folder / "step_000006.pt", how)
    capsys.readouterr()
    train("run", "--max_iters=9", "--resume")
    captured = capsys.readouterr()
    assert "warning: " in captured.err and "step_000006.pt is damaged: " in captured.err
    assert "step 4/9" in captured.out and "step 3/9: loss" not in captured.out
    assert_same_run(folder, whole)
    damaged(folder / "step_000006.pt", how)
    damaged(folder / "step_000009.pt", how)
    both = ("all its checkpoints (latest) are damaged: step_000009.pt, step_000006.pt",)
    refused(capsys, lambda: train("run", "--max_iters=12", "--resume"), *both)
    damaged(checkpoint.find(folder, "best"), how)
    with pytest.raises(UserError, match="best"):
        checkpoint.load_weights(GPT(checkpoint.read_config(folder)), folder, "best")


def test_nothing_that_is_loaded_runs_code(train, tmp_path, capsys):
    folder = train("run")

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    file = folder / "step_000006.pt"
    torch.save({"model": Evil(), "step": 6, "config": {}}, file)
    digest = files.sha256_of(file)
    index = {file.name: {"bytes": file.stat().st_size, "sha256": digest}}
    (folder / "checkpoints.json").write_text(json.dumps(index))
    refused(capsys, lambda: train("run", "--resume"), "step_000006.pt", "cannot be read")
    assert not (tmp_path / "evil").exists()
    torch.load(file, weights_only=False)  # the trap itself works
    assert (tmp_path / "evil").exists()


def test_what_is_no_run_is_not_overwritten(train, capsys, monkeypatch):
    """A foreign config.json, the records of a run whose checkpoints are gone."""
    folder = train("run", "--max_iters=2")
    records = (folder / "metrics.jsonl").read_text()
    refused(capsys, lambda: train("run", "--resume", "--max_iters=1"), "has 2 steps")
    for path in (*folder.glob("*.pt"), folder / "checkpoints.json"):
        path.unlink()
    refused(capsys, lambda: train("run"), "metrics.jsonl belongs to no run")
    assert (folder / "metrics.jsonl").read_text() == records
    (folder / "metrics.jsonl").unlink()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    refused(capsys, lambda: train("run"), "config.json belongs to no run")
    assert "gpt2" in (folder / "config.json").read_text()
    (folder / "config.json").unlink()
    train("run", "--max_iters=1")
    # the same job, started again, replaces what it left before its first checkpoint
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    again = train("again", "--max_iters=1")
    for path in (*again.glob("*.pt"), again / "checkpoints.json"):
        path.unlink()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train("again", "--max_iters=2")
    assert list(metrics(again)) == [1, 2]


def test_saving_goes_on_beside_the_training_in_order(tmp_path, monkeypatch):
    """The second save waits for the first, the caller only for its copy."""
    gate, written = threading.Event(), []
    real = torch.save

    def slowly(state, file):
        gate.wait(10)
        written.append(state["step"])
        real(state, file)

    monkeypatch.setattr(torch, "save", slowly)
    tensor = torch.zeros(3)
    with checkpoint.Saver(tmp_path, keep_last=2, keep_every=0) as saver:
        saver.save("step", {"step": 1, "model": {"w": tensor}, "config": {}})
        tensor += 1  # training goes on
        assert written == [] and not checkpoint.exists(tmp_path)
        threading.Timer(0.2, gate.set).start()
        saver.save("step", {"step": 2, "model": {"w": tensor}, "config": {}})
        assert written[0] == 1 and checkpoint.find(tmp_path).name == "step_000001.pt"
    assert written == [1, 2]
    for step, value in ((1, 0.0), (2, 1.0)):
        state = checkpoint.load(tmp_path / f"step_{step:06d}.pt")
        assert torch.equal(state["model"]["w"], torch.full((3,), value))


@pytest.mark.parametrize("when", ["rename", "index"])
def test_a_failed_write_ends_the_run_loudly(train, capsys, monkeypatch, when):
    folder = train("run", "--max_iters=3")
    before = checkpoint.newest_first(checkpoint.read_index(folder), "step")
    real = os.replace

    def fail(source, target):
        if Path(target).name == ("step_000006.pt" if when == "rename" else "checkpoints.json"):
            raise OSError(28, "No space left on device")
        return real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        resume = lambda: train("run", "--max_iters=1000", "--resume")  # noqa: E731
        refused(capsys, resume, "000006.pt: No space left on device; this checkpoint needs")
    assert checkpoint.newest_first(checkpoint.read_index(folder), "step") == before
    assert len(metrics(folder)) < 100
    train("run", "--resume")
    assert sorted(metrics(folder)) == list(range(1, 7))
