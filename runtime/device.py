"""The device that a model runs on: its choice, precision, peak speed, memory and description."""

import ctypes
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from config import ROOT
from errors import UserError, first_line
from runtime.distributed import world_size

# Dense bfloat16 (T4: float16) peaks in FLOP/s, accumulated in float32, from NVIDIA's data sheets
# and, for GeForce, white papers ("NVIDIA RTX Blackwell GPU Architecture"); first match wins.
PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "A40": 150e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L4": 121e12,
    "T4": 65e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
# Parameters of mallopt, from glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
# Values of CUDA_VISIBLE_DEVICES that hide every GPU; Slurm sets the last.
NO_DEVICES = ("", "-1", "NoDevFiles")


def pick_device(name: str = "auto") -> torch.device:
    """Return the device that a setting names; 'auto' is cuda, else mps, else cpu.

    Under torchrun 'cuda' is the process's own GPU. Raises UserError for a device that this machine
    does not have, and for a GPU that torch cannot use; 'auto' does not take the CPU instead.
    """
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if not gpus and name.startswith(("auto", "cuda")):
        check_unseen_gpu()
    others = ["mps", "cpu"] if torch.backends.mps.is_available() else ["cpu"]
    available = gpus + others
    # a rank never touches another rank's GPU, where its CUDA context would take memory
    local_rank = os.environ.get("LOCAL_RANK", "0")
    own_gpu = f"cuda:{local_rank}"
    aliases = {"auto": own_gpu if gpus else others[0], "cuda": own_gpu}
    device = aliases.get(name, name)
    if gpus and device == own_gpu and device not in available:
        raise UserError(
            f"LOCAL_RANK = {local_rank}: this process has no GPU of its own, as torch sees "
            f"{len(gpus)} on this machine: give torchrun --nproc_per_node={len(gpus)} or less"
        )
    if device not in available:
        names = ", ".join(available)
        raise UserError(f"device = {device!r}; this machine has {names}; 'auto' picks one")
    if device.startswith("cuda"):
        check_gpu(device)
    return torch.device(device)


def check_gpu(device: str) -> None:
    """Raise UserError if a GPU fails at a first operation, as with an old driver or an old GPU."""
    try:
        torch.ones(1, device=device)
    except RuntimeError as error:
        if "out of memory" in str(error):  # other processes fill it
            raise
        raise UserError(gpu_error_message(device, error)) from error


def check_unseen_gpu() -> None:
    """Raise UserError if torch does not see this machine's GPU, unless it is hidden on purpose."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in NO_DEVICES:
        return
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        # a container may have the driver and no nvidia-smi
        if "driver on your system is too old" in str(error) or nvidia_smi_works():
            raise UserError(gpu_error_message("this machine's GPU", error)) from error


def gpu_error_message(gpu: str, error: Exception) -> str:
    """Return a sentence on a GPU that torch cannot use."""
    reason = first_line(error).partition(". ")[0]
    return (
        f"torch {torch.__version__} cannot use {gpu}: {reason}. The README's Quickstart says which "
        "drivers and GPUs it works with; --device=cpu needs none"
    )


def nvidia_smi_works() -> bool:
    try:
        listing = subprocess.run(("nvidia-smi", "-L"), capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0  # 6: there is a driver, but no GPU


def open_device(name: str) -> torch.device:
    """Return the device that a setting names, set up for training; under torchrun, the rank's GPU.

    Raises UserError as pick_device does, and for several processes on 'mps'.
    """
    ranks = world_size()
    device = pick_device("cuda" if ranks > 1 and name.startswith("cuda:") else name)
    if device.type == "mps" and ranks > 1:
        raise UserError(f"device = 'mps' takes one process, not {ranks}: leave out torchrun")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    return device


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step instead of returning it to the system.

    Otherwise each training step on a CPU faults in the pages of its large tensors again, which
    takes 13% of a step in float32 and more in bfloat16 (docs/benchmarks.md). Other C libraries are
    left as they are.
    """
    with suppress(AttributeError):  # macOS and musl have no mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products; 'auto' is bfloat16 (or else float16) on CUDA, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cuda":
        return torch.float32
    with torch.cuda.device(device):  # is_bf16_supported asks about the current device
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float16


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """A context in which matrix products are computed in dtype."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def pick_compile(setting: bool | None, device: torch.device, many_graphs: bool = False) -> bool:
    """Whether to compile the model: the setting or, if it is None, on CUDA unless graphs are many.

    Raises UserError if torch.compile would fail, without a compiler or Python's headers.
    """
    if setting is None:
        setting = device.type == "cuda" and not many_graphs
    if setting:
        check_compiler(device)
    return setting


def check_compiler(device: torch.device) -> None:
    """Raise UserError if Triton, or on a CPU Inductor, lacks its compiler or Python's headers."""
    if device.type == "cuda":
        candidates = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    else:
        candidates = [os.environ.get("CXX", "g++")]
    missing = []
    if not any(map(shutil.which, candidates)):
        missing.append(f"a compiler ({' or '.join(candidates)})")
    # where Triton looks for it; Debian's default scheme has another folder
    headers = Path(sysconfig.get_path("include", "posix_prefix"))
    if not (headers / "Python.h").is_file():
        missing.append(f"Python's headers ({headers}/Python.h; python3-dev in Debian)")
    if missing:
        raise UserError(
            f"torch.compile needs {' and '.join(missing)}: install what is missing, or add "
            "--compile=False"
        )


class Event:
    """A timestamp: a CUDA event, or the host clock on other devices."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda: torch.cuda.Event | None = None
        self.on_host = time.perf_counter()
        if device.type == "cuda":
            self.on_cuda = torch.cuda.Event(enable_timing=True)
            self.on_cuda.record()

    def seconds_since(self, earlier: "Event") -> float:
        """Wait for the device to get here, and return the seconds from an earlier event."""
        if self.on_cuda is None or earlier.on_cuda is None:
            return self.on_host - earlier.on_host
        self.on_cuda.synchronize()
        return earlier.on_cuda.elapsed_time(self.on_cuda) / 1000


def memory_mb(device: torch.device) -> float:
    """Peak memory so far, in MB: the GPU's allocations, elsewhere the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def mfu_and_memory(device: torch.device, flops_per_s: float) -> dict[str, float]:
    """The share of the device's peak (MFU), if it is known, and the peak memory."""
    measured = {}
    if device.type == "cuda" and flops_per_s:
        gpu = torch.cuda.get_device_name(device)
        for name, peak in PEAK_FLOPS.items():
            # laptops, Ti and D cards and MIG slices have other peaks
            if re.search(rf"\b{name}\b(?! (Laptop|Ti|D)\b|.* MIG )", gpu):
                measured["mfu"] = flops_per_s / peak
                break
    return measured | {"memory_mb": memory_mb(device)}


# ---- what is recorded with every run and result ----

# A patch that `git apply` takes, whatever the user's configuration of git.
PATCH = (
    "--binary",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--no-relative",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions, the commit, and the machine: the GPU's name, or the CPU's."""
    on_gpu = device.type == "cuda"
    commit = None
    changes = None
    if git("ls-files"):  # nothing is listed in a copy inside another repository
        commit = git("rev-parse", "HEAD")
        changes = git("status", "--porcelain", "--untracked-files=no", "--", ".")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "processors": os.cpu_count(),
        "commit": None if commit is None else commit.decode().strip(),
        "modified": None if changes is None else bool(changes or untracked()),
    }


def uncommitted() -> bytes:
    """A patch from the commit to the code of this process: changes, and untracked .py files."""
    patch = git("diff", *PATCH, "HEAD", "--", ".") or b""
    # of files that are compared without the index, git gives paths from this folder: it may be one
    # folder of a larger repository
    folder = os.fsdecode(git("rev-parse", "--show-prefix") or b"").removesuffix("\n")
    prefixes = (f"--src-prefix=a/{folder}", f"--dst-prefix=b/{folder}")
    for path in untracked():
        patch += git("diff", *PATCH, *prefixes, "--no-index", "/dev/null", path) or b""
    return patch


def untracked() -> list[str]:
    """The .py files that the repository neither tracks nor ignores."""
    paths = git("ls-files", "-z", "--others", "--exclude-standard", "*.py") or b""
    return [path for path in paths.decode().split("\0") if path]


def git(*arguments: str) -> bytes | None:
    """What git prints for this repository; None if it fails, as in a copy without history."""
    try:
        # in a container the repository may be another user's
        command = ("git", "-c", "safe.directory=*", *arguments)
        run = subprocess.run(command, cwd=ROOT, capture_output=True)
    except OSError:
        return None
    return run.stdout if run.returncode <= 1 else None  # 1: `diff --no-index` found differences


def cpu_name() -> str:
    """The CPU's name in /proc/cpuinfo, or its architecture if there is none."""
    with suppress(OSError):
        model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
        if model:
            return model[1]
    return platform.machine()
