"""A run's folder: which checkpoints stay, damage, the order of writes, and what is refused."""

import errno
import json
import os
import shutil
import threading
from concurrent.futures import wait
from contextlib import closing, contextmanager

import pytest
import torch

from config import Config
from errors import UserError
from runtime import checkpoint, files, run_folder
from tests.runs import metrics, saved


def checkpoint_names(folder):
    return sorted(path.name for path in folder.glob("*.pt"))


def test_which_checkpoints_are_kept(train):
    folder = train("run", "--max_iters=14", "--checkpoint_interval=2", "--keep_every=6")
    names = ["best.pt", "step_000000.pt", "step_000006.pt", "step_000012.pt", "step_000014.pt"]
    assert checkpoint_names(folder) == names
    validation = metrics(folder, "val_loss")
    best = saved(folder / "best.pt")
    assert best["best_val_loss"] == min(validation.values())
    assert best["best_val_loss"] == validation[best["step"]]
    # a damaged checkpoint, later than the step that the run is resumed at, is deleted
    (folder / "step_000014.pt").write_bytes(b"damaged")
    train("run", "--max_iters=15", "--checkpoint_interval=6", "--keep_every=6", "--resume")
    names[-1] = "step_000015.pt"
    assert checkpoint_names(folder) == names
    train("run", "--max_iters=16", "--keep_every=0", "--keep_last=1", "--resume")
    assert checkpoint_names(folder) == ["best.pt", "step_000016.pt"]


def test_a_run_that_is_shortened_to_its_checkpoint_is_validated_there(train):
    run = train("run", "--max_iters=4", "--checkpoint_interval=3", "--eval_interval=4")
    (run / "step_000004.pt").unlink()
    train("run", "--max_iters=3", "--checkpoint_interval=3", "--eval_interval=4", "--resume")
    assert list(metrics(run, "val_loss")) == [0, 3]


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(train, capsys, refused):
    folder = train("run")
    file = folder / "step_000006.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    capsys.readouterr()
    train("run", "--max_iters=7", "--resume")
    captured = capsys.readouterr()
    assert "warning: " in captured.err
    assert "step_000006.pt is damaged: the check" in captured.err
    assert "step 4/7" in captured.out
    assert "step 3/7: loss" not in captured.out
    for file in folder.glob("*.pt"):
        os.truncate(file, 1000)
    refused(train, "run", "--resume", says="007.pt is damaged, and no earlier")
    with pytest.raises(UserError, match="best.pt is damaged"):
        checkpoint.find(folder / "best.pt")


def test_a_resumed_run_knows_its_lowest_validation_loss(train):
    """Weights with a higher loss do not replace the best ones."""
    run = train("run", "--max_iters=3")
    path = run / "step_000003.pt"
    state = torch.load(path)
    state["best_val_loss"] = 0.0
    torch.save(state, path)
    best = (run / "best.pt").read_bytes()
    train("run", "--max_iters=6", "--resume")
    assert (run / "best.pt").read_bytes() == best


def test_a_checkpoint_without_its_folder_is_usable(train, tmp_path, refused):
    """Its settings are in the file."""
    run = train("run", "--max_iters=4")
    assert checkpoint.find(run / "step_000003.pt").id["step"] == 3
    alone = tmp_path / "copied" / "mine.pt"
    alone.parent.mkdir()
    shutil.copy(run / "step_000004.pt", alone)
    began = train("began", "--max_iters=1", f"--init_from={alone}")
    began_with = json.loads((began / "environment.json").read_text())["began_with"]
    assert began_with == checkpoint.find(run).id
    assert began_with == checkpoint.find(alone).id
    config = run_folder.read_config(run)
    assert run_folder.read_config(alone) == config.replace(out_dir=str(alone.parent))
    content = torch.load(alone, weights_only=True, mmap=False)
    content["model"]["wte.weight"] = None
    torch.save(content, alone)
    refused(train, "new", f"--init_from={alone}", says=("mine.pt is damaged", "NoneType"))


def test_a_path_that_is_no_run_is_refused_with_the_remedy(train, tmp_path, refused):
    run = train("run", "--max_iters=1")
    file = run / "step_000001.pt"
    misspelt = {
        tmp_path / "runn": run,
        run / "step_02.pt": file,
        run.parent: run,
    }
    for path, near in misspelt.items():
        refused(train, "new", f"--init_from={path}", says=f"did you mean {near}?")
    refused(train, "new", f"--resume={run}", says=f"a space: --resume {run}")
    refused(train, "none", "--resume", says="no checkpoint found; a run is")
    refused(train, "new", str(file), says="is not a config file (.py); to use a run, pass")
    assert not (tmp_path / "none").exists()


def test_a_checkpoint_of_other_code_is_refused_in_a_sentence(train, refused):
    """best.pt as a step, a weight that the model does not have, optimizer states, and a setting."""
    folder = train("run", "--max_iters=3")
    file = folder / "step_000003.pt"
    content = torch.load(file, weights_only=True, mmap=False)
    resume = ("run", "--resume", "--max_iters=4")
    shutil.copy(folder / "best.pt", file)
    refused(train, *resume, says=("does not fit this run: ", "is shorter than"))
    weight = torch.zeros(1)
    torch.save(content | {"model": content["model"] | {"trunk.mine": weight}}, file)
    refused(train, *resume, says=("does not fit this run: ", "trunk.mine"))
    (saved,) = content["optimizers"]
    for state in ({"state": {}}, saved | {"param_groups": [{}, {}]}, saved | {"state": []}):
        torch.save(content | {"optimizers": [state]}, file)
        refused(train, *resume, says="the checkpoint of step 3 does not fit this run: ")
    torch.save(content | {"config": content["config"] | {"dropout": 0.1}}, file)
    refused(train, *resume, says="was trained with dropout = 0.1, so it cannot be resumed")


def test_nothing_that_is_loaded_runs_code(train, tmp_path, capsys):
    folder = train("run")

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    trap = tmp_path / "trap.pt"
    torch.save({"model": Evil(), "step": 6, "config": {}}, trap)
    shutil.copy(trap, folder / "step_000006.pt")
    capsys.readouterr()
    train("run", "--resume", "--max_iters=3")
    assert "step_000006.pt is damaged: " in capsys.readouterr().err
    assert not (tmp_path / "evil").exists()
    torch.load(trap, weights_only=False)  # the trap itself works
    assert (tmp_path / "evil").exists()


def test_what_is_no_run_is_not_overwritten(train, refused):
    """A foreign config.json, and the records of a run without checkpoints."""
    folder = train("run", "--max_iters=0")
    (folder / "step_000000.pt").unlink()  # ended before its first checkpoint: it starts again
    train("run", "--max_iters=4")
    metrics_file = folder / "metrics.jsonl"
    records = metrics_file.read_text()
    refused(train, "run", says="holds a run")
    for path in folder.glob("step*.pt"):
        path.unlink()
    best = (folder / "best.pt").read_bytes()
    refused(train, "run", says="metrics.jsonl belongs to no run")
    refused(train, "run", "--resume=auto", says="metrics.jsonl belongs to no run")
    assert (folder / "best.pt").read_bytes() == best
    assert metrics_file.read_text() == records
    metrics_file.unlink()
    config_file = folder / "config.json"
    config_file.write_text('{"model_type": "gpt2"}')
    refused(train, "run", says="config.json belongs to no run")
    assert "gpt2" in config_file.read_text()


def test_checkpoints_are_written_beside_the_training_in_order(tmp_path, monkeypatch):
    """The second save waits for the first, the caller only for its copy."""
    gate = threading.Event()
    written = []
    real = checkpoint.atomic_write

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

    with closing(checkpoint.Saver(Config(out_dir=str(tmp_path)), None)) as saver:
        saver.save("step", state(1))
        tensor += 1  # training goes on
        assert written == []
        assert not run_folder.checkpoints(tmp_path)
        threading.Timer(0.2, gate.set).start()
        saver.save("step", state(2))
        assert written[0] == "step_000001.pt"
        assert run_folder.checkpoints(tmp_path)[-1].name == "step_000001.pt"
        saver.wait()
    assert len(written) == 2
    first = checkpoint.load(tmp_path / "step_000001.pt")
    assert torch.equal(first.model["w"], torch.zeros(3))
    second = checkpoint.load(tmp_path / "step_000002.pt")
    assert torch.equal(second.model["w"], torch.ones(3))


def fill_disk(monkeypatch, has_no_room):
    """Let the writes of the checkpoints fail for which has_no_room(path) is true."""
    real = checkpoint.atomic_write

    @contextmanager
    def write(path):
        with files.writing(path):
            if has_no_room(path):
                raise OSError(errno.ENOSPC, "No space left on device")
        with real(path) as file:
            yield file

    monkeypatch.setattr(checkpoint, "atomic_write", write)


def empty_state(step):
    return checkpoint.State(model={}, step=step, config={})


def test_a_failed_write_costs_one_checkpoint(tmp_path, monkeypatch, capsys):
    """The disk is full for a while, then for good."""
    full = True
    fill_disk(monkeypatch, lambda path: full)
    with closing(checkpoint.Saver(Config(out_dir=str(tmp_path)), None)) as saver:
        saver.save("step", empty_state(1))
        wait([saver.pending])
        full = False
        saver.save("step", empty_state(2))
        assert "step_000001.pt: cannot be written: No space" in capsys.readouterr().err
        saver.wait()
        assert checkpoint_names(tmp_path) == ["step_000002.pt"]
        full = True
        saver.save("step", empty_state(3))
        saver.save("step", empty_state(4))
        with pytest.raises(UserError, match=r"step_000004.pt: cannot be written"):
            saver.save("step", empty_state(5))
    assert checkpoint_names(tmp_path) == ["step_000002.pt"]


def test_best_weights_do_not_make_up_for_checkpoints_that_fail(tmp_path, monkeypatch):
    """The disk has room for best.pt alone, from which no run can be resumed."""
    fill_disk(monkeypatch, lambda path: path.name != "best.pt")
    with closing(checkpoint.Saver(Config(out_dir=str(tmp_path)), None)) as saver:
        saver.save("step", empty_state(1))
        saver.save("best", empty_state(2))
        saver.save("step", empty_state(3))
        with pytest.raises(UserError, match=r"step_000003.pt: cannot be written"):
            saver.save("best", empty_state(4))
    assert checkpoint_names(tmp_path) == ["best.pt"]


def test_a_step_that_becomes_the_last_one_is_validated_and_saved_again(train):
    """Its checkpoint knows the lowest loss, so no worse weights replace best.pt later."""
    settings = ("--checkpoint_interval=2", "--eval_interval=100", "--keep_last=3")
    folder = train("run", *settings)
    for name in ("best.pt", "step_000006.pt"):
        (folder / name).unlink()
    train("run", *settings, "--keep_last=2", "--max_iters=4", "--resume")
    assert checkpoint_names(folder) == ["best.pt", "step_000002.pt", "step_000004.pt"]
    best = torch.load(folder / "best.pt")
    last = torch.load(folder / "step_000004.pt")
    assert best["step"] == 4
    assert last["best_val_loss"] == best["best_val_loss"] == metrics(folder, "val_loss")[4]


def test_damaged_checkpoints_do_not_displace_intact_ones(train):
    """A damaged checkpoint lies between the one that the run goes on from and its next one."""
    folder = train("run", "--checkpoint_interval=2")
    (folder / "step_000006.pt").write_bytes(b"damaged")
    train("run", "--checkpoint_interval=9", "--max_iters=8", "--resume")
    assert checkpoint_names(folder) == ["best.pt", "step_000004.pt", "step_000008.pt"]


@pytest.mark.parametrize("reader", ["zipfile.ZipFile.testzip", "torch.load"])
def test_a_checkpoint_that_cannot_be_read_for_a_while_is_not_taken_for_damaged(
    train, monkeypatch, refused, reader
):
    """A run that went on from the one before it would delete it."""
    folder = train("run")
    before = checkpoint_names(folder)

    def fail(*arguments, **options):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(reader, fail)
    checkpoint.open_intact.cache_clear()
    says = "step_000006.pt: cannot be read now: [Errno 5] Input/output"
    refused(train, "run", "--resume", "--max_iters=7", says=says)
    assert checkpoint_names(folder) == before


@pytest.mark.parametrize("error", [MemoryError("none left"), RuntimeError("unable to mmap 9")])
def test_memory_that_is_short_is_no_damage(run, monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(torch, "load", fail)
    checkpoint.open_intact.cache_clear()
    with pytest.raises(UserError, match=f"step_000006.pt: cannot be read now: {error}"):
        checkpoint.find(run)


COSINE = ("--schedule=cosine", "--warmup_iters=1")


def test_a_schedule_that_has_lowered_the_rate_is_not_changed(train, refused):
    train("run", *COSINE)
    resume = ("run", *COSINE, "--resume")
    says = ("followed a cosine schedule of 6 steps up to step 6", "--learning_rate=0.001 ")
    refused(train, *resume, "--max_iters=12", "--first_batch=6", says=says)
    says = ("weight_decay = 0.1, so it cannot", "init_from")
    refused(train, *resume, "--weight_decay=1", says=says)
    train(*resume)


def test_a_setting_that_a_checkpoint_does_not_know_had_its_default(train, refused):
    folder = train("run", *COSINE)
    file = folder / "step_000006.pt"
    content = torch.load(file, weights_only=True)
    del content["config"]["window"]
    torch.save(content, file)
    resume = ("run", *COSINE, "--resume")
    refused(train, *resume, "--window=8", says="window = None, so it cannot")
    train(*resume)


def test_a_trapezoidal_schedule_may_be_prolonged_until_its_cooldown(train, refused):
    run = train("run", "--schedule=trapezoidal")
    resume = ("run", "--schedule=trapezoidal", "--resume")
    train(*resume, "--max_iters=9", "--cooldown_iters=3")
    rates = list(metrics(run, "lr").values())
    assert rates[5:] == pytest.approx([1e-2, 1e-2, 2e-2 / 3, 1e-2 / 3])
    refused(train, *resume, "--max_iters=20", says="a trapezoidal schedule of 9 steps up to")
