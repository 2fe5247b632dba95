"""metrics.jsonl, printed lines and wandb, with wandb's own client."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from config import Config
from runtime import checkpoint
from runtime.log import Log
from tests.faults import arguments, finish, run, start
from tests.helpers import SMALL
from tests.runs import (
    TIMES,
    assert_same_run,
    go_on,
    lines,
    metrics,
    refused,
    steps_logged,
    wait_for,
)
from tests.wandb_server import wandb_server

ROOT = Path(__file__).parent.parent


def test_a_loss_spike_is_said_with_its_batch(tmp_path, capsys):
    config = Config(wandb_mode="disabled", log_interval=10**6)
    values = dict(lr=1.0, grad_norm=1.0, seconds=1.0, tokens=1, mfu=None, memory_mb=1.0)
    where = "in shard_{} at token 7".format

    def log_steps(first, losses):
        with Log(tmp_path, "id", config, first, where, quiet=False) as log:
            for step, loss in enumerate(losses, first + 1):
                log.step(step=step, loss=loss, **values)

    log_steps(0, [3 + 0.01 * (-1) ** i for i in range(200)])
    assert "spike" not in capsys.readouterr().out
    log_steps(200, [3.05, 3.0, 3.08])  # after a resume it still knows them
    out = capsys.readouterr().out
    assert out.count("spike") == 1 and "step 203: loss spike, 3.0800" in out
    assert "the batch begins in shard_203 at token 7" in out
    # independently: (3.08 - mean) / deviation of the 202 losses before
    assert metrics(tmp_path, "spike") == {203: pytest.approx(7.5, abs=0.5)}


def test_wandb_offline_says_how_to_sync_and_resumes_the_same_run(shards, tmp_path):
    # in processes of their own: wandb leaves its service behind in the one that uses it
    folder, output = tmp_path / "run", tmp_path / "output"
    command = arguments(shards, folder, "--wandb_mode=offline")
    assert run([*command, "--max_iters=3"], output=output) == 0
    assert "wandb sync" in output.read_text()
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))
    identity = wandb_id(folder)
    assert run([*command, "--resume"], output=output) == 0
    assert wandb_id(folder) == identity
    assert len(list(folder.glob(f"wandb/offline-run-*-{identity}*"))) >= 1


@pytest.mark.parametrize("how", ["pipe", "disk"])
def test_lost_output_does_not_end_a_run(shards, tmp_path, how):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    assert run(arguments(shards, folder), output_lost=how) == 0
    assert run(arguments(shards, whole)) == 0
    assert_same_run(folder, whole)


def test_a_full_disk_ends_the_run_with_a_sentence(train, capsys, monkeypatch):
    real = Log.step

    def full(log, **values):
        if values["step"] == 3:
            log.file = open("/dev/full", "w")
        real(log, **values)

    with monkeypatch.context() as patch:
        patch.setattr(Log, "step", full)
        refused(capsys, lambda: train("run"), "No space left on device; if the disk is full, free")
    train("run", "--resume")


def test_disabled_wandb_is_not_imported(shards, tmp_path):
    (tmp_path / "wandb.py").write_text("raise RuntimeError('imported')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "train.py", *SMALL, "--max_iters=1", f"--data_dir={shards}"]
    done = subprocess.run(
        [*command, f"--out_dir={tmp_path / 'run'}"], cwd=ROOT, env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr


def wandb_id(folder):
    return json.loads((folder / "wandb.json").read_text())["id"]


def wandb_rows(runs, identity):
    """What wandb's server holds of a run, all but times and memory."""
    return [
        {k: v for k, v in row.items() if k not in TIMES | {"_runtime", "_timestamp"}}
        for row in runs.history(identity)
    ]


def rows_of(folder):
    """metrics.jsonl with one row for every step, as wandb shows it."""
    rows = {}
    for line in lines(folder):
        rows.setdefault(line["step"], {"_step": line["step"]}).update(line)
    return list(rows.values())


@pytest.mark.parametrize("ahead", [True, False])
def test_a_killed_run_goes_on_in_wandb_without_gap_or_duplicate(shards, tmp_path, ahead):
    """Killed when wandb's server has steps that the checkpoint has not, and the other way round."""
    folder = tmp_path / "run"
    command = arguments(
        shards, folder, "--wandb_mode=online", "--checkpoint_interval=5", "--max_iters=14"
    )
    with wandb_server() as (runs, environment):
        environment["WANDB__FILE_STREAM_TRANSMIT_INTERVAL"] = "1" if ahead else "60"  # seconds

        def killed_after(steps):
            process = start([*command, *go_on(folder)], environment=environment, stuck_at=steps)
            wait_for(lambda: steps_logged(folder) == steps)
            held, identity = checkpoint.step(folder), wandb_id(folder)
            if ahead:
                wait_for(lambda: len(runs.history(identity)) > held + 1)
            else:
                assert len(runs.history(identity)) <= held
            process.kill()
            finish(process)
            return identity

        assert killed_after(8) == killed_after(13)
        assert run([*command, "--resume"], environment=environment) == 0
        (identity,) = runs.configs
        assert wandb_rows(runs, identity) == rows_of(folder)
        assert [row["_step"] for row in wandb_rows(runs, identity)] == list(range(15))


def test_a_run_kept_offline_is_whole_in_wandb_once_uploaded(shards, tmp_path):
    """Killed and resumed before it is uploaded: one run; after that: another that is whole."""
    folder, ids = tmp_path / "run", []
    command = arguments(shards, folder, "--wandb_mode=offline")
    with wandb_server() as (runs, environment):
        for steps in (12, 20):
            end = [*command, f"--max_iters={steps}", "--log_interval=100"]
            process = start([*end, *go_on(folder)], stuck_at=steps - 4)
            wait_for(lambda n=steps - 4: steps_logged(folder) == n)
            process.kill()
            finish(process)
            assert run([*end, "--resume"], output=tmp_path / "output") == 0
            parts = list(folder.glob("wandb/offline-run-*"))
            *_, told = re.findall("wandb sync (.*)", (tmp_path / "output").read_text())
            assert told in map(str, parts)
            sync = [sys.executable, "-m", "wandb", "sync", *map(str, parts)]
            env = os.environ | environment
            done = subprocess.run(sync, cwd=tmp_path, env=env, capture_output=True)
            assert done.returncode == 0, done
            ids.append(wandb_id(folder))
            assert list(runs.configs) == ids
            assert wandb_rows(runs, ids[-1]) == rows_of(folder)


def test_progress_is_a_line_now_and_then(tmp_path, capsys, monkeypatch):
    config = Config(wandb_mode="disabled")
    with Log(tmp_path, "id", config, None, str, quiet=False) as log:
        assert list(log.progress("abc", 3, "validation")) == ["a", "b", "c"]
        assert capsys.readouterr() == ("", "")  # it took less than a minute
        monkeypatch.setattr("runtime.log.PROGRESS_S", 0)
        list(log.progress("ab", 2, "validation"))
        assert "validation: 1 of 2 batches, 0:00:00 left" in capsys.readouterr().out
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        assert list(log.progress("ab", 2, "validation")) == ["a", "b"]
        assert capsys.readouterr() == ("", "")  # a bar appears after two seconds
    with Log(tmp_path, "id", config, None, str, quiet=True) as log:
        assert list(log.progress("ab", 2, "validation")) == ["a", "b"]
        assert capsys.readouterr() == ("", "")
