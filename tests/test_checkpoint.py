"""A run's folder: which checkpoints are kept, damage, failed writes, and what is refused."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from errors import UserError
from model import GPT
from runtime import checkpoint
from tests.runs import metrics, refused, saved, vouch_for


def test_which_checkpoints_are_kept(train):
    folder = train("run", "--max_iters=14", "--checkpoint_interval=2", "--keep_every=6")
    names = [f"step_{step:06d}.pt" for step in (0, 6, 12, 14)]
    best = f"best_{saved(folder, 'best')['step']:06d}.pt"
    assert sorted(checkpoint.read_index(folder).checkpoints) == sorted([*names, best])
    assert sorted(path.name for path in folder.glob("*.pt")) == sorted([*names, best])
    # those of every 6 steps stay, whatever a resumed run says
    train("run", "--max_iters=16", "--keep_last=1", "--resume")
    assert sorted(path.name for path in folder.glob("step_*.pt")) == [*names[:3], "step_000016.pt"]


def test_best_checkpoint_is_the_best_validation(train):
    run = train("run", "--max_iters=12")
    validation = metrics(run, "val_loss")
    best = saved(run, "best")
    assert best["best_val_loss"] == min(validation.values()) == validation[best["step"]]


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


@pytest.mark.parametrize("how", ["a bit flipped", "cut short", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(train, capsys, how):
    folder = train("run")
    damaged(folder / "step_000006.pt", how)
    capsys.readouterr()
    train("run", "--max_iters=7", "--resume")
    captured = capsys.readouterr()
    assert "warning: " in captured.err and "step_000006.pt is damaged: " in captured.err
    assert "step 4/7" in captured.out and "step 3/7: loss" not in captured.out
    damaged(folder / "step_000007.pt", how)
    damaged(folder / "step_000006.pt", how)
    both = "damaged, and no earlier one is left: step_000007.pt, step_000006.pt"
    refused(capsys, lambda: train("run", "--max_iters=12", "--resume"), both)
    damaged(checkpoint.find(folder, "best").path, how)
    with pytest.raises(UserError, match="best"):
        checkpoint.load_weights(GPT(checkpoint.read_config(folder)), folder, "best")


def test_a_checkpoint_without_its_folder_is_usable(train, tmp_path, capsys):
    """Its settings are in the file."""
    run = train("run", "--max_iters=4")
    alone = tmp_path / "copied" / "mine.pt"
    alone.parent.mkdir()
    shutil.copy(run / "step_000004.pt", alone)
    began = train("began", "--max_iters=1", f"--init_from={alone}")
    began_with = json.loads((began / "began_with.json").read_text())
    assert began_with == checkpoint.find(run).id == checkpoint.find(alone).id
    assert checkpoint.read_config(alone) == checkpoint.read_config(run)
    assert checkpoint.find(run / "step_000003.pt").step == 3
    with pytest.raises(UserError, match=r"mine\.pt is one checkpoint"):
        checkpoint.find(alone, "best")
    damaged(alone, "cut short")
    refused(capsys, lambda: train("new", f"--init_from={alone}"), "mine.pt: the checkpoint cannot")


def test_what_is_no_run_is_said_in_its_own_words(train, tmp_path, capsys):
    run = train("run", "--max_iters=1")
    (tmp_path / "empty").mkdir()
    for path, says in (
        (tmp_path / "runn", f"did you mean {os.path.relpath(run)}?"),
        (run / "step_000002.pt", f"did you mean {os.path.relpath(run / 'step_000001.pt')}?"),
        (tmp_path / "empty", "no checkpoint in it"),
    ):
        refused(capsys, lambda path=path: train("new", f"--init_from={path}"), says)
    refused(capsys, lambda: train("empty", "--resume"), "no checkpoint in it")
    assert not (tmp_path / "runn").exists()


def test_nothing_that_is_loaded_runs_code(train, tmp_path, capsys):
    folder = train("run")

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    file = folder / "step_000006.pt"
    torch.save({"model": Evil(), "step": 6, "config": {}}, file)
    vouch_for(file)
    refused(capsys, lambda: train("run", "--resume"), "step_000006.pt", "cannot be read")
    assert not (tmp_path / "evil").exists()
    torch.load(file, weights_only=False)  # the trap itself works
    assert (tmp_path / "evil").exists()


def test_what_is_no_run_is_not_overwritten(train, capsys):
    """A foreign config.json, the records of a run whose checkpoints are gone."""
    folder = train("run", "--max_iters=4")
    records = (folder / "metrics.jsonl").read_text()
    refused(capsys, lambda: train("run", "--resume", "--max_iters=1"), "has 4 steps")
    for path in folder.glob("*.pt"):
        path.unlink()
    refused(capsys, lambda: train("run"), "holds a run")
    (folder / "checkpoints.json").unlink()
    refused(capsys, lambda: train("run"), "metrics.jsonl belongs to no run")
    assert (folder / "metrics.jsonl").read_text() == records
    (folder / "metrics.jsonl").unlink()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    refused(capsys, lambda: train("run"), "config.json belongs to no run")
    assert "gpt2" in (folder / "config.json").read_text()
    (folder / "config.json").unlink()
    train("run", "--max_iters=1")
    (folder / "metrics.jsonl").write_text("somebody's notes")
    for path in (*folder.glob("*.pt"), folder / "checkpoints.json"):
        path.unlink()
    refused(capsys, lambda: train("run"), "metrics.jsonl belongs to no run")


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(train):
    """By the same command; the best weights of step 0 may be saved already."""
    folder = train("run", "--max_iters=0")
    (folder / "step_000000.pt").unlink()
    vouch_for(folder / "best_000000.pt")
    train("run", "--max_iters=2")
    assert list(metrics(folder)) == [1, 2]


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

    def state(step):
        return checkpoint.State(model={"w": tensor}, step=step, config={})

    with checkpoint.Saver(tmp_path, keep_last=2, keep_every=0) as saver:
        saver.save("step", state(1))
        tensor += 1  # training goes on
        assert written == [] and not checkpoint.exists(tmp_path)
        threading.Timer(0.2, gate.set).start()
        saver.save("step", state(2))
        assert written[0] == 1 and checkpoint.find(tmp_path).path.name == "step_000001.pt"
    assert written == [1, 2]
    for step, value in ((1, 0.0), (2, 1.0)):
        saved_state = checkpoint.load(tmp_path / f"step_{step:06d}.pt")
        assert torch.equal(saved_state.model["w"], torch.full((3,), value))


@pytest.mark.parametrize("when", ["rename", "index"])
def test_a_failed_write_ends_the_run_loudly(train, capsys, monkeypatch, when):
    folder = train("run", "--max_iters=3")
    before = checkpoint.read_index(folder).newest_first("step")
    real = os.replace

    def fail(source, target):
        if Path(target).name == ("step_000006.pt" if when == "rename" else "checkpoints.json"):
            raise OSError(28, "No space left on device")
        return real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        resume = lambda: train("run", "--max_iters=1000", "--resume")  # noqa: E731
        refused(capsys, resume, "000006.pt: this checkpoint cannot be written", "No space left on")
    assert checkpoint.read_index(folder).newest_first("step") == before
    assert len(metrics(folder)) < 100
    train("run", "--resume")
    assert sorted(metrics(folder)) == list(range(1, 7))


def test_a_setting_that_a_checkpoint_does_not_know_had_its_default(train, capsys):
    folder = train("run")
    file = folder / "step_000006.pt"
    content = torch.load(file, weights_only=True)
    del content["config"]["window"]
    torch.save(content, file)
    vouch_for(file)
    resume = ("--resume", "--max_iters=9")
    refused(capsys, lambda: train("run", *resume, "--window=8"), "window = None, so it cannot")
    train("run", *resume)
    assert max(metrics(folder)) == 9
