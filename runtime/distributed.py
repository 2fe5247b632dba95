"""The ranks of a run: connected, and stopped together by a signal."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


@contextmanager
def process_group(rank: int, ranks: int, device: torch.device, timeout: float) -> Iterator[None]:
    """Connect the ranks that torchrun started, while the block runs.

    If a rank dies, or keeps the others waiting for `timeout` seconds, their next collective raises
    RuntimeError (on a GPU, NCCL ends the process).
    """
    if ranks == 1:
        yield
        return
    backend, limit = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout)
    own = device if backend == "nccl" else None
    dist.init_process_group(backend, rank=rank, world_size=ranks, timeout=limit, device_id=own)
    ended = False
    try:
        yield
        dist.barrier()  # no rank leaves while another still needs it
        ended = True
    finally:
        # Closing NCCL's group takes all ranks, and after an error the others do not come: leave it
        # open, so that the error's message is printed and the process ends.
        if ended or backend == "gloo":
            # A gloo thread takes the GIL to free the last collective's tensors. Let it finish:
            # closing the group joins that thread with the GIL held, and would deadlock.
            time.sleep(0.1)
            dist.destroy_process_group()


def all_reduce_max(value: int, device: torch.device) -> int:
    """The largest value over all ranks."""
    if not dist.is_initialized():
        return value
    largest = torch.tensor(value, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect the signals that ask a run to stop, instead of ending the process.

    A signal that is ignored stays ignored: under nohup, the terminal may close.
    """
    received: list[int] = []
    caught = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = [signal.signal(number, lambda number, _: received.append(number)) for number in caught]
    try:
        yield received
    finally:
        for number, handler in zip(caught, before, strict=True):
            signal.signal(number, handler)
