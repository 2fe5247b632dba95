"""Several processes: signals, lost ones, restarts; all of them real."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from runtime import checkpoint
from runtime.distributed import EXIT_STOPPED
from tests.faults import arguments, finish, group, run, start
from tests.runs import (
    assert_same_run,
    metrics,
    saved,
    steps_logged,
    wait_for,
)

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
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
    assert f"{name}: saving" in output and "a second one, in 3 s or later, ends" in output
    assert f"stopped after step {step}" in output
    assert 4 <= step < 40 and max(metrics(folder)) == step
    assert run([*command, "--resume"]) == 0
    assert run(arguments(shards, whole, "--max_iters=40", "--checkpoint_interval=1000")) == 0
    assert_same_run(folder, whole)


def test_a_closed_terminal_does_not_stop_a_run_under_nohup(shards, tmp_path):
    folder = tmp_path / "run"
    process = start(arguments(shards, folder), slow=0.1, nohup=True)
    wait_for(lambda: steps_logged(folder) >= 2)
    os.kill(process.pid, signal.SIGHUP)
    assert finish(process) == 0
    assert max(metrics(folder)) == 6


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
    assert checkpoint.find(folder).path.name == "step_000003.pt"


def both(processes):
    return [finish(process) for process in processes]


def test_a_signal_to_one_process_stops_all_and_one_process_goes_on(shards, tmp_path):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    more = ("--max_iters=20", "--checkpoint_interval=1000")
    command = arguments(shards, folder, *more)
    # in the first of two micro-batches of step 6, which is given up
    pair, _ = group(command, tmp_path, {1: {"signalled_in": 11}}, batch_size=2)
    assert both(pair) == [EXIT_STOPPED] * 2
    assert saved(folder)["step"] == max(metrics(folder)) == 5
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
    assert run(arguments(shards, back, *more, "--max_iters=10")) == 0
    pair, _ = group([*arguments(shards, back, *more), "--resume"], tmp_path, {})
    assert both(pair) == [0, 0]
    assert metrics(back) == pytest.approx(metrics(whole), rel=1e-5)


def test_orbits_do_not_depend_on_the_number_of_processes(tmp_path):
    settings = ("--task=orbits", "--tie_embeddings=False", "--positions=learned", "--planets=2",
                "--systems=20", "--bins=50", "--val_tokens=64", "--max_iters=6")  # fmt: skip
    pair, _ = group(arguments("none", tmp_path / "two", *settings), tmp_path, {}, batch_size=2)
    assert both(pair) == [0, 0]
    assert run(arguments("none", tmp_path / "one", *settings)) == 0
    for key in ("loss", "val_loss", "grad_norm"):
        two = metrics(tmp_path / "two", key)
        assert two == pytest.approx(metrics(tmp_path / "one", key), rel=1e-5), key


@pytest.mark.parametrize(
    "faults, says",
    [
        ({"dead_at": 4}, "has ended or hangs; last seen"),
        ({"stuck_at": 4}, "keeps the others waiting, reading the batch of step 5"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_process_is_named(shards, tmp_path, faults, says, rank):
    pair, outputs = group(
        arguments(shards, tmp_path / "run", "--timeout=8"), tmp_path, {rank: faults}
    )
    started = time.monotonic()
    assert finish(pair[1 - rank]) == 1
    assert time.monotonic() - started < 30
    lost = pair[rank].pid
    pair[rank].kill()
    finish(pair[rank])
    output = outputs[1 - rank].read_text()
    if rank == 0 and "dead_at" in faults:
        # here rank 0 also hosts the store, which torchrun otherwise does
        assert "rank 0, which hosts the store, does not answer" in output
    else:
        assert f"error: rank {rank} (" in output and f"process {lost})" in output
        assert says in output
    # the first process may have been killed while it still wrote step 3 beside its training
    whole = {"step_000003.pt"} | ({"step_000000.pt"} if "dead_at" in faults and not rank else set())
    assert checkpoint.find(tmp_path / "run").path.name in whole


def test_torchrun_restarts_a_killed_worker_and_passes_signals_on(shards, tmp_path):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    more = ("--max_iters=400", "--checkpoint_interval=5", "--eval_interval=100")
    more += ("--batch_size=4",)
    log = open(tmp_path / "output", "w+")
    process = subprocess.Popen(
        ["bash", "scripts/train_8gpu.sh", *arguments(shards, folder, *more)], cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GPUS": "2", "RESTARTS": "1"},
        stdout=log, stderr=log,
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
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        if process.poll() is None:
            for pid in [*workers(), process.pid]:
                os.kill(pid, signal.SIGKILL)
    output = (tmp_path / "output").read_text()
    assert "error: rank 1 (" in output and "has ended" in output, output
    assert "SignalException" not in output  # torchrun's own traceback
    step = saved(folder)["step"]
    assert f"stopped after step {step}" in output and step < 400
    last = str(step)
    assert run(arguments(shards, whole, *more[1:], f"--max_iters={last}")) == 0
    assert metrics(folder) == pytest.approx(metrics(whole), rel=1e-5)
    assert list(metrics(folder)) == list(range(1, step + 1))


def test_the_script_for_all_gpus_needs_one():
    command = ["bash", "scripts/train_8gpu.sh", "configs/softmax.py"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: no GPU on this machine; python train.py trains without one\n"


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
    assert "--nnodes=2" in text and "train.py --resume=auto configs/softmax.py" in text
    assert ("signalled" in text) == ("scontrol requeue 17" in text) == signalled
