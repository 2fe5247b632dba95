"""Time block shapes of the fused kernels on this GPU, for the table in kernels/launch.py.

python -m tests.tune_kernels configs/lssar_p15.py configs/lssa.py
python -m tests.tune_kernels configs/lssar_p15.py --batch_size 1 --length 16384 --seconds 60

Prints the fastest shapes of the forward pass and of the backward pass over keys, beside the shape
of today's table: the time of the kernel alone, without what the host and torch add. All shapes are
compiled first, by several processes. A shape whose output or gradients differ from today's by more
than the self-check allows is left out, as is one that cannot be compiled or whose kernel faults,
after which the timing goes on in a new process.
"""

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from attention_paths.kernels import launch
from attention_paths.module import Attention
from layers.heads import build_attentions
from layers.selfcheck import ROUNDING
from runtime.config_files import load_config

Shape = tuple[int, int, int, int]  # queries, keys, warps, stages
SHAPES: dict[str, list[Shape]] = {
    launch.FORWARD: list(itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))),
    launch.KEYS: list(itertools.product((32, 64, 128), (64, 128), (4, 8), (1, 2, 3))),
}
# Names of the Triton kernels, as the profiler has them.
NAMES = {launch.FORWARD: "forward_", launch.KEYS: "backward_keys"}
PRINTED = 5  # shapes


class Sizes(NamedTuple):
    B: int
    H: int
    L: int
    d: int


class Job(NamedTuple):
    """A kernel of a config's attention, with a block shape; None: the table's."""

    config: str
    kernel: str
    shape: Shape | None
    sizes: Sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("configs", nargs="+", metavar="CONFIG.py")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--n_head", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--head_size", type=int, default=64)
    parser.add_argument(
        "--seconds", type=float, default=300, help="stop timing after so many seconds"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("tune_kernels needs an NVIDIA GPU")
    sizes = Sizes(options.batch_size, options.n_head, options.length, options.head_size)
    jobs = []
    for config, kernel in itertools.product(options.configs, SHAPES):
        for shape in (None, *SHAPES[kernel]):
            jobs.append(Job(config, kernel, shape, sizes))
    compile_all(jobs)
    report(time_all(jobs, time.monotonic() + options.seconds))


def compile_all(jobs: list[Job]) -> None:
    """Compile the kernels into Triton's cache, for a single sequence."""
    small = []
    for job in jobs:
        single = job.sizes._replace(B=1)
        small.append(job._replace(sizes=single))
    workers = max(1, (os.cpu_count() or 2) - 2)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        # what a compiler's fault leaves uncompiled is compiled while it is timed
        with suppress(BrokenProcessPool):
            list(tqdm(pool.map(attempt, small), "compiling", len(small)))


def time_all(jobs: list[Job], end: float) -> dict[Job, float | str]:
    """The milliseconds of each job, or why it has none."""
    results: dict[Job, float | str] = {}
    pool = None
    for job in tqdm(jobs, "timing"):
        if time.monotonic() > end:
            break
        if pool is None:
            pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        try:
            results[job] = pool.submit(attempt, job).result()
        except BrokenProcessPool as error:  # a fault may end the process itself
            results[job] = str(error)
        if isinstance(results[job], str):  # after a fault the process has no usable GPU
            pool.shutdown()
            pool = None
    return results


def attempt(job: Job) -> float | str:
    """Time a job; returns milliseconds, or the error."""
    try:
        return kernel_ms(job)
    except Exception as error:  # whatever Triton raises
        message = " ".join(str(error).split())
        return f"{type(error).__name__}: {message[:200]}"


# ---- in a process of its own ----


@cache
def attention_and_inputs(config: str, sizes: Sizes) -> tuple[Attention, Tensor]:
    """The attention of a config's first layer, and q, k, v and a gradient [4, B, H, L, d]."""
    width = sizes.H * sizes.d
    settings = [f"--n_head={sizes.H}", f"--n_embd={width}", "--attention_impl=triton"]
    loaded = load_config([config, *settings])
    layer = build_attentions(loaded, layer=0)[0].cuda()
    packed = torch.randn(sizes.B, sizes.L, 4, sizes.H, sizes.d, device="cuda")
    return layer, packed.bfloat16().permute(2, 0, 3, 1, 4)


@cache
def expected(config: str, sizes: Sizes) -> list[Tensor]:
    """The output and the gradients with the shapes of the table."""
    return evaluate(config, sizes)


def evaluate(config: str, sizes: Sizes) -> list[Tensor]:
    layer, (*inputs, gradient) = attention_and_inputs(config, sizes)
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    out = layer(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), gradient)
    return [out.detach(), *gradients]


def kernel_ms(job: Job) -> float:
    """Time a job's kernel. Raises ValueError where it computes something else."""
    layer, _ = attention_and_inputs(job.config, job.sizes)
    reference = expected(job.config, job.sizes)
    major, minor = torch.cuda.get_device_capability()
    kind = "hopper" if 10 * major + minor in launch.HOPPER_LIKE else "ampere"
    table = launch.SHAPES[kind]
    if job.shape is not None:
        launch.SHAPES[kind] = table | {job.kernel: {128: job.shape}}
    allowed = (8 + (layer.p or 0)) * ROUNDING
    try:
        results = evaluate(job.config, job.sizes)
        for result, exact in zip(results, reference, strict=True):
            difference = (result - exact).float().norm()
            error = float(difference / exact.float().norm())
            if not error <= allowed:
                raise ValueError(f"differs from today's shape by {error:.2g}")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(10):
                evaluate(job.config, job.sizes)
            torch.cuda.synchronize()
    finally:
        launch.SHAPES[kind] = table
    microseconds = []
    for event in profile.events():
        if event.name.startswith(NAMES[job.kernel]):
            microseconds.append(event.device_time)
    return statistics.median(microseconds) / 1000


# ---- the report ----


def report(results: dict[Job, float | str]) -> None:
    groups: dict[tuple[str, str], dict[Shape | None, float]] = {}
    for job, result in results.items():
        times = groups.setdefault((job.config, job.kernel), {})
        if not isinstance(result, str):
            times[job.shape] = result
    for (config, kernel), times in groups.items():
        today = times.pop(None, None)
        print(f"\n{Path(config).stem}, {kernel}: {len(times)} shapes")
        if today is not None:
            print(f"  {today:.3f} ms  today's")
        fastest = sorted(times.items(), key=lambda item: item[1])
        for shape, ms in fastest[:PRINTED]:
            print(f"  {ms:.3f} ms  {shape}")


if __name__ == "__main__":
    main()
