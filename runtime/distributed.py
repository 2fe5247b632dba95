"""The ranks of a run: their process group, collectives, and the signals that stop them."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from errors import UserError

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later
Value = TypeVar("Value")

# Besides WORLD_SIZE, what torchrun gives to its processes.
TORCHRUN_VARIABLES = ("RANK", "MASTER_ADDR", "MASTER_PORT")

# Held until the process ends: a gloo thread that drops the last reference to a collective takes the
# GIL, and closing the group joins that thread with the GIL held.
LAST_COLLECTIVES: list[dist.Work] = []

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def rank() -> int:
    """Return this process's rank. Rank 0 prints and writes files."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    """The number of processes of the run; in a dry run, of the run that is planned."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


@contextmanager
def process_group(device: torch.device, timeout: float, dry_run: bool = False) -> Iterator[None]:
    """Connect the ranks that torchrun started, while the block runs.

    If a rank dies, or keeps the others waiting for `timeout` seconds, their next collective raises
    RuntimeError (on a GPU, NCCL ends the process). A dry run may be a single process that has only
    WORLD_SIZE. Raises UserError if torchrun's variables are incomplete.
    """
    if rank() >= world_size():
        raise UserError(f"RANK = {rank()} must be below WORLD_SIZE = {world_size()}")
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if world_size() == 1 or (dry_run and "RANK" in missing):
        yield
        return
    if missing:
        raise UserError(
            f"WORLD_SIZE = {world_size()}, but {' and '.join(missing)} not set: start the "
            "processes with torchrun, or unset WORLD_SIZE"
        )
    use_nccl = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if use_nccl else "gloo",
        timeout=timedelta(seconds=timeout),
        device_id=device if use_nccl else None,
    )
    ended = False
    try:
        yield
        last = dist.barrier(async_op=True)  # no rank leaves while another still needs it
        last.wait()
        LAST_COLLECTIVES.append(last)
        ended = True
    finally:
        # Closing NCCL's group takes all ranks, and after an error the others do not come: leave it
        # open, so that the error's message is printed and the process ends.
        if ended or not use_nccl:
            # A gloo thread takes the GIL to free the last collective's tensors. Let it finish:
            # closing the group joins that thread with the GIL held, and would deadlock.
            time.sleep(0.1)
            dist.destroy_process_group()


def all_reduce_max(value: int) -> int:
    """The largest value over all ranks. Does not wait for a GPU."""
    if not dist.is_initialized():
        return value
    largest = torch.tensor(value)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def all_gather(value: Value) -> list[Value]:
    """The values of all ranks, in the order of the ranks."""
    if not dist.is_initialized():
        return [value]
    values = [value] * world_size()
    dist.all_gather_object(values, value)
    return values


def raise_on_all_ranks(call: Callable[[], Value]) -> Value:
    """Call a function on every rank; if a rank's call raises UserError, all ranks raise it."""
    mistake = None
    try:
        result = call()
    except UserError as error:
        mistake = str(error)
    mistakes = all_gather(mistake)
    for number, message in enumerate(mistakes):
        if message is not None:
            raise UserError(message if None not in mistakes else f"rank {number}: {message}")
    return result


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect the signals that ask a run to stop, instead of letting them end the process.

    A signal that is ignored stays ignored: under nohup, the terminal may close.
    """
    received: list[int] = []
    handlers = {}  # as they were before the block
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            handlers[number] = signal.signal(number, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
