"""Fault injection: commands in processes of their own that are killed, blocked or starved."""

import functools
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.helpers import SMALL
from tests.runs import run_train

# Children are forked from a process that has imported torch, and what a first step imports, and
# does nothing else.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["train", "torch._dynamo", "data.text", "tests.faults"])
TIMEOUT = 120  # seconds that `finish` waits


def start(arguments, *, module="train", output=None, environment=None, **faults):
    """Run a command's main in a new process with these faults, by their names in FAULTS."""
    arguments = list(map(str, arguments))
    work = (module, arguments, output, environment or {}, faults)
    process = context.Process(target=_child, args=work)
    process.start()
    return process


def finish(process):
    """Wait for a process. Returns its exit code: -9 if signal 9 killed it."""
    process.join(TIMEOUT)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"still running after {TIMEOUT} s")
    return process.exitcode


def run_command(arguments, **more):
    return finish(start(arguments, **more))


def arguments(shards, out, *more):
    return [*SMALL, f"--data_dir={shards}", f"--out_dir={out}", *more]


def group(arguments, faults, batch_size=4):
    """Start two gloo processes, each with the faults of its rank.

    As under torchrun, the store where they meet is in another process, here in this one. It picks a
    free port, so tests that run at the same time cannot collide.
    """
    global host
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(host.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    arguments = [*arguments, f"--batch_size={batch_size}"]
    processes = []
    for rank in range(2):
        environment = address | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = start(arguments, environment=environment, **faults.get(rank, {}))
        processes.append(process)
    return processes


def _child(module, arguments, output, environment, faults):
    if output:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
    torch.set_num_threads(1)
    os.environ.update(environment)
    for name, value in faults.items():
        FAULTS[name](value)
    if module == "train":
        run_train(*arguments)
    else:
        __import__(module, fromlist=["main"]).main(arguments)


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(number):
    """kill -9 just before the file operation of this number: a sync, a rename or an unlink.

    Before a sync, half of the file has been written. These are all the states in which a kill can
    leave the disk.
    """
    count = 0

    def trapped(before, real):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                before(*args)
                _kill()
            return real(*args, **kwargs)

        return call

    def half(file):
        if os.readlink(f"/proc/self/fd/{file}").endswith(".tmp"):
            os.ftruncate(file, os.fstat(file).st_size // 2)

    os.fsync = trapped(half, os.fsync)
    os.replace = trapped(lambda *_: None, os.replace)
    Path.unlink = trapped(lambda *_: None, Path.unlink)


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
    """Ignore SIGHUP, as the command nohup does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def before_batch(act):
    """Call act(step) before the batch of each step is read."""
    from data.loader import TokenLoader

    real = TokenLoader.batch

    def batch(self, step):
        act(step)
        return real(self, step)

    TokenLoader.batch = batch


def stuck_at(step):
    """Never return from reading the batch of this step."""
    before_batch(lambda at: at == step and time.sleep(1000))


def dead_at(step):
    """End without a word at this step."""
    before_batch(lambda at: at == step and _kill())


def slow(seconds):
    """Every step takes this much longer."""
    before_batch(lambda at: time.sleep(seconds))


def signalled_at(step):
    """SIGTERM comes while the batch of this step is read."""
    before_batch(lambda at: at == step and os.kill(os.getpid(), signal.SIGTERM))


def without_compiler(_):
    """torch.compile captures its graphs and compiles none."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")


FAULTS = {
    "kill_at": kill_at,
    "file_limit": file_limit,
    "output_lost": output_lost,
    "nohup": nohup,
    "stuck_at": stuck_at,
    "dead_at": dead_at,
    "slow": slow,
    "signalled_at": signalled_at,
    "without_compiler": without_compiler,
    "chdir": os.chdir,
}
