"""Launch the kernels on a GPU that is not there, and count what their machine code takes.

A driver that loads and runs nothing stands in for CUDA's. A layer's forward pass, backward pass and
decoding run as on a GPU of the capability, and Triton compiles every kernel that they launch, so
that mistakes of the host's code, of the choice of block shapes and of compilation show.

python -m tests.compile_kernels             counts as below, and compares with results/kernels.json
python -m tests.compile_kernels --update    writes the counts of the installed Triton to that file
python -m tests.compile_kernels --variants  launches every variant and choice on every card, and
                                            checks that all kernels stay within LIMITS

For each kernel that has tiles, the table has its registers, bytes spilled, bytes of shared memory,
whether the assembler serialises its asynchronous matrix products (warnings such as C7515) and, for
each loop over tiles, those without a mask first, the instructions for a score. All this is of
Triton's own assembler.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import sm_arch_from_capability
from triton.compiler import CompiledKernel

from attention_paths.fused import fused
from attention_paths.reference import Context
from tests.kernel_cases import FUSED, SETTINGS, build_layer

TABLE = Path(__file__).parent.parent / "results/kernels.json"
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

# bytes of shared memory that a block can have (CUDA C++ Programming Guide, compute capabilities)
SHARED_MEMORY = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}
# A kernel that spills more waits for memory. One with fewer registers for its tiles is one that
# the assembler has given up on: it spills nearly everything.
MOST_SPILLED = 1024
FEWEST_REGISTERS = 65

# (capability, config, head size) of the table
COUNTED = [
    (capability, case, d)
    for case in ("lssar_p15.py", "lssa.py", "sigmoid.py", "relu_li.py")
    for d in (64, 128)
    for capability in (90, 80)
]
QUICK = [(80, "relu_li.py", 64)]


# ---- launches ----


class Driver:
    """A CUDA driver without a GPU. A device's number is its capability."""

    def __init__(self) -> None:
        self.device = 90
        self.utils = self

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.device, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[device]}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple:
        return None, None, 0, 0, 1024

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        return lambda *arguments: None


driver = Driver()


@dataclass
class Launch:
    """A kernel that was launched: its name, its keyword arguments, and what Triton compiled."""

    kernel: str
    options: dict[str, Any]
    compiled: CompiledKernel

    @property
    def has_tiles(self) -> bool:
        return "BLOCK_M" in self.options


def launches(
    capability: int, case: str, d: int, dtype: torch.dtype = torch.bfloat16
) -> list[Launch]:
    """Each launch of a layer's forward and backward pass and of its decoding."""
    driver.device = capability
    triton.runtime.driver.set_active(driver)
    layer = build_layer(case, d)
    q, k, v = (torch.zeros(1, 2, 256, d, dtype=dtype, requires_grad=True) for _ in "qkv")
    gates = torch.zeros(1, 2, 256, requires_grad=True) if "forget" in case else None
    positions = torch.zeros(1, 256, dtype=torch.int32) if "document_mask" in case else None
    context = Context(log_forget=gates, document_positions=positions)
    recorded = []
    run = triton.JITFunction.run

    def recording_run(self, *arguments, **options):
        compiled = run(self, *arguments, **options)
        recorded.append(Launch(self.__name__, options, compiled))
        return compiled

    triton.JITFunction.run = recording_run
    try:
        fused(layer, q, k, v, context).sum().backward()
        with torch.no_grad():
            fused(layer, q, k, v, context)
            fused(layer, q[:, :, -1:], k, v, context.select(queries=slice(-1, None)))
    finally:
        triton.JITFunction.run = run
    return recorded


# ---- counts ----


def count(launch: Launch) -> dict[str, Any]:
    """What the machine code of a kernel with tiles takes."""
    options = launch.options
    shape = [options[key] for key in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")]
    m, n, warps, _ = shape
    scores = m * n / (32 * warps)  # of a tile, that a thread computes
    said, sass = assemble(launch.compiled)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    return {
        "shape": shape,
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": sum(map(int, spilled)),
        "shared": launch.compiled.metadata.shared,
        "serialised": "serialized" in said,
        "instructions": [round(length / scores, 1) for length in loops(sass)],
    }


def assemble(compiled: CompiledKernel) -> tuple[str, str]:
    """What the assembler says of a kernel, and its machine code as text."""
    capability = compiled.metadata.target.arch
    assembler = "ptxas-blackwell" if capability >= 100 else "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        binary = Path(folder, "kernel.cubin")
        source.write_text(compiled.asm["ptx"])
        said = output(
            TOOLS / assembler,
            "-v",
            "--regAllocOptLevel=2",
            f"--gpu-name={sm_arch_from_capability(capability)}",
            source,
            "-o",
            binary,
        )
        return said, output(TOOLS / "nvdisasm", "-c", binary)


def output(*command: str | Path) -> str:
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout


def loops(sass: str) -> list[int]:
    """The lengths of the innermost loops of at least 100 instructions."""
    labels: dict[str, int] = {}
    innermost: list[tuple[int, int]] = []
    end = 0  # the current instruction
    for line in sass.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        instruction = re.search(r"/\*[0-9a-f]{4,5}\*/ +(.*?);", line)
        if label:
            labels[label[1]] = end
        elif instruction:
            branch = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", instruction[1])
            begin = labels.get(branch[1], end) if branch else end
            if end - begin >= 100 and not any(begin <= inner for inner, _ in innermost):
                innermost.append((begin, end))
            end += 1
    return [end + 1 - begin for begin, end in innermost]


def counted(capability: int, case: str, d: int) -> dict[str, dict]:
    """The rows of the table for a config at a head size on a GPU."""
    rows = {}
    for launch in launches(capability, case, d):
        if launch.has_tiles:
            name = f"sm_{capability}, d {d}, {case.removesuffix('.py')}, {launch.kernel}"
            if launch.options.get("SAVE") is False:
                name += ", without gradients"
            rows[name] = count(launch)
    return rows


def over_limits(capability: int, counts: dict[str, Any]) -> list[str]:
    """What is wrong with a kernel's counts, in words."""
    problems = []
    if counts["shared"] > SHARED_MEMORY[capability]:
        problems.append(f"{counts['shared']} bytes of shared memory")
    if counts["spilled"] >= MOST_SPILLED:
        problems.append(f"{counts['spilled']} bytes spilled")
    if counts["registers"] < FEWEST_REGISTERS:
        problems.append(f"{counts['registers']} registers")
    return problems


# ---- commands ----


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--quick", action="store_true", help="ReLU of head size 64 alone")
    arguments = parser.parse_args()
    # the table is of Triton's own assembler
    os.environ["TRITON_PTXAS_PATH"] = str(TOOLS / "ptxas")
    os.environ["TRITON_PTXAS_BLACKWELL_PATH"] = str(TOOLS / "ptxas-blackwell")
    if arguments.variants:
        check_variants()
    else:
        compare_with_table(QUICK if arguments.quick else COUNTED, arguments.update)


def compare_with_table(selection: list[tuple[int, str, int]], update: bool) -> None:
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    before = table.get(triton.__version__, {})
    now: dict[str, dict] = {}
    for capability, case, d in selection:
        for name, counts in counted(capability, case, d).items():
            print(f"{name}: {counts}", flush=True)
            now[name] = counts
    if update:
        write(table | {triton.__version__: before | now})
        return
    if not before:
        print(f"{TABLE.name} has nothing of Triton {triton.__version__}: nothing is compared")
        return
    changed = [name for name in now if now[name] != before.get(name)]
    for name in changed:
        print(f"{name} was {before.get(name)}")
    if changed:
        sys.exit(f"{len(changed)} kernels differ from the table: --update, if it is on purpose")


def write(table: dict) -> None:
    """One kernel a line, so that a change shows as the lines of what changed."""
    releases = []
    for release, entries in sorted(table.items()):
        lines = [f"    {json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries)]
        releases.append(f"  {json.dumps(release)}: {{\n" + ",\n".join(lines) + "\n  }")
    TABLE.write_text("{\n" + ",\n".join(releases) + "\n}\n")


def check_variants() -> None:
    """Launch every variant and setting on every card, and exit where a kernel is over a limit."""
    problems = []
    for capability in SHARED_MEMORY:
        for case in (*FUSED, *SETTINGS):
            for d in (64, 80, 128):
                problems += check_launches(capability, case, d)
        problems += check_other_choices(capability)
    if problems:
        sys.exit("\n".join([f"{len(problems)} kernels are over a limit:", *problems]))


def check_other_choices(capability: int) -> list[str]:
    """The problems of a small head, of the backward pass without atomics, and of float32."""
    problems = check_launches(capability, "lssar_p15.py", 24)
    for case in ("lssar_p15.py", "lssa.py", "softmax_p3.py", "relu_li.py"):
        torch.use_deterministic_algorithms(True)
        problems += check_launches(capability, case, 128)
        torch.use_deterministic_algorithms(False)
        for tf32 in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            problems += check_launches(capability, f"{case} --window=100", 128, torch.float32)
    return problems


def check_launches(
    capability: int, case: str, d: int, dtype: torch.dtype = torch.bfloat16
) -> list[str]:
    """The problems of a layer's kernels with tiles, a line each."""
    layer = f"sm_{capability}, d {d}, {case}, {dtype}"
    done = launches(capability, case, d, dtype)
    lines = []
    spilled = 0
    for launch in done:
        if launch.has_tiles:
            counts = count(launch)
            spilled = max(spilled, counts["spilled"])
            problems = over_limits(capability, counts)
            if problems:
                lines.append(f"{layer}, {launch.kernel} {counts['shape']}: {', '.join(problems)}")
    print(f"{layer}: {len(done)} launches, at most {spilled} bytes spilled", *lines, flush=True)
    return lines


if __name__ == "__main__":
    main()
