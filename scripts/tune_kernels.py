"""Measure the fused kernels' block shapes on an NVIDIA GPU, and write the fastest.

python -m scripts.tune_kernels lssar_p15 --out results/shapes.json
ATTENTION_SHAPES=results/shapes.json torchrun ... train.py configs/lssar_p15.py

kernels.py has a table of shapes for every GPU, and needs no tuning. Shapes change the order of
summation, so that a run must be resumed with those that it started with. Each is measured in a
process that may die of it: the next shape then gets another. A row takes some minutes.
"""

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

import kernels
from attention import Attention
from config import load_config
from errors import UserError, command
from model import build_attention
from runtime.device import environment
from runtime.files import read_json, write_json
from scripts.benchmark import check_paths
from scripts.benchmark_kernels import HEADS, time_calls

Shape = tuple[int, int, int, int]  # as in kernels.py
BATCH, LENGTH = 8, 4096
CANDIDATES: list[Shape] = [
    (m, n, warps, stages)
    for m, n, warps in (
        (128, 128, 8), (128, 64, 8), (64, 128, 8), (32, 128, 8), (64, 64, 4), (64, 32, 4),
        (32, 64, 4),
    )
    for stages in (2, 3)
]  # fmt: skip


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("rows", nargs="+", metavar="ROW", help="configs, such as lssar_p15")
    parser.add_argument("--out", metavar="FILE", default="results/shapes.json")
    arguments = parser.parse_args()
    check_paths(arguments.out, None)
    for name in arguments.rows:
        layer(name, 64)
    if not torch.cuda.is_available():
        raise UserError("this needs an NVIDIA GPU, and this machine has none")
    result = read_json(arguments.out) or {"shapes": {}, "ms": {}}
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    for name, ms in measure_shapes(arguments.rows, "cuda", BATCH, LENGTH, CANDIDATES):
        times = {shape: time for shape, time in ms.items() if not isinstance(time, str)}
        if times:
            result["shapes"][name] = min(times, key=times.__getitem__)
        result["ms"][name] = {" x ".join(map(str, shape)): time for shape, time in ms.items()}
        write_json(arguments.out, result | {"environment": environment()})
    print(f"written: {arguments.out}")


def layer(name: str, d: int) -> Attention:
    sizes = [f"--n_head={HEADS}", f"--n_embd={HEADS * d}"]
    return build_attention(load_config([f"configs/{name}.py", *sizes, "--attention_impl=triton"]))


def measure_shapes(
    rows: Sequence[str], device: str, batch: int, length: int, candidates: Sequence[Shape]
) -> Iterator[tuple[str, dict[Shape, float | str]]]:
    """The milliseconds of each candidate, or why it failed.

    Yields them for each kernel of these rows and both head sizes, with the kernel's name in a file
    of measured shapes.
    """
    jobs = [(row, d, kernel) for row in rows for d in (64, 128) for kernel in kernels_of(row)]
    pool = one_process()
    with tqdm(total=len(jobs) * len(candidates), desc="shapes") as progress:
        for row, d, kernel in jobs:
            ms: dict[Shape, float | str] = {}
            name = ""
            for shape in candidates:
                work = pool.submit(time_shape, row, d, kernel, shape, device, batch, length)
                try:
                    name, ms[shape] = work.result()
                except BrokenProcessPool:
                    ms[shape], pool = "the process died", one_process()
                progress.update()
            yield name, ms
    pool.shutdown()


def one_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def kernels_of(row: str) -> tuple[str, ...]:
    forward = kernels.TWO_STAGES if layer(row, 64).p else kernels.ONE_STAGE
    return forward, kernels.KEYS, kernels.QUERIES


def time_shape(
    row: str, d: int, kernel: str, shape: Shape, device: str, batch: int, length: int
) -> tuple[str, float | str]:
    """The name of a kernel's measured shape, and the milliseconds of a call with this one."""
    usual, name = kernels.block_shape, ""

    tuned = kernel

    def block_shape(kernel: str, q: Tensor, phi: str, p: float) -> dict[str, int]:
        nonlocal name
        if kernel != tuned:
            return usual(kernel, q, phi, p)
        name = kernels.shape_name(kernels.capability(), kernel, q.dtype, d, phi, p)
        return dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), shape, strict=True))

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v, gradient = (
        torch.randn(batch, HEADS, length, d, device=device, dtype=dtype) for _ in "qkvg"
    )
    backward = kernel in (kernels.KEYS, kernels.QUERIES)
    kernels.block_shape = block_shape
    # dq has a kernel of its own where the order of summation is fixed
    torch.use_deterministic_algorithms(kernel == kernels.QUERIES)
    try:
        ms = time_calls(layer(row, d), (q, k, v), gradient if backward else None)
    finally:
        kernels.block_shape = usual
        torch.use_deterministic_algorithms(False)
    return name, ms if isinstance(ms, str) else statistics.median(ms)


if __name__ == "__main__":
    main()
