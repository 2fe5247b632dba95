"""Fault injection: commands in processes of their own that are killed, blocked or starved."""

import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

import torch

from runtime import checkpoint
from tests.helpers import SMALL

# Children are forked from a process that has imported torch and does nothing else.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["train", "data.text", "tests.faults"])


def start(arguments, *, module="train", output=None, environment=None, **faults):
    """Run a command's main in a new process with these faults, by their names in FAULTS."""
    work = (module, list(map(str, arguments)), output, environment or {}, faults)
    process = context.Process(target=_child, args=work)
    process.start()
    return process


def finish(process, timeout=120):
    """Its exit code, minus the signal's number if one killed it."""
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"still running after {timeout} s")
    return process.exitcode


def run(arguments, **more):
    return finish(start(arguments, **more))


def arguments(shards, out, *more):
    return [*SMALL, f"--data_dir={shards}", f"--out_dir={out}", *more]


def group(arguments, tmp_path, faults, batch_size=4):
    """Start two gloo processes, each with the faults of its rank; returns them and their output's
    files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    outputs = [tmp_path / f"output{rank}" for rank in range(2)]
    processes = [
        start(
            [*arguments, f"--batch_size={batch_size}"],
            output=outputs[rank],
            environment=address | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            **faults.get(rank, {}),
        )
        for rank in range(2)
    ]
    return processes, outputs


def _child(module, arguments, output, environment, faults):
    if output:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
    torch.set_num_threads(1)
    os.environ.update(environment)
    for name, value in faults.items():
        FAULTS[name](value)
    sys.argv = [module, *arguments]
    main = __import__(module, fromlist=["main"]).main
    main(arguments) if module.startswith("data") else main()


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(point):
    """kill -9 in the middle of the write, or just before the sync, rename or unlink of this number.

    Whatever a kill can leave on the disk is there before one of these. Of the many writes of a
    checkpoint each 40th counts. `point` is the number, and the file to which the kill is noted.
    """
    (number, notes), count = point, 0

    def trapped(before, real, each=1):
        calls = 0

        def call(*args, **kwargs):
            nonlocal count, calls
            calls += 1
            count += calls % each == 0
            if count == number:
                with open(notes, "a") as file:
                    file.write(f"{real.__name__}\n")
                before(*args)
                _kill()
            return real(*args, **kwargs)

        return call

    def half(hashed, data):
        hashed.file.write(bytes(data)[: len(data) // 2])
        hashed.file.flush()

    def nothing(*_):
        pass

    os.fsync = trapped(nothing, os.fsync)
    os.replace = trapped(nothing, os.replace)
    Path.unlink = trapped(nothing, Path.unlink)
    checkpoint.HashingFile.write = trapped(half, checkpoint.HashingFile.write, each=40)


def file_limit(size):
    """No file may grow beyond so many bytes, as if the disk were full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def output_lost(how):
    """What is printed goes nowhere: "pipe", as after `| head`, or "disk", a full one."""
    if how == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    os.dup2(writer, 1)
    os.dup2(writer, 2)


def nohup(_):
    """As the command of that name does it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def stuck_at(step):
    """Never return from reading the batch of this step."""
    from data.loader import TokenLoader

    real = TokenLoader.batch

    def batch(self, at):
        if at == step:
            time.sleep(1000)
        return real(self, at)

    TokenLoader.batch = batch


def dead_at(step):
    """End without a word at this step."""
    from data.loader import TokenLoader

    real = TokenLoader.batch

    def batch(self, at):
        if at == step:
            _kill()
        return real(self, at)

    TokenLoader.batch = batch


def nan_at(step):
    """This process's loss of this step is NaN."""
    from data.loader import TokenLoader
    from model import GPT

    batch, forward, now = TokenLoader.batch, GPT.forward, None

    def remember(self, at):
        nonlocal now
        now = at
        return batch(self, at)

    def poisoned(self, idx, targets=None, cache=None):
        out = forward(self, idx, targets, cache)
        return out * float("nan") if now == step and targets is not None else out

    TokenLoader.batch, GPT.forward = remember, poisoned


def slow(seconds):
    """Every step takes this much longer."""
    from data.loader import TokenLoader

    real = TokenLoader.batch

    def batch(self, at):
        time.sleep(seconds)
        return real(self, at)

    TokenLoader.batch = batch


def signalled_in(call):
    """SIGTERM comes within the training's forward pass of this number."""
    from model import GPT

    real, count = GPT.forward, 0

    def forward(self, idx, *more):
        nonlocal count
        count += len(idx) > 1  # a single sequence is for the estimate
        if count == call and len(idx) > 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # a thread handles it
        return real(self, idx, *more)

    GPT.forward = forward


def same_request_s(seconds):
    from runtime import distributed

    distributed.SAME_REQUEST_S = seconds


FAULTS = {
    f.__name__: f
    for f in (
        kill_at,
        file_limit,
        output_lost,
        nohup,
        stuck_at,
        dead_at,
        nan_at,
        slow,
        signalled_in,
        same_request_s,
    )
}
