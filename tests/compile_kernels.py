"""Compile the kernels for NVIDIA's A100 and H100 without a GPU, each block shape at least once.

tests/test_kernels.py runs this in a separate process, with Triton's interpreter off. Prints
registers, bytes spilled and shared memory of every kernel, and the instructions per score of each
loop over tiles, those without a mask first: python -m tests.compile_kernels
"""

import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
FLOAT32 = {
    "SCALE", "BIAS", "NORM", "K_INVERSE", "ROWS", "TERMS", "DSCALE", "DBIAS", "SUM", "Z", "PARTS",
    "SUMS",
}  # fmt: skip
# bytes of shared memory that a block can have (CUDA C++ Programming Guide, compute capabilities)
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}


def compile_for(
    capability: int, kernel, constants: dict, options: dict, *, atomic: bool = False,
    ones: bool = False, dtype: str = "bf16",
) -> str:  # fmt: skip
    """Compile a kernel for inputs whose rows are contiguous; returns a line of what it takes.

    With `ones` for sizes of 1, each of which Triton makes a constant unless it is told not to.
    """
    while not isinstance(kernel, triton.JITFunction):
        kernel = kernel.fn
    signature, values, alignment = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[i,] = "constexpr", constants[name]
        elif name.endswith("strides"):
            dimensions = 2 if name[:4] in ("scal", "bias", "norm") else 4
            signature[name] = ("i32",) * (dimensions - 1) + ("constexpr",)
            values[i, dimensions - 1] = 1
            for j in range(dimensions - 1):
                alignment[i, j] = [["tt.divisibility", 16]]
        elif name.isupper() and name not in ("B", "H", "L"):
            summed = name in FLOAT32 or (name == "DQ" and atomic)
            signature[name] = "*fp32" if summed else f"*{dtype}"
            alignment[i,] = [["tt.divisibility", 16]]
        elif ones and not kernel.params[i].do_not_specialize:
            signature[name], values[i,] = "constexpr", 1
        else:
            signature[name] = "i32"
    source = ASTSource(kernel, signature, values, alignment)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options)
    assert compiled.metadata.shared <= SHARED_MEMORY[capability], kernel.__name__
    cubin, instructions = compiled.asm["cubin"], ""
    registers, spilled = re.search(r"REG:(\d+) STACK:(\d+)", dump(cubin, "-res-usage")).groups()
    if "BLOCK_M" in constants:
        scores = constants["BLOCK_M"] * constants["BLOCK_N"] / (32 * compiled.metadata.num_warps)
        counts = ", ".join(f"{n / scores:.1f}" for n in loops(dump(cubin, "-sass")))
        instructions = f"; instructions a score: {counts}"
    return (
        f"sm_{capability} {kernel.__name__:20} {constants.get('BLOCK_M', '')} x "
        f"{constants.get('BLOCK_N', '')}: {registers} registers, {spilled} bytes spilled, "
        f"{compiled.metadata.shared} bytes shared{instructions}"
    )


def dump(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [CUOBJDUMP, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loops(sass: str) -> list[int]:
    """The number of instructions in each innermost loop that has at least 100."""
    code = re.findall(r"/\*([0-9a-f]{4,5})\*/ +(.*?);", sass)
    places = {int(address, 16): place for place, (address, _) in enumerate(code)}
    found = []
    for end, (_, instruction) in enumerate(code):
        branch = re.search(r"\bBRA\b.* 0x([0-9a-f]+)", instruction)
        begin = places.get(int(branch[1], 16), end) if branch else end
        if end - begin >= 100 and not any(begin <= other for other, _ in found):
            found.append((begin, end))
    return [end - begin + 1 for begin, end in found]


def main() -> None:
    capabilities = itertools.cycle((90, 80))
    sizes = dict(D=64, BLOCK_D=64, WINDOW=None)
    jobs: list[Callable[[], str]] = []

    def compile_row(kernel, config, phi, *, forward=False, atomic=False, dtype="bf16", **constants):
        inputs = torch.float32 if dtype == "fp32" else torch.bfloat16
        function, slope, shift = kernels._phi(phi, inputs)
        unit = phi == "softplus"
        constants |= dict(PHI=function, UNIT=unit, BIASED=not unit, PRECISION="ieee")
        last = dict(SHIFT=None if unit else shift) if forward else dict(SLOPE=slope, SIGNED=False)
        constants |= last
        options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
        constants = config.kwargs | sizes | constants
        target = next(capabilities)
        jobs.append(
            partial(compile_for, target, kernel, constants, options, atomic=atomic, dtype=dtype)
        )

    for config in kernels.FORWARD_BLOCKS:
        compile_row(kernels._forward_two_stages, config, "softplus", forward=True, P=15, SAVE=True)
    for config in kernels.BACKWARD_BLOCKS:
        compile_row(
            kernels._backward_keys, config, "softplus", atomic=True, P=15, L1=True, ATOMIC=True
        )
    first, last = kernels.FORWARD_BLOCKS[0], kernels.BACKWARD_BLOCKS[-1]
    for phi in ("softplus", "exp"):
        compile_row(kernels._forward_one_stage, first, phi, forward=True, L1=True, SAVE=True)
        compile_row(kernels._backward_queries, last, phi, P=0, L1=False, LEARNT=True)
    compile_row(kernels._forward_two_stages, first, "exp", forward=True, P=2.5, SAVE=False)
    (small,) = kernels.FLOAT32_BLOCKS
    exact = dict(P=15, dtype="fp32")
    compile_row(kernels._forward_two_stages, small, "softplus", forward=True, SAVE=True, **exact)
    compile_row(
        kernels._backward_keys, small, "softplus", atomic=True, L1=True, ATOMIC=True, **exact
    )
    phi = kernels.softplus16
    small = [
        (kernels._inverse_norms, dict(M=64)),
        (kernels._backward_rows, dict(P=15, M=64)),
        (kernels._finish_queries, dict(UNIT=True, M=64)),
        (kernels._decode_scores, dict(PHI=phi, SHIFT=None, BIASED=False, UNIT=True, BLOCK_N=64)),
        (kernels._decode_values, dict(PHI=phi, SHIFT=None, P=15, L1=True, BLOCK_N=64, SPLITS=64)),
        (kernels._decode_sum, dict(P=15, SPLITS=64)),
    ]
    for kernel, constants in small:
        for ones in [False, True] if "decode" in kernel.__name__ else [False]:
            target = next(capabilities)
            jobs.append(partial(compile_for, target, kernel, sizes | constants, {}, ones=ones))
    windowed = dict(P=15, WINDOW=300)
    compile_row(kernels._forward_two_stages, first, "softplus", forward=True, SAVE=True, **windowed)
    compile_row(
        kernels._backward_keys, last, "softplus", atomic=True, L1=True, ATOMIC=True, **windowed
    )
    compile_row(kernels._backward_queries, last, "softplus", L1=True, LEARNT=True, **windowed)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(lambda job: job(), jobs):
            print(line)


if __name__ == "__main__":
    main()
