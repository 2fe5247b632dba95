"""Several real processes: signals, restarts, and what happens when a process is lost."""

import gc
import os
import shutil
import signal
import subprocess
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from config import Config
from errors import UserError
from runtime import checkpoint, run_folder
from runtime.distributed import EXIT_STOPPED, process_group
from runtime.files import lock_folder
from tests.faults import arguments, finish, group, run_command, start
from tests.helpers import reverse_shard
from tests.runs import ROOT, agree, assert_same_run, metrics, saved, steps_logged, wait_for
from train import check_agreement


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory):
    """A run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run_command(arguments(shards, folder, *LONGER)) == 0
    return folder


LONGER = ("--max_iters=20", "--checkpoint_interval=1000")


def test_a_signal_saves_and_the_rest_is_identical(shards, tmp_path, whole):
    folder = tmp_path / "run"
    command = arguments(shards, folder, *LONGER)
    process = start(command, output=tmp_path / "output", slow=0.1)
    wait_for(lambda: steps_logged(folder) >= 4)
    for _ in range(2):  # torchrun and Slurm may each send it
        os.kill(process.pid, signal.SIGHUP)
    assert finish(process) == EXIT_STOPPED == 75
    step = saved(folder)["step"]
    output = (tmp_path / "output").read_text()
    assert f"step {step} of 20 is saved: stopped by a signal" in output
    assert 4 <= step < 20
    assert max(metrics(folder)) == step
    assert run_command([*command, "--resume"]) == 0
    assert_same_run(folder, whole)


def test_a_closed_terminal_does_not_stop_a_run_under_nohup(shards, tmp_path):
    folder = tmp_path / "run"
    process = start(arguments(shards, folder), slow=0.1, nohup=True, output_lost="pipe")
    wait_for(lambda: steps_logged(folder) >= 2)
    os.kill(process.pid, signal.SIGHUP)
    assert finish(process) == 0
    assert max(metrics(folder)) == 6


def both(processes):
    return [finish(process) for process in processes]


def test_a_signal_to_one_process_stops_all_and_one_process_goes_on(shards, tmp_path, whole):
    folder = tmp_path / "run"
    command = arguments(shards, folder, *LONGER)
    assert both(group(command, {1: {"signalled_at": 5}}, batch_size=2)) == [EXIT_STOPPED] * 2
    assert saved(folder)["step"] == max(metrics(folder)) == 6
    assert run_command([*command, "--resume"]) == 0
    agree(folder, whole)


RECALL = ["--task=language+recall", "--block_size=64", "--total_batch_size=512", "--val_tokens=512"]


@pytest.mark.parametrize("optimizer, first", [("adamw", 1), ("muon", 2)])
def test_a_run_is_continued_by_another_number_of_processes(shards, tmp_path, optimizer, first):
    """From one process to two or from two to one, with accumulation, as one process trains it."""
    whole = tmp_path / "whole"
    shared = tmp_path / "shared"
    # 17 validation windows: 9 for one process and 8 for the other
    settings = ("configs/ssmax.py", f"--optimizer={optimizer}", "--val_tokens=272")
    assert run_command(arguments(shards, whole, *settings)) == 0
    for processes, steps in ((first, 3), (3 - first, 6)):
        command = arguments(shards, shared, *settings, "--resume=auto", f"--max_iters={steps}")
        if processes == 1:
            assert run_command(command) == 0
        else:
            assert both(group(command, {}, batch_size=2)) == [0, 0]
    agree(whole, shared)


def test_two_compiled_processes_agree_with_one(shards, tmp_path):
    settings = ("configs/lssar_p15.py", "--n_layer=1", "--max_iters=2")
    assert run_command(arguments(shards, tmp_path / "one", *settings)) == 0
    compiled = arguments(shards, tmp_path / "two", *settings, "--compile")
    faults = dict.fromkeys(range(2), {"without_compiler": True})
    assert both(group(compiled, faults, batch_size=2)) == [0, 0]
    agree(tmp_path / "two", tmp_path / "one", rel=1e-4)


@pytest.mark.parametrize(
    "settings, batch_size",
    [
        (RECALL, 4),  # without accumulation
        (["configs/ssmax.py", "--document_mask"], 2),
    ],
)
def test_two_processes_agree_with_one_on_other_data(documents, tmp_path, settings, batch_size):
    one = tmp_path / "one"
    two = tmp_path / "two"
    assert run_command(arguments(documents, one, *settings)) == 0
    pair = group(arguments(documents, two, *settings, "--resume=auto"), {}, batch_size=batch_size)
    assert both(pair) == [0, 0]
    agree(one, two)


@pytest.mark.parametrize("rank, fault", [(0, "dead_at"), (1, "stuck_at")])
def test_a_lost_process_ends_the_others_and_keeps_the_checkpoint(shards, tmp_path, rank, fault):
    command = arguments(shards, tmp_path / "run", "--timeout=5")
    pair = group(command, {rank: {fault: 4}})
    started = time.monotonic()
    assert finish(pair[1 - rank]) == 1
    assert time.monotonic() - started < 60
    pair[rank].kill()
    finish(pair[rank])
    assert checkpoint.find(tmp_path / "run").id["step"] in ((3,) if rank else (0, 3))


@pytest.mark.parametrize("steps, other", [(6, 3), (0, None)])
def test_ranks_that_see_other_checkpoints_end_the_run(shards, tmp_path, steps, other):
    """As where out_dir is on each node's own disk."""
    assert run_command(arguments(shards, tmp_path / "run", f"--max_iters={steps}")) == 0
    shutil.copytree(tmp_path / "run", tmp_path / "node" / "run")
    run_folder.checkpoints(tmp_path / "node" / "run")[0].unlink()
    folders = {
        0: {"chdir": tmp_path, "output": tmp_path / "output"},
        1: {"chdir": tmp_path / "node"},
    }
    pair = group(arguments(shards, "run", "--resume=auto", "--max_iters=9"), folders)
    assert both(pair) == [2, 2]
    says = f"error: step of the checkpoint in out_dir is {other} on rank 1, {steps} on rank 0"
    assert says in (tmp_path / "output").read_text()


@pytest.mark.parametrize("fault", ["edited", "none", "window", "dry_run"])
def test_ranks_that_read_different_files_all_end_with_the_same_words(shards, tmp_path, fault):
    """As where the files are on each node's own disk."""
    folders = {}
    for rank in range(2):
        node = tmp_path / f"node{rank}"
        data = shutil.copytree(shards, node / "data")
        (node / "own.py").write_text("window = 8\n")
        folders[rank] = {"chdir": node, "output": tmp_path / f"output{rank}"}
    if fault == "edited":
        reverse_shard(data / "text_train_000002.bin")
        says = "error: data: rank 1's training shards differ from rank 0's: copy the same data "
    elif fault == "window":
        (node / "own.py").write_text("window = 9\n")
        says = "error: window is 9 on rank 1, 8 on rank 0: every rank needs the same settings"
    elif fault == "dry_run":
        (node / "own.py").write_text("window = 8\ndry_run = True\n")
        says = "error: dry_run is True on rank 1, False on rank 0: every rank needs the same"
    else:
        shutil.rmtree(data)
        says = "error: rank 1: data does not exist: name the folder of the shards"
    pair = group(arguments("data", "run", "own.py"), folders)
    assert both(pair) == [2, 2]
    for rank in range(2):
        assert (tmp_path / f"output{rank}").read_text().splitlines()[-1].startswith(says)
    assert not list(tmp_path.glob("node*/run"))


def assert_both_say(words, tmp_path, command, **faults_of_rank_0):
    """Two processes end with code 2 and rank 0's words, without a traceback."""
    faults = {rank: {"output": tmp_path / f"output{rank}"} for rank in range(2)}
    faults[0] |= faults_of_rank_0
    assert both(group(command, faults)) == [2, 2]
    for rank in range(2):
        output = (tmp_path / f"output{rank}").read_text()
        assert output.splitlines()[-1].startswith(f"error: rank 0: {words}")
        assert "Traceback" not in output


def test_all_ranks_say_that_another_process_trains_the_run(shards, tmp_path):
    folder = tmp_path / "run"
    with lock_folder(folder, "training this run"):
        says = f"{folder}: another process is training this run"
        assert_both_say(says, tmp_path, arguments(shards, folder))


@pytest.mark.parametrize(
    "limit, steps, unsaved",
    [
        (100_000, 1, 0),  # no checkpoint fits
        (250_000, 1, 1),  # the first has no optimizer state, and fits; the last does not
        (250_000, 9, 6),  # nor do those in between, at steps 3 and 6
    ],
)
def test_a_full_disk_of_rank_0_ends_all_ranks(shards, tmp_path, limit, steps, unsaved):
    folder = tmp_path / "run"
    command = arguments(shards, folder, f"--max_iters={steps}")
    says = f"{folder}/step_{unsaved:06d}.pt: cannot be written: File too large"
    assert_both_say(says, tmp_path, command, file_limit=limit)


@pytest.mark.parametrize("rank, dtype", [(0, torch.bfloat16), (1, torch.float16)])
def test_gpus_of_two_kinds_end_on_every_rank_with_the_same_words(monkeypatch, rank, dtype):
    """Rank 0 would train in bfloat16, rank 1 in float16."""

    def gather(value):
        fingerprint, facts = value
        values = [(fingerprint, facts | {"dtype": name}) for name in ("bfloat16", "float16")]
        values[rank] = value
        return values

    monkeypatch.setattr("train.all_gather", gather)
    says = "dtype is 'float16' on rank 1, 'bfloat16' on rank 0: give --dtype=float16, or GPUs"
    with pytest.raises(UserError, match=says):
        check_agreement(Config(), {}, dtype, state=None)


def test_a_rank_whose_copy_of_the_data_has_no_meta_json_agrees(monkeypatch):
    """As where the shards alone were copied to its node."""
    copied = {"training shards": "a", "validation shards": "b"}
    whole = copied | {"text": "c"}

    def gather(value):
        _, facts = value
        return [(fingerprint, facts) for fingerprint in ranks]

    monkeypatch.setattr("train.all_gather", gather)
    for ranks in ((whole, copied), (copied, whole)):
        check_agreement(Config(), ranks[0], torch.float32, state=None)
    ranks = (copied, whole | {"validation shards": "d"})
    with pytest.raises(UserError, match="rank 1's validation shards differ from rank 0's"):
        check_agreement(Config(), copied, torch.float32, state=None)
    ranks = ({"recall sequences": "a"}, {"recall sequences": "b"})
    with pytest.raises(UserError, match="^rank 1's recall sequences .* the same code and numpy$"):
        check_agreement(Config(), ranks[0], torch.float32, state=None)


TORCHRUN = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    "given, says",
    [
        (("WORLD_SIZE",), "RANK and MASTER_ADDR and MASTER_PORT not set: start the processes"),
        (("WORLD_SIZE", "RANK", "MASTER_ADDR"), "WORLD_SIZE = 2, but MASTER_PORT not set"),
        (("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "but RANK not set"),
    ],
)
def test_a_process_that_torchrun_did_not_start_is_refused(train, refused, monkeypatch, given, says):
    """It would train on its share of each step alone, and say nothing."""
    for name in given:
        monkeypatch.setenv(name, TORCHRUN[name])
    refused(train, "run", says=says)
    if "RANK" not in given:
        train("run", "--dry_run")  # plans for so many processes


def test_a_rank_without_a_world_is_refused(train, refused, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    refused(train, "run", says="RANK = 1 must be below WORLD_SIZE = 1")


def test_a_groups_last_collective_outlives_it(monkeypatch):
    """Where a thread of gloo drops it while the group is closed, the two wait for each other."""
    held = []

    class Work:
        def wait(self):
            pass

    def barrier(async_op):
        work = Work()
        held.append(weakref.ref(work))
        return work

    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(dist, "barrier", barrier)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with process_group(torch.device("cpu"), timeout=1):
        pass
    gc.collect()
    (work,) = held
    assert work() is not None


def test_an_error_under_nccl_leaves_the_group_open(monkeypatch):
    """Closing it would wait for the other ranks, which wait for this one."""
    closed = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(dist, "barrier", lambda async_op: SimpleNamespace(wait=lambda: None))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: closed.append(True))
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with process_group(torch.device("cuda"), timeout=1):
        pass
    with pytest.raises(UserError), process_group(torch.device("cuda"), timeout=1):
        raise UserError("no space left on device")
    assert closed == [True]


def test_torchrun_restarts_a_killed_worker_and_passes_signals_on(shards, tmp_path):
    folder = tmp_path / "run"
    whole = tmp_path / "whole"
    more = ("--checkpoint_interval=5", "--eval_interval=100", "--batch_size=4")
    command = arguments(shards, folder, "--max_iters=400", *more)
    log = open(tmp_path / "output", "w+")
    process = subprocess.Popen(
        ["nohup", "bash", "scripts/train_8gpu.sh", *command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GPUS": "2", "RESTARTS": "1"},
        stdout=log,
        stderr=log,
    )

    def workers():
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    try:
        wait_for(lambda: steps_logged(folder) >= 6)
        process.send_signal(signal.SIGHUP)  # which nohup ignores
        os.kill(workers()[1], signal.SIGKILL)
        killed_at = steps_logged(folder)
        wait_for(lambda: steps_logged(folder) > killed_at + 8)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        if process.poll() is None:
            for pid in [*workers(), process.pid]:
                os.kill(pid, signal.SIGKILL)
    output = (tmp_path / "output").read_text()
    assert "SignalException" not in output  # torchrun's
    assert "FutureWarning" not in output  # torch's
    step = saved(folder)["step"]
    assert f"step {step} of 400 is saved: stopped by a signal" in output
    assert step < 400
    assert run_command(arguments(shards, whole, *more, f"--max_iters={step}")) == 0
    assert metrics(folder) == pytest.approx(metrics(whole), rel=1e-5)
    assert list(metrics(folder)) == list(range(1, step + 1))


def test_a_mistake_is_said_once_before_torchrun_starts(tmp_path):
    settings = ["--total_batch_size=3072", "--n_layer=1", f"--out_dir={tmp_path / 'run'}"]
    done = subprocess.run(
        ["bash", "scripts/train_8gpu.sh", *settings],
        cwd=ROOT,
        env=os.environ | {"GPUS": "2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    says = "error: 2 processes cannot share the 3 sequences of a step"
    assert done.stderr.startswith(says)
    assert len(done.stderr.splitlines()) == 1


def write_command(path, body):
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("signalled", [True, False])
def test_the_slurm_job_is_queued_again_after_its_signal(tmp_path, signalled):
    """The script itself, between a Slurm and a torchrun that only note what they are asked."""
    bin = tmp_path / "bin"
    notes = tmp_path / "notes"
    bin.mkdir()
    write_command(bin / "scontrol", f'echo "scontrol $*" >>{notes}; echo node1')
    job = "sleep 30 & wait" if signalled else "exit 3"
    trap = f'trap "echo signalled >>{notes}; exit 1" USR1'
    write_command(bin / "srun", f'echo "srun $SRUN_CPUS_PER_TASK $*" >>{notes}; {trap}\n{job}')
    write_command(bin / "python", f'echo "$WORLD_SIZE python $*" >>{notes}')
    environment = os.environ | {
        "SLURM_CPUS_ON_NODE": "96",
        "PATH": f"{bin}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    script = ROOT / "scripts/train_slurm.sh"
    process = subprocess.Popen(["bash", script, "configs/softmax.py"], env=environment)
    if signalled:
        wait_for(lambda: notes.exists() and "srun" in notes.read_text())
        time.sleep(0.3)
        process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == (1 if signalled else 3)
    text = notes.read_text()
    assert text.startswith("16 python train.py --resume=auto configs/softmax.py --dry_run\n")
    assert "srun 96 torchrun" in text
    assert "--nnodes=2" in text
    assert "train.py --resume=auto configs/softmax.py" in text
    assert ("signalled" in text) == signalled
    assert ("scontrol requeue 17" in text) == signalled
    # where the dry run says that data are missing, no job step begins
    notes.unlink()
    write_command(bin / "python", "echo 'data/mine does not exist yet; create it with data.text'")
    process = subprocess.run(
        ["bash", script, "configs/softmax.py"], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 2
    assert process.stderr == "error: data/mine does not exist yet; create it with data.text\n"
    assert not notes.exists()
