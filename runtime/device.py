"""The device that a model runs on: its choice, precision, peak speed, memory and description."""

import os
import platform
import re
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from config import ROOT
from errors import UserError

# Dense bfloat16 (V100: float16) peaks in FLOP/s, from NVIDIA's data sheets; first match wins.
PEAK_FLOPS = {
    "B200": 2250e12, "GH200": 989e12, "H200 NVL": 835e12, "H200": 989e12, "H100 PCIe": 756e12,
    "H100 NVL": 835e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12,
    "L40S": 362e12, "L40": 181e12, "A40": 150e12, "A10G": 70e12, "A10": 125e12, "L4": 121e12,
    "V100": 125e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip


def pick_device(name: str = "auto") -> torch.device:
    """The device that a setting names; 'auto' is cuda, else mps, else cpu.

    Raises UserError for a device that this machine does not have.
    """
    found = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    found += ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    wanted = {"auto": found[0], "cuda": "cuda:0"}.get(name, name)
    if wanted not in found:
        raise UserError(f"device = {name!r}; this machine has {', '.join(found)}, or 'auto'")
    return torch.device(wanted)


def open_device(name: str) -> torch.device:
    """The device that a setting names, ready for training; under torchrun, this rank's GPU."""
    device, ranks = pick_device(name), int(os.environ.get("WORLD_SIZE", 1))
    if device.type == "mps" and ranks > 1:
        raise UserError(f"device = 'mps' takes one process, not {ranks}: leave out torchrun")
    if device.type == "cuda":
        if ranks > 1:
            device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products; 'auto' is bfloat16 (or else float16) on CUDA, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cuda":
        return torch.float32
    with torch.cuda.device(device):  # which the question below is about
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float16


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """A context in which matrix products are computed in dtype."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def pick_compile(setting: bool | None, device: torch.device, slow: bool = False) -> bool:
    """Whether to compile the model: the setting or, if it is None, on CUDA unless it is slow."""
    return device.type == "cuda" and not slow if setting is None else setting


def memory_mb(device: torch.device) -> float:
    """Peak memory so far: the GPU's allocations, elsewhere the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def usage(device: torch.device, flops_per_s: float) -> dict[str, float | None]:
    """The share of the device's peak (MFU), None where it is not known, and the peak memory."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = next((flops for key, flops in PEAK_FLOPS.items() if re.search(rf"\b{key}\b", gpu)), None)
    mfu = flops_per_s / peak if peak and flops_per_s else None
    return {"mfu": mfu, "memory_mb": memory_mb(device)}


# ---- what is recorded with every run and result ----


def environment(device: str = "auto") -> dict[str, Any]:
    """Versions, commit, and the machine: the GPU's name, or the CPU's."""
    commit, found = git("rev-parse", "HEAD"), pick_device(device)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name(found) if found.type == "cuda" else processor(),
        "processors": os.cpu_count(),
        "commit": None if commit is None else commit.decode().strip(),
        "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
    }


def uncommitted() -> bytes:
    """A patch from the commit to the code of this process: changes, and untracked .py files."""
    untracked = (git("ls-files", "-z", "--others", "--exclude-standard", "*.py") or b"").decode()
    new = [("--no-index", "/dev/null", path) for path in untracked.split("\0") if path]
    return b"".join(git("diff", "--binary", *what) or b"" for what in [("HEAD",), *new])


def git(*arguments: str) -> bytes | None:
    """What git prints for this repository; None where it fails, as in a copy without history."""
    try:
        run = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True)
    except OSError:
        return None
    return run.stdout if run.returncode <= 1 else None  # 1: a diff between files found something


def processor() -> str:
    """The CPU's name, where the system tells it in /proc/cpuinfo, or else its architecture."""
    with suppress(OSError):
        if name := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            return name[1]
    return platform.machine()
