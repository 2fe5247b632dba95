"""The ranks of a run: connected, stopped together by a signal, ended when one is lost."""

import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

EXIT_FAILED = 1
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# Slurm signals the workers and torchrun, which forwards it: one request arrives twice.
SAME_REQUEST_S = 3
HEARTBEAT_S = 1
# The backend's own timeout is longer: it covers waits in which every rank is alive.
BACKEND_GRACE_S = 30

T = TypeVar("T")


@contextmanager
def process_group(
    rank: int, world_size: int, device: torch.device, timeout: float
) -> Iterator[Callable[[str], None]]:
    """Connect the ranks that torchrun started, while the block runs.

    Yields `Watchdog.report_progress`, by which a rank reports what it does next. If a rank dies, or
    keeps the others waiting for `timeout` seconds, they end with exit code 1 and a message that
    names it.
    """
    if world_size == 1:
        yield lambda doing: None
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    backend_timeout = timedelta(seconds=timeout + BACKEND_GRACE_S)
    attempt, store = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), None
    if attempt != "0" and os.environ["LOCAL_WORLD_SIZE"] == str(world_size):
        # torchrun keeps one store for all attempts: without a prefix, ranks would find the
        # addresses of dead ones in it. Nodes may disagree on the count; see train_slurm.sh.
        store = dist.PrefixStore(attempt, store_client(backend_timeout))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=backend_timeout
    )
    try:
        with Watchdog(rank, world_size, device, timeout) as watchdog:
            yield watchdog.report_progress
            dist.barrier()  # no rank leaves while another still needs it
    finally:
        # A gloo thread takes the GIL to free the last collective's tensors. Let it finish: closing
        # the group joins that thread with the GIL held, and would deadlock.
        time.sleep(0.1)
        dist.destroy_process_group()


def store_client(timeout: timedelta) -> dist.TCPStore:
    """A client of the store that torchrun, or else rank 0, hosts for all ranks."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timeout)


class Watchdog:
    """Watches the other ranks from a thread, since they may block the main thread.

    Every second each rank writes a heartbeat, with its progress and what it is doing, to the shared
    store. A rank whose heartbeat stops is dead; one whose progress falls behind this rank's keeps
    it waiting.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, timeout: float):
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.beat, self.progress, self.doing, self.failed = 0, 0, "starting", False
        self.name = f"rank {rank} ({socket.gethostname()}, process {os.getpid()})"
        self.closed = threading.Event()
        token = torch.tensor(time.time_ns(), device=device)  # each attempt has its own keys
        dist.broadcast(token, 0)
        store = store_client(timedelta(seconds=timeout))
        self.store = dist.PrefixStore(f"watchdog/{token.item()}", store)
        self._write()
        dist.barrier()
        # rank -> its last heartbeat, when that arrived, when its progress last changed
        self.seen: dict[int, tuple[dict, float, float]] = {}
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        self.thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            # Perhaps a collective failed because a rank died. The thread will soon notice and end
            # this process with a message, unless torchrun, which notices too, is faster.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.timeout, self.failed = 3 * HEARTBEAT_S, True
            self.thread.join(6 * HEARTBEAT_S)
        self.closed.set()
        self.thread.join()

    def report_progress(self, doing: str) -> None:
        """Report that this rank starts its next task, which `doing` describes."""
        self.progress, self.doing = self.progress + 1, doing

    def _write(self) -> None:
        self.beat += 1
        heartbeat = {
            "beat": self.beat,
            "progress": self.progress,
            "doing": self.doing,
            "name": self.name,
        }
        self.store.set(str(self.rank), json.dumps(heartbeat))

    def _watch(self) -> None:
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        while not self.closed.wait(HEARTBEAT_S):
            try:
                self._write()
                heartbeats = self.store.multi_get([str(rank) for rank in others])
            except RuntimeError:
                self._end("rank 0, which hosts the store, does not answer")
                return
            now = time.monotonic()
            for rank, heartbeat in zip(others, map(json.loads, heartbeats), strict=True):
                before, beat_at, progress_at = self.seen.get(rank, (None, now, now))
                if before and heartbeat["beat"] != before["beat"]:
                    beat_at = now
                if before and heartbeat["progress"] != before["progress"]:
                    progress_at = now
                self.seen[rank] = heartbeat, beat_at, progress_at
            late = now - self.timeout
            dead = [heartbeat for heartbeat, beat_at, _ in self.seen.values() if beat_at < late]
            # one without a recent heartbeat is not slow: it will soon count as dead; nor is any
            # where a collective has failed, which does not wait
            alive = now - 2 * HEARTBEAT_S
            behind = [
                heartbeat
                for heartbeat, beat_at, progress_at in self.seen.values()
                if progress_at < late and heartbeat["progress"] < self.progress and beat_at > alive
            ]
            if dead:
                names = ", ".join(heartbeat["name"] for heartbeat in dead)
                self._end(f"{names} has ended or hangs; last seen {dead[0]['doing']}")
            elif behind and not self.failed:
                names = ", ".join(heartbeat["name"] for heartbeat in behind)
                self._end(f"{names} keeps the others waiting, {behind[0]['doing']}")

    def _end(self, reason: str) -> None:
        """End the whole process, whose main thread may be blocked for good."""
        if self.closed.is_set():
            return
        try:
            prints = self.store.add("reported", 1) == 1  # one rank prints for all
        except RuntimeError:
            prints = True
        if prints:
            print(
                f"error: {reason}. The run ends after {self.timeout:g} s without it; continue from "
                "its last checkpoint with --resume.",
                file=sys.stderr,
            )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_FAILED)


class Stopped(Exception):
    """Work was left undone because a signal asks the run to stop; all ranks leave it alike."""


class Stop:
    """Handles the signals that ask a run to stop, while its block runs.

    The first one's name is in `received`: the training loop then saves the state after its last
    whole step. A second one, 3 seconds later or more, ends the process at once, even if its main
    thread is stuck: that is why the signals are handled in a thread.
    """

    def __init__(self, quiet: bool):
        self.received: str | None = None
        self.quiet = quiet

    def __enter__(self) -> "Stop":
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        heeded = set(STOP_SIGNALS)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup: the terminal may close
            heeded.remove(signal.SIGHUP)
        self.handlers = {number: signal.signal(number, lambda *_: None) for number in heeded}
        self.wakeup_fd = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self.wakeup_fd)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.writer.close()  # ends the thread
        self.thread.join()
        self.reader.close()

    def between(self, items: Iterable[T], count: int, device: torch.device) -> Iterator[T]:
        """The items; raises Stopped between two of them once any rank has received a signal.

        All ranks must give the same `count`, though one may have fewer items.
        """
        items = iter(items)
        for i in range(count):
            if i and all_reduce_max(int(self.received is not None), device):
                raise Stopped
            yield from itertools.islice(items, 1)

    def _listen(self) -> None:
        since = 0.0
        while data := self.reader.recv(1):
            number, now = data[0], time.monotonic()
            if number not in STOP_SIGNALS:
                continue
            if self.received is None:
                self.received, since = signal.Signals(number).name, now
                if not self.quiet:
                    print(
                        f"{self.received}: saving the last whole step; a second one, in "
                        f"{SAME_REQUEST_S} s or later, ends the run at once",
                        flush=True,
                    )
            elif now - since >= SAME_REQUEST_S:
                os._exit(128 + number)


def all_reduce_max(value: int, device: torch.device) -> int:
    """The largest value over all ranks."""
    if not dist.is_initialized():
        return value
    largest = torch.tensor(value, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)
