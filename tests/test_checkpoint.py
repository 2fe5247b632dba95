"""A run's folder: which checkpoints are kept, damage, failed writes, and what is refused."""

import json
import os
import shutil
import threading
from contextlib import contextmanager

import pytest
import torch

from config import Config
from errors import UserError
from runtime import checkpoint
from tests.runs import metrics, saved


def test_which_checkpoints_are_kept(train):
    folder = train("run", "--max_iters=14", "--checkpoint_interval=2", "--keep_every=6")
    names = ["best.pt", *(f"step_{step:06d}.pt" for step in (0, 6, 12, 14))]
    assert sorted(path.name for path in folder.glob("*.pt")) == names
    validation, best = metrics(folder, "val_loss"), saved(folder, "best")
    assert best["best_val_loss"] == min(validation.values()) == validation[best["step"]]
    # of a run that is resumed earlier, damaged checkpoints that came later do not stay
    (folder / "step_000014.pt").write_bytes(b"damaged")
    train("run", "--max_iters=15", "--checkpoint_interval=6", "--keep_every=6", "--resume")
    names[-1] = "step_000015.pt"
    assert sorted(path.name for path in folder.glob("*.pt")) == names
    train("run", "--max_iters=16", "--keep_every=0", "--keep_last=1", "--resume")
    assert sorted(path.name for path in folder.glob("*.pt")) == ["best.pt", "step_000016.pt"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(train, capsys, refused):
    folder = train("run")
    file = folder / "step_000006.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    capsys.readouterr()
    train("run", "--max_iters=7", "--resume")
    captured = capsys.readouterr()
    assert "warning: " in captured.err and "step_000006.pt is damaged: the check" in captured.err
    assert "step 4/7" in captured.out and "step 3/7: loss" not in captured.out
    for file in folder.glob("*.pt"):
        os.truncate(file, 1000)
    refused(train, "run", "--resume", says="007.pt is damaged, and no earlier")
    with pytest.raises(UserError, match="best"):
        checkpoint.find(folder, "best")


def test_a_checkpoint_without_its_folder_is_usable(train, tmp_path, refused):
    """Its settings are in the file."""
    run = train("run", "--max_iters=4")
    alone = tmp_path / "copied" / "mine.pt"
    alone.parent.mkdir()
    shutil.copy(run / "step_000004.pt", alone)
    began = train("began", "--max_iters=1", f"--init_from={alone}")
    began_with = json.loads((began / "began_with.json").read_text())
    assert began_with == checkpoint.find(run).id == checkpoint.find(alone).id
    copied = checkpoint.read_config(alone)
    assert copied == checkpoint.read_config(run).replace(out_dir=str(alone.parent))
    assert checkpoint.find(run / "step_000003.pt").id["step"] == 3
    content = torch.load(alone, weights_only=True, mmap=False)
    content["model"]["wte.weight"] = None
    torch.save(content, alone)
    refused(train, "new", f"--init_from={alone}", says=("mine.pt is damaged", "NoneType"))


def test_what_is_no_run_is_said_in_its_own_words(train, tmp_path, refused):
    run = train("run", "--max_iters=1")
    for wrong, near in ((tmp_path / "runn", run), (run / "step_02.pt", run / "step_000001.pt")):
        refused(train, "new", f"--init_from={wrong}", says=f"did you mean {near}?")
    refused(train, "none", "--resume", says="no checkpoint in it; a run is")
    refused(train, "new", str(run / "step_000001.pt"), says="no config file (.py); give a run by")
    assert not (tmp_path / "none").exists()


def test_nothing_that_is_loaded_runs_code(train, tmp_path, capsys):
    folder = train("run")

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    file = folder / "step_000006.pt"
    torch.save({"model": Evil(), "step": 6, "config": {}}, file)
    capsys.readouterr()
    train("run", "--resume", "--max_iters=3")
    assert "step_000006.pt is damaged: " in capsys.readouterr().err
    assert not (tmp_path / "evil").exists()
    torch.load(file, weights_only=False)  # the trap itself works
    assert (tmp_path / "evil").exists()


def test_what_is_no_run_is_not_overwritten(train, refused):
    """A foreign config.json, the records of a run whose checkpoints are gone."""
    folder = train("run", "--max_iters=0")
    (folder / "step_000000.pt").unlink()  # ended before its first checkpoint: it starts again
    train("run", "--max_iters=4")
    records = (folder / "metrics.jsonl").read_text()
    refused(train, "run", says="holds a run")
    for path in folder.glob("step*.pt"):
        path.unlink()
    refused(train, "run", says="metrics.jsonl belongs to no run")
    assert (folder / "metrics.jsonl").read_text() == records
    (folder / "metrics.jsonl").unlink()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    refused(train, "run", says="config.json belongs to no run")
    assert "gpt2" in (folder / "config.json").read_text()


def test_saving_goes_on_beside_the_training_in_order(tmp_path, monkeypatch):
    """The second save waits for the first, the caller only for its copy."""
    gate, written, real = threading.Event(), [], checkpoint.atomic_write

    @contextmanager
    def slowly(path):
        gate.wait(10)
        written.append(path.name)
        with real(path) as file:
            yield file

    monkeypatch.setattr(checkpoint, "atomic_write", slowly)
    tensor = torch.zeros(3)

    def state(step):
        return checkpoint.State(model={"w": tensor}, step=step, config={})

    with checkpoint.Saver(tmp_path, Config(), None) as saver:
        saver.save("step", state(1))
        tensor += 1  # training goes on
        assert written == [] and not checkpoint.checkpoints(tmp_path)
        threading.Timer(0.2, gate.set).start()
        saver.save("step", state(2))
        assert checkpoint.checkpoints(tmp_path)[-1].name == written[0] == "step_000001.pt"
    assert len(written) == 2
    for step, value in ((1, 0.0), (2, 1.0)):
        loaded = checkpoint.load(tmp_path / f"step_{step:06d}.pt")
        assert torch.equal(loaded.model["w"], torch.full((3,), value))


def test_a_schedule_that_has_lowered_the_rate_is_not_changed(train, refused):
    settings = ("--schedule=cosine", "--warmup_iters=1")
    folder = train("cosine", *settings)
    more = (*settings, "--resume", "--max_iters=12")
    refused(train, "cosine", *more, says=("max_iters = 6, so it", "with 12", "init_from"))
    # a setting that a checkpoint does not know had its default
    content = torch.load(folder / "step_000006.pt", weights_only=True)
    del content["config"]["window"]
    torch.save(content, folder / "step_000006.pt")
    same = (*settings, "--resume")
    refused(train, "cosine", *same, "--window=8", says="window = None, so it cannot")
    refused(train, "cosine", *same, "--learning_rate=1", says="learning_rate = 0.01, so it cannot")
    train("cosine", *same)
    run = train("steady", "--schedule=trapezoidal")
    steady = ("--schedule=trapezoidal", "--resume", "--max_iters=9")
    train("steady", *steady, "--cooldown_iters=3")
    assert list(metrics(run, "lr").values())[5:] == pytest.approx([1e-2, 1e-2, 2e-2 / 3, 1e-2 / 3])
    refused(train, "steady", *steady, "--max_iters=20", says="max_iters = 9, so it")
