"""The processes of a run: connected, stopped together by a signal, ended when one is lost.

How train.py ends:
    0   finished
    1   diverged, or a process was lost
    2   a mistake that the message names, or a checkpoint that could not be written
    75  stopped by a signal and saved: --resume goes on
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Slurm signals the workers and torchrun, and torchrun passes it on: one request comes twice.
SAME_REQUEST_S = 3
BEAT_S = 1  # between two signs of life
# The backend's own timeout comes later: it is for a wait in which nobody is behind.
BACKEND_GRACE_S = 30


@contextmanager
def process_group(rank: int, world_size: int, device: torch.device, timeout: float):
    """The processes that torchrun started, connected while the block runs; gives their Watchdog.

    If one of them dies, or keeps the others waiting for `timeout` seconds, they end with exit code
    1 and a message that names it.
    """
    if world_size == 1:
        yield None
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    wait = timedelta(seconds=timeout + BACKEND_GRACE_S)
    attempt, store = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), None
    if attempt != "0" and os.environ["LOCAL_WORLD_SIZE"] == str(world_size):
        # torchrun keeps one store for all attempts: without a prefix, processes would look for the
        # addresses of dead ones in it. Several nodes count differently; see train_slurm.sh.
        store = dist.PrefixStore(attempt, store_client(wait))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=wait)
    try:
        with Watchdog(rank, world_size, device, timeout) as watchdog:
            yield watchdog
            dist.barrier()  # nobody leaves while another still needs it
    finally:
        # A gloo thread takes the GIL to drop the last collective's tensors. Let it: closing the
        # group joins that thread with the GIL held, and would wait for ever.
        time.sleep(0.1)
        dist.destroy_process_group()


def store_client(wait: timedelta) -> dist.TCPStore:
    """The store that torchrun, or else the first process, keeps for all processes."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=wait)


class Watchdog:
    """Looks after the other processes from a thread, as the main one may be stuck with them.

    Every second each process writes a sign of life, and what it is doing, into a store that all
    can read. One whose signs stop is dead; one that has come less far than this one keeps it
    waiting.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, timeout: float):
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.beat, self.progress, self.doing = 0, 0, "starting"
        self.who = f"rank {rank} ({socket.gethostname()}, process {os.getpid()})"
        self.left = threading.Event()
        token = torch.tensor(time.time_ns(), device=device)  # a restarted job has keys of its own
        dist.broadcast(token, 0)
        store = store_client(timedelta(seconds=timeout))
        self.store = dist.PrefixStore(f"watchdog/{token.item()}", store)
        self._write()
        dist.barrier()
        self.seen = {}  # rank -> its last sign, when that came, since when it is in its place
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, RuntimeError):
            # perhaps a collective whose peer is gone; if so, the watch soon sees it and ends us,
            # unless torchrun, which sees it too, is faster
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.timeout = 3 * BEAT_S
            self.thread.join(6 * BEAT_S)
        self.left.set()
        self.thread.join()

    def report_progress(self, doing: str) -> None:
        """Say that this process has come to the next place of the loop, and what it does there."""
        self.progress, self.doing = self.progress + 1, doing

    def _write(self) -> None:
        self.beat += 1
        sign = {"beat": self.beat, "progress": self.progress, "doing": self.doing, "who": self.who}
        self.store.set(str(self.rank), json.dumps(sign))

    def _watch(self) -> None:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        while not self.left.wait(BEAT_S):
            try:
                self._write()
                signs = self.store.multi_get([str(rank) for rank in others])
            except RuntimeError:
                self._end("the first process, which keeps their store, does not answer")
                return
            now = time.monotonic()
            for rank, sign in zip(others, map(json.loads, signs), strict=True):
                before, beat_at, progress_at = self.seen.get(rank, (None, now, now))
                if before and sign["beat"] != before["beat"]:
                    beat_at = now
                if before and sign["progress"] != before["progress"]:
                    progress_at = now
                self.seen[rank] = sign, beat_at, progress_at
            late = now - self.timeout
            dead = [sign for sign, beat_at, _ in self.seen.values() if beat_at < late]
            behind = [
                sign
                for sign, _, progress_at in self.seen.values()
                if progress_at < late and sign["progress"] < self.progress
            ]
            if dead:
                names = ", ".join(sign["who"] for sign in dead)
                self._end(f"{names} has ended or hangs; last seen {dead[0]['doing']}")
            elif behind:
                names = ", ".join(sign["who"] for sign in behind)
                self._end(f"{names} keeps the others waiting, {behind[0]['doing']}")

    def _end(self, what: str) -> None:
        """End this process, and the main thread with it, which may never come back by itself."""
        if self.left.is_set():
            return
        try:
            first = self.store.add("told", 1) == 1
        except RuntimeError:
            first = True
        if first:
            print(
                f"error: {what}. The run ends after {self.timeout:g} s without it; go on from its "
                "last checkpoint with --resume.",
                file=sys.stderr,
            )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


class Stop:
    """Notices the signals that ask the run to stop, while its block runs.

    After the first one `asked` is its name; the loop finishes its step and saves. A second one, 3
    seconds later or more, ends the process at once, also when its main thread is stuck.
    """

    def __init__(self, quiet: bool):
        self.asked, self.quiet = None, quiet

    def __enter__(self):
        self.heard, told = socket.socketpair()
        told.setblocking(False)
        self.told = told
        self.handlers = {number: signal.signal(number, lambda *_: None) for number in STOPPING}
        self.wakeup = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.told.close()  # ends the thread
        self.thread.join()
        self.heard.close()

    def _listen(self) -> None:
        while received := self.heard.recv(1):
            number, now = received[0], time.monotonic()
            if number not in STOPPING:
                continue
            if self.asked is None:
                self.asked, since = signal.Signals(number).name, now
                if not self.quiet:
                    print(f"{self.asked}: saving after this step", flush=True)
            elif now - since >= SAME_REQUEST_S:
                os._exit(128 + number)


def all_reduce_max(value: int, device: torch.device) -> int:
    """The largest of all processes' values, which they all get."""
    if not dist.is_initialized():
        return value
    largest = torch.tensor(value, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def job() -> str | None:
    """What torchrun, or else Slurm, calls this job; the same when it is restarted."""
    run_id, slurm = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("SLURM_JOB_ID")
    if run_id == "none":  # torchrun's default, every job's: its own process stands for it
        return slurm or f"{socket.gethostname()} {os.getppid()}"
    return run_id or slurm


def restarted() -> bool:
    """Whether torchrun (--max-restarts) or Slurm (requeue) has started this job before.

    Of several nodes, torchrun tells only the one where a process failed.
    """
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(int(os.environ.get(name) or 0) for name in names)
