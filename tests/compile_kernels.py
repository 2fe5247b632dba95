"""Launch the kernels on a GPU that is not there, and count what their machine code takes.

A driver that loads and runs nothing stands in for CUDA's. A layer's forward pass, backward pass and
decoding run as on a GPU of the capability, and Triton compiles every kernel that they launch, so
that mistakes of the host's code, of the choice of block shapes and of compilation show.

python -m tests.compile_kernels             counts as below, and compares with results/kernels.json
python -m tests.compile_kernels --update    writes the counts of the installed Triton to that file
python -m tests.compile_kernels --variants  launches every variant and choice, and counts nothing

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
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from attention_paths.fused import fused
from attention_paths.reference import Context
from tests.fused import FUSED, SETTINGS, build

TABLE = Path(__file__).parent.parent / "results/kernels.json"
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
# bytes of shared memory that a block can have (CUDA C++ Programming Guide, compute capabilities)
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
# (capability, config, head size) of the table
COUNTED = [
    (capability, case, d)
    for case in ("lssar_p15.py", "lssa.py", "sigmoid.py", "relu_li.py")
    for d in (64, 128)
    for capability in (90, 80)
]
QUICK = [(80, "relu_li.py", 64)]


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


def launches(
    capability: int, case: str, d: int, dtype: torch.dtype = torch.bfloat16
) -> list[tuple[str, dict, CompiledKernel]]:
    """Each launch of a layer's forward and backward pass and of its decoding.

    A kernel's name, the options of its launch, and the compiled kernel.
    """
    driver.device = capability
    triton.runtime.driver.set_active(driver)
    layer, found, run = build(case, d), [], triton.JITFunction.run
    q, k, v = (torch.zeros(1, 2, 256, d, dtype=dtype, requires_grad=True) for _ in "qkv")
    gates = torch.zeros(1, 2, 256, requires_grad=True) if "forget" in case else None
    context = Context(log_forget=gates)

    def recorded(self, *arguments, **options):
        compiled = run(self, *arguments, **options)
        found.append((self.__name__, options, compiled))
        return compiled

    triton.JITFunction.run = recorded
    try:
        fused(layer, q, k, v, context).sum().backward()
        with torch.no_grad():
            fused(layer, q, k, v, context)
            fused(layer, q[:, :, -1:], k, v, context)
    finally:
        triton.JITFunction.run = run
    return found


# ---- counts ----


def count(compiled: CompiledKernel, scores: float) -> dict:
    """What a kernel's machine code takes; a thread computes `scores` of each tile."""
    architecture = f"sm_{compiled.metadata.target.arch}".replace("sm_90", "sm_90a")
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(compiled.asm["ptx"])
        said = output(
            TOOLS / "ptxas", "-v", "--regAllocOptLevel=2",
            f"--gpu-name={architecture}", source, "-o", binary,
        )  # fmt: skip
        lengths = loops(output(TOOLS / "nvdisasm", "-c", binary))
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled": sum(map(int, spilled)),
        "shared": compiled.metadata.shared,
        "serialised": "serialized" in said,
        "instructions": [round(length / scores, 1) for length in lengths],
    }


def output(*command: str | Path) -> str:
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout


def loops(sass: str) -> list[int]:
    """The lengths of the innermost loops of at least 100 instructions."""
    labels: dict[str, int] = {}
    found: list[tuple[int, int]] = []
    end = 0  # the current instruction
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = end
        elif instruction := re.search(r"/\*[0-9a-f]{4,5}\*/ +(.*?);", line):
            branch = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", instruction[1])
            begin = labels.get(branch[1], end) if branch else end
            if end - begin >= 100 and not any(begin <= other for other, _ in found):
                found.append((begin, end))
            end += 1
    return [end + 1 - begin for begin, end in found]


def counted(capability: int, case: str, d: int) -> dict[str, dict]:
    """The part of the table for a config at a head size on a GPU."""
    found = {}
    for name, options, compiled in launches(capability, case, d):
        if "BLOCK_M" in options:
            m, n, warps = (options[key] for key in ("BLOCK_M", "BLOCK_N", "num_warps"))
            without = ", without gradients" if options.get("SAVE") is False else ""
            entry = f"sm_{capability}, d {d}, {case.removesuffix('.py')}, {name}{without}"
            found[entry] = {"shape": [m, n, warps, options["num_stages"]]}
            found[entry] |= count(compiled, m * n / (32 * warps))
    return found


# ---- commands ----


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--quick", action="store_true", help="ReLU of head size 64 alone")
    arguments = parser.parse_args()
    # the table is of Triton's own assembler
    os.environ["TRITON_PTXAS_PATH"] = str(TOOLS / "ptxas")
    if arguments.variants:
        launch_everything()
        return
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    before = table.get(triton.__version__, {})
    found: dict[str, dict] = {}
    for capability, case, d in QUICK if arguments.quick else COUNTED:
        for name, counts in counted(capability, case, d).items():
            print(f"{name}: {counts}", flush=True)
            found[name] = counts
    if arguments.update:
        write(table | {triton.__version__: before | found})
    elif not before:
        print(f"{TABLE.name} has nothing of Triton {triton.__version__}: nothing is compared")
    else:
        changed = {name: before.get(name) for name in found if found[name] != before.get(name)}
        for name, counts in changed.items():
            print(f"{name} was {counts}")
        if changed:
            sys.exit(f"{len(changed)} kernels differ from the table: --update, if it is on purpose")


def write(table: dict) -> None:
    """One kernel a line, so that a change shows as the lines of what changed."""
    releases = []
    for release, entries in sorted(table.items()):
        lines = (f"    {json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries))
        releases.append(f"  {json.dumps(release)}: {{\n" + ",\n".join(lines) + "\n  }")
    TABLE.write_text("{\n" + ",\n".join(releases) + "\n}\n")


def launch_everything() -> None:
    cases = [(case, 64) for case in (*FUSED, *SETTINGS)]
    for case, d in [*cases, ("lssar_p15.py", 24), ("lssa.py", 128)]:
        for capability in (90, 80):
            show_launches(capability, case, d)
    for case in ("lssar_p15.py", "lssa.py", "softmax_p3.py", "relu_li.py"):
        torch.use_deterministic_algorithms(True)
        show_launches(80, case, 128)
        torch.use_deterministic_algorithms(False)
        for tf32 in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            for capability in (86, 80, 90):
                show_launches(capability, f"{case} --window=100", 128, torch.float32)


def show_launches(capability: int, case: str, d: int, dtype: torch.dtype = torch.bfloat16) -> None:
    count = len(launches(capability, case, d, dtype))
    print(f"sm_{capability}, d {d}, {case}, {dtype}: {count} launches", flush=True)


if __name__ == "__main__":
    main()
