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
    "V100": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def pick_device(name: str = "auto") -> torch.device:
    """Return the device that a setting names; 'auto' is cuda, else mps, else cpu.

    Raises UserError for a device that this machine does not have.
    """
    available = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        available.append("mps")
    available.append("cpu")
    aliases = {"auto": available[0], "cuda": "cuda:0"}
    device = aliases.get(name, name)
    if device not in available:
        raise UserError(f"device = {name!r}; this machine has {', '.join(available)}, or 'auto'")
    return torch.device(device)


def open_device(name: str) -> torch.device:
    """Return the device that a setting names, set up for training; under torchrun, the rank's GPU.

    Raises UserError as pick_device does, and for several processes on 'mps'.
    """
    device = pick_device(name)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
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
    with torch.cuda.device(device):  # is_bf16_supported asks about the current device
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float16


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """A context in which matrix products are computed in dtype."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def pick_compile(setting: bool | None, device: torch.device, slow: bool = False) -> bool:
    """Whether to compile the model: the setting or, if it is None, on CUDA unless it is slow."""
    if setting is not None:
        return setting
    return device.type == "cuda" and not slow


def memory_mb(device: torch.device) -> float:
    """Peak memory so far, in MB: the GPU's allocations, elsewhere the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def usage(device: torch.device, flops_per_s: float) -> dict[str, float | None]:
    """The share of the device's peak (MFU), None if it is not known, and the peak memory."""
    mfu = None
    if device.type == "cuda" and flops_per_s:
        gpu = torch.cuda.get_device_name(device)
        for name, peak in PEAK_FLOPS.items():
            if re.search(rf"\b{name}\b", gpu):
                mfu = flops_per_s / peak
                break
    return {"mfu": mfu, "memory_mb": memory_mb(device)}


# ---- what is recorded with every run and result ----


def environment(device: str = "auto") -> dict[str, Any]:
    """Return versions, the commit, and the machine: the GPU's name, or the CPU's."""
    picked = pick_device(device)
    on_gpu = picked.type == "cuda"
    commit = git("rev-parse", "HEAD")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name(picked) if on_gpu else cpu_name(),
        "processors": os.cpu_count(),
        "commit": None if commit is None else commit.decode().strip(),
        "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
    }


def uncommitted() -> bytes:
    """A patch from the commit to the code of this process: changes, and untracked .py files."""
    patch = git("diff", "--binary", "HEAD") or b""
    untracked = git("ls-files", "-z", "--others", "--exclude-standard", "*.py") or b""
    for path in filter(None, untracked.decode().split("\0")):
        patch += git("diff", "--binary", "--no-index", "/dev/null", path) or b""
    return patch


def git(*arguments: str) -> bytes | None:
    """What git prints for this repository; None if it fails, as in a copy without history."""
    try:
        run = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True)
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
