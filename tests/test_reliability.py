"""No run is ever lost: kills, signals, dead peers, full disks, damage; all of them real."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import train as train_module
from config import Config
from errors import UserError
from model import GPT
from runtime import checkpoint, files
from runtime.distributed import EXIT_STOPPED
from runtime.log import Log
from tests.faults import arguments, finish, group, run, start
from tests.test_train import metrics, refused, saved
from tests.wandb_server import wandb_server

ROOT = Path(__file__).parent.parent
TIMES = {"ms", "tokens_per_s", "memory_mb", "mfu", "save_ms"}


def lines(folder):
    """All of metrics.jsonl but times and memory."""
    text = (folder / "metrics.jsonl").read_text()
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMES}
        for line in text.splitlines()
    ]


def identical(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(identical, a, b))
    return a == b


def assert_same_run(one, other):
    """Bitwise the same weights, optimizer state, best weights and metrics."""
    for which in ("latest", "best"):
        a, b = saved(one, which), saved(other, which)
        for state in (a, b):
            del state["config"]["out_dir"], state["config"]["resume"]
        assert identical(a, b), which
    assert lines(one) == lines(other)


def go_on(folder):
    """What a user adds to the same command: --resume once there is something to resume."""
    return ["--resume"] if checkpoint.exists(folder) else []


def wait_for(condition, timeout=60):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


def steps_logged(folder):
    file = folder / "metrics.jsonl"
    return file.read_text().count('"loss"') if file.exists() else 0


# ---- exact resume ----


@pytest.mark.parametrize("stop", [1, 4])
def test_resumed_is_identical_whatever_is_random(train, monkeypatch, stop):
    """Also what a variant of one's own might draw in a step: here noise on the loss."""
    forward = GPT.forward

    def noisy(self, idx, targets=None, cache=None):
        out = forward(self, idx, targets, cache)
        return out if targets is None else out * torch.rand(())

    monkeypatch.setattr(GPT, "forward", noisy)
    whole = train("whole", "configs/ssmax.py", "--optimizer=muon")
    part = train("part", "configs/ssmax.py", "--optimizer=muon", f"--max_iters={stop}")
    torch.rand(7)  # what else drew from the generator does not matter
    train("part", "configs/ssmax.py", "--optimizer=muon", "--resume")
    text = [line for line in lines(part) if line["step"] != stop or "val_loss" not in line]
    assert text == [line for line in lines(whole) if line in text]
    assert identical(saved(part)["model"], saved(whole)["model"])
    assert identical(saved(part)["optimizers"], saved(whole)["optimizers"])


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


# ---- wandb ----


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


# ---- kill -9 ----


def kills(shards, tmp_path, points, seconds):
    """A run killed at these file operations and after these times, and resumed each time.

    Returns the number of kills; the run is finished in the end.
    """
    folder, count = tmp_path / "killed", 0
    command = arguments(shards, folder, "--checkpoint_interval=2", "--max_iters=12")
    for point in points:
        code = run([*command, *go_on(folder)], kill_at=(point, tmp_path / "notes"))
        assert code in (0, -signal.SIGKILL)
        count += code != 0
    for wait in seconds:
        process = start([*command, *go_on(folder)], slow=0.02)
        time.sleep(wait)
        process.kill()
        count += finish(process) != 0
    assert run([*command, *go_on(folder)]) == 0
    whole = tmp_path / "whole"
    assert run(arguments(shards, whole, "--checkpoint_interval=2", "--max_iters=12")) == 0
    assert_same_run(folder, whole)
    assert not list(folder.glob(".*.tmp"))
    assert sorted(p.name for p in folder.glob("*.pt")) == sorted(checkpoint.read_index(folder))
    return count


def test_killed_and_resumed(shards, tmp_path):
    # file operations up to the end of the third checkpoint that such a start writes
    points = random.Random(0).sample(range(1, 60), 5)
    assert kills(shards, tmp_path, points, [0.5, 0.7]) >= 5


@pytest.mark.long
def test_killed_and_resumed_many_times(shards, tmp_path):
    rng, done = random.Random(1), Counter()
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        points = [rng.randrange(1, 80) for _ in range(6)]
        kills(shards, folder, points, [])
        done.update((folder / "notes").read_text().split())
        folder = tmp_path / f"{attempt}t"
        folder.mkdir()
        done["at a random time"] += kills(shards, folder, [], [rng.random() for _ in range(4)])
    print(f"\nkills of a training run: {done.total()}: {dict(done)}")
    assert done.total() >= 120


def shard_kills(tmp_path, points, shard_size=2000):
    source = tmp_path / "source"
    source.mkdir()
    rng = random.Random(2)
    for number in range(8):
        words = [str(rng.randrange(10**6)) for _ in range(300)]
        (source / f"{number}.txt").write_text(" ".join(words))
    more = [source, "--tokenizer", "bytes", "--shard_size", shard_size, "--workers", 1, "--out_dir"]
    count = 0
    for point in points:
        trouble = {"kill_at": (point, tmp_path / "notes")}
        code = run([*more, tmp_path / "killed"], module="data.text", **trouble)
        assert code in (0, -signal.SIGKILL)
        count += code != 0
    for name in ("killed", "whole"):
        assert run([*more, tmp_path / name], module="data.text") == 0
    contents = [
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir() if file.suffix}
        for name in ("killed", "whole")
    ]
    assert contents[0] == contents[1] and len(contents[0]) > 5
    return count


def test_killed_inside_a_shard_write(tmp_path):
    assert shard_kills(tmp_path, [2, 9, 16]) == 3


@pytest.mark.long
def test_killed_inside_every_part_of_a_shard_write(tmp_path):
    count = shard_kills(tmp_path, range(1, 61), shard_size=250)
    done = Counter((tmp_path / "notes").read_text().split())
    print(f"\nkills while making shards: {count}: {dict(done)}")
    assert count >= 25


# ---- full disks ----


def test_a_full_disk_keeps_the_checkpoint_before(shards, tmp_path):
    folder, output = tmp_path / "run", tmp_path / "output"
    assert run(arguments(shards, folder, "--max_iters=3")) == 0
    before = {path.name: path.read_bytes() for path in folder.glob("*.pt")}
    size = max(map(len, before.values()))
    command = [*arguments(shards, folder), "--resume"]
    # best.pt still fits, the checkpoint does not
    assert run(command, output=output, file_limit=size - 1000) == 2
    message = output.read_text().splitlines()[-1]
    assert "step_000006.pt: File too large; this checkpoint needs " in message
    needed = int(message.split("needs ")[1].split(" bytes")[0].replace(",", ""))
    assert 0.9 * size < needed <= size
    assert "Traceback" not in output.read_text() and "--resume" in message
    for name in ("step_000000.pt", "step_000003.pt"):
        assert (folder / name).read_bytes() == before[name]
    assert checkpoint.find(folder).name == "step_000003.pt"
    assert run(command) == 0
    assert run(arguments(shards, tmp_path / "whole")) == 0
    assert_same_run(folder, tmp_path / "whole")


def test_a_disk_that_is_full_from_the_start_is_said_at_once(shards, tmp_path):
    output = tmp_path / "output"
    command = arguments(shards, tmp_path / "run", "--max_iters=1000000")
    assert run(command, output=output, file_limit=50_000) == 2
    assert "000000.pt: File too large" in output.read_text()


# ---- signals ----


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_saves_and_the_rest_is_identical(shards, tmp_path, name):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    command = arguments(shards, folder, "--max_iters=40", "--checkpoint_interval=1000")
    process = start(command, output=tmp_path / "output", slow=0.05)
    wait_for(lambda: steps_logged(folder) >= 4)
    for _ in range(2):  # torchrun and Slurm may each send it
        os.kill(process.pid, getattr(signal, name))
    assert finish(process) == EXIT_STOPPED == 75
    output = (tmp_path / "output").read_text()
    step = saved(folder)["step"]
    assert f"{name}: saving" in output and f"stopped after step {step}" in output
    assert 4 <= step < 40 and max(metrics(folder)) == step
    assert run([*command, "--resume"]) == 0
    assert run(arguments(shards, whole, "--max_iters=40", "--checkpoint_interval=1000")) == 0
    assert_same_run(folder, whole)


def test_a_second_signal_ends_at_once_even_when_stuck(shards, tmp_path):
    folder = tmp_path / "run"
    process = start(arguments(shards, folder), stuck_at=4, same_request_s=0.5)
    wait_for(lambda: steps_logged(folder) >= 4)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.8)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process, timeout=5) == 128 + signal.SIGTERM
    assert checkpoint.find(folder).name == "step_000003.pt"


# ---- several processes ----


def both(processes):
    return [finish(process) for process in processes]


def test_a_signal_to_one_process_stops_all_and_one_process_goes_on(shards, tmp_path):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    more = ("--max_iters=40", "--checkpoint_interval=1000")
    command = arguments(shards, folder, *more)
    pair, _ = group(command, tmp_path, {0: {"slow": 0.05}})
    wait_for(lambda: steps_logged(folder) >= 4)
    os.kill(pair[1].pid, signal.SIGTERM)
    assert both(pair) == [EXIT_STOPPED] * 2
    assert run([*command, "--resume"]) == 0
    assert run(arguments(shards, whole, *more)) == 0
    for key in ("loss", "val_loss", "grad_norm"):
        assert metrics(folder, key) == pytest.approx(metrics(whole, key), rel=1e-5)
    a, b = saved(folder)["model"], saved(whole)["model"]
    # the keys' biases have no gradient but rounding, of which Adam makes whole steps
    for bias in (x for state in (a, b) for name, x in state.items() if "c_attn.bias" in name):
        bias.view(3, -1)[1] = 0
    assert all(torch.allclose(a[name], b[name], atol=1e-4) for name in a)
    # and the other way: begun by one process, finished by two
    back = tmp_path / "back"
    assert run(arguments(shards, back, *more, "--max_iters=20")) == 0
    pair, _ = group([*arguments(shards, back, *more), "--resume"], tmp_path, {})
    assert both(pair) == [0, 0]
    assert metrics(back) == pytest.approx(metrics(whole), rel=1e-5)


@pytest.mark.parametrize(
    "trouble, says",
    [
        ({"dead_at": 4}, "has ended or hangs; last seen"),
        ({"stuck_at": 4}, "keeps the others waiting, reading the batch of step 5"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_process_is_named(shards, tmp_path, trouble, says, rank):
    pair, outputs = group(
        arguments(shards, tmp_path / "run", "--timeout=5"), tmp_path, {rank: trouble}
    )
    started = time.monotonic()
    assert finish(pair[1 - rank]) == 1
    assert time.monotonic() - started < 30
    lost = pair[rank].pid
    pair[rank].kill()
    finish(pair[rank])
    output = outputs[1 - rank].read_text()
    if rank == 0 and "dead_at" in trouble:
        # here the first process also keeps the store, which torchrun otherwise does
        assert "the first process, which keeps their store, does not answer" in output
    else:
        assert f"error: rank {rank} (" in output and f"process {lost})" in output
        assert says in output
    # the first process may have been killed while it still wrote step 3 beside its training
    whole = {"step_000003.pt"} | (
        {"step_000000.pt"} if "dead_at" in trouble and not rank else set()
    )
    assert checkpoint.find(tmp_path / "run").name in whole


def test_what_is_not_finite_is_skipped_by_all_alike(shards, tmp_path):
    folder, alone = tmp_path / "two", tmp_path / "one"
    more = ("--on_nonfinite=skip", "--max_iters=8")
    pair, outputs = group(arguments(shards, folder, *more), tmp_path, {1: {"nan_at": 4}})
    assert both(pair) == [0, 0]
    assert "step 5: loss = nan" in outputs[0].read_text()
    assert "skipped; the batch begins in " in outputs[0].read_text()
    assert list(metrics(folder)) == [1, 2, 3, 4, 6, 7, 8]
    assert metrics(folder, "skipped") == {5: 1, 6: 1, 7: 1, 8: 1}
    assert run(arguments(shards, alone, *more), nan_at=4) == 0
    assert metrics(folder) == pytest.approx(metrics(alone), rel=1e-5)
    # what came before the skipped step is what it was, and the step changed nothing
    whole = tmp_path / "whole"
    assert run(arguments(shards, whole, "--max_iters=4")) == 0
    short = tmp_path / "short"
    assert run(arguments(shards, short, *more[:1], "--max_iters=5"), nan_at=4) == 0
    assert identical(saved(short)["model"], saved(whole)["model"])
    assert saved(short)["skipped"] == 1
    # resumed, the count goes on
    assert run([*arguments(shards, short, *more), "--resume"]) == 0
    assert lines(short)[-2:] == lines(alone)[-2:]


def test_torchrun_restarts_a_killed_worker_and_passes_signals_on(shards, tmp_path):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    more = ("--max_iters=400", "--checkpoint_interval=5", "--eval_interval=100")
    more += ("--batch_size=4",)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc_per_node=2", "--max_restarts=1", "--shutdown_timeout=20"]
    log = open(tmp_path / "output", "w+")
    process = subprocess.Popen(
        [*torchrun, "train.py", *arguments(shards, folder, *more)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log,
    )  # fmt: skip

    def workers():
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return [int(pid) for pid in children]

    try:
        wait_for(lambda: steps_logged(folder) >= 6)
        os.kill(workers()[1], signal.SIGKILL)
        killed_at = steps_logged(folder)
        wait_for(lambda: steps_logged(folder) > killed_at + 20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1  # torchrun's own code for a signal
    finally:
        if process.poll() is None:
            for pid in [*workers(), process.pid]:
                os.kill(pid, signal.SIGKILL)
    output = (tmp_path / "output").read_text()
    assert "error: rank 1 (" in output and "has ended" in output
    step = saved(folder)["step"]
    assert f"stopped after step {step}" in output and step < 400
    last = str(step)
    assert run(arguments(shards, whole, *more[1:], f"--max_iters={last}")) == 0
    assert metrics(folder) == pytest.approx(metrics(whole), rel=1e-5)
    assert list(metrics(folder)) == list(range(1, step + 1))


def test_a_restarted_job_goes_on_with_its_own_run_only(train, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    folder = train("run", "--max_iters=3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train("run")
    assert list(metrics(folder)) == list(range(1, 7))
    train("new", "--max_iters=1")  # nothing to resume yet
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "other")
    refused(capsys, lambda: train("run"), "holds a run")


def test_what_is_no_run_is_not_overwritten(train, capsys, monkeypatch):
    """A foreign config.json, the records of a run whose checkpoints are gone."""
    folder = train("run", "--max_iters=2")
    records = (folder / "metrics.jsonl").read_text()
    refused(capsys, lambda: train("run", "--resume", "--max_iters=1"), "has 2 steps")
    for path in (*folder.glob("*.pt"), folder / "checkpoints.json"):
        path.unlink()
    refused(capsys, lambda: train("run"), "metrics.jsonl is of no run")
    assert (folder / "metrics.jsonl").read_text() == records
    (folder / "metrics.jsonl").unlink()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    refused(capsys, lambda: train("run"), "config.json is of no run")
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


# ---- launchers ----


@pytest.mark.parametrize("signalled", [True, False])
def test_the_slurm_job_is_queued_again_after_its_signal(tmp_path, signalled):
    """The script itself, between a Slurm and a torchrun that only note what they are asked."""
    bin, notes = tmp_path / "bin", tmp_path / "notes"
    bin.mkdir()
    for name, body in {
        "scontrol": f'echo "scontrol $*" >>{notes}; echo node1',
        "srun": f'echo "srun $*" >>{notes}; trap "echo signalled >>{notes}; exit 1" USR1\n'
        + ("sleep 30 & wait" if signalled else "exit 3"),
    }.items():
        (bin / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (bin / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{bin}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2",
    }  # fmt: skip
    script = ROOT / "scripts/train_slurm.sh"
    process = subprocess.Popen(["bash", script, "configs/softmax.py"], env=environment)
    if signalled:
        wait_for(lambda: notes.exists() and "srun" in notes.read_text())
        time.sleep(0.3)
        process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == (1 if signalled else 3)
    text = notes.read_text()
    assert "--nnodes=2" in text and "train.py configs/softmax.py" in text
    assert ("signalled" in text) == ("scontrol requeue 17" in text) == signalled


# ---- checkpoints ----


def test_which_checkpoints_are_kept(train):
    folder = train("run", "--max_iters=14", "--checkpoint_interval=2", "--keep_every=6")
    names = [f"step_{step:06d}.pt" for step in (0, 6, 12, 14)]
    best = f"best_{saved(folder, 'best')['step']:06d}.pt"
    assert sorted(checkpoint.read_index(folder)) == sorted([*names, best])
    assert sorted(path.name for path in folder.glob("*.pt")) == sorted([*names, best])
    train("run", "--max_iters=16", "--checkpoint_interval=2", "--keep_last=1", "--resume")
    assert [path.name for path in folder.glob("step_*.pt")] == ["step_000016.pt"]


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


def test_a_run_is_trained_by_one_process_at_a_time(train, capsys):
    folder = train("run")
    before = (folder / "metrics.jsonl").read_bytes()
    with files.lock_folder(folder, "training this run"):
        refused(capsys, lambda: train("run", "--resume"), "another process is training this run")
    assert (folder / "metrics.jsonl").read_bytes() == before
    train("run", "--resume")


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


# ---- divergence ----


def test_what_is_not_finite_stops_the_run_and_is_not_saved(train, capsys, monkeypatch):
    folder = train("run", "--max_iters=3")
    before = {path.name: path.read_bytes() for path in folder.glob("*.pt")}
    monkeypatch.setattr(train_module, "learning_rate", lambda step, config: 1e300)
    for interval, where in ((3, "step 5: loss"), (1, "step 4: its update")):
        with pytest.raises(SystemExit) as stop:
            train("run", "--resume", "--max_iters=6", f"--checkpoint_interval={interval}")
        message = capsys.readouterr().err
        assert stop.value.code == 1
        for part in (where, ".bin at token", "is good", "lower learning_rate (now 1.00e+300)"):
            assert part in message
        assert {path.name: path.read_bytes() for path in folder.glob("*.pt")} == before


def test_a_loss_spike_is_said_with_its_batch(tmp_path, capsys):
    config = Config(wandb_mode="disabled", log_interval=10**6)
    values = dict(lr=1.0, grad_norm=1.0, ms=1.0, tokens_per_s=1.0, mfu=None, memory_mb=1.0)
    where = "in shard_{} at token 7".format

    def log_steps(first, losses):
        with Log(tmp_path, config, first, where, quiet=False) as log:
            for step, loss in enumerate(losses, first + 1):
                log.step(step=step, loss=loss, left_s=0, **values)

    log_steps(0, [3 + 0.01 * (-1) ** i for i in range(200)])
    assert "spike" not in capsys.readouterr().out
    log_steps(200, [3.05, 3.0, 3.08])  # after a resume it still knows them
    out = capsys.readouterr().out
    assert out.count("spike") == 1 and "step 203: loss spike, 3.0800" in out
    assert "the batch begins in shard_203 at token 7" in out
    # independently: (3.08 - mean) / deviation of the 202 losses before
    assert metrics(tmp_path, "spike") == {203: pytest.approx(7.5, abs=0.5)}
