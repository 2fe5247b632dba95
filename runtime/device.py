"""The device that a model runs on: its choice, precision, peak speed, memory, random numbers and
description."""

import os
import platform
import re
import resource
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from errors import UserError

ROOT = Path(__file__).parent.parent

# Dense bfloat16 (V100: float16) peaks in FLOP/s, from NVIDIA's data sheets; first match wins.
PEAK_FLOPS = {
    "B200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12, "A40": 150e12,
    "A10G": 70e12, "A10": 125e12, "L4": 121e12, "V100": 125e12, "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}  # fmt: skip


def pick_device(name: str = "auto") -> torch.device:
    """The device that a setting names; 'auto' is cuda, else mps, else cpu.

    Raises UserError for a device that this machine does not have.
    """
    found = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    kind, _, index = name.partition(":")
    if name == "auto":
        kind = next(kind for kind in found if found[kind])
    elif kind not in found or (index and not (kind == "cuda" and index.isdecimal())):
        raise UserError(f"device = {name!r} must be 'auto', 'cuda', 'cuda:1', 'mps' or 'cpu'")
    if not found[kind] or int(index or 0) >= max(1, torch.cuda.device_count()):
        raise UserError(f"device = {name!r} is not on this machine; 'auto' picks one that is")
    return torch.device(kind, int(index or 0)) if kind == "cuda" else torch.device(kind)


def open_device(name: str) -> torch.device:
    """The device that a setting names, ready for training; under torchrun, this rank's GPU."""
    device = pick_device(name)
    if device.type == "cuda":
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matrix products; 'auto' is bfloat16 (or else float16) on CUDA, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """A context in which matrix products are computed in dtype."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype)


def pick_compile(setting: bool | None, device: torch.device) -> bool:
    """Whether to compile the model: the setting or, if it is None, only on CUDA."""
    return device.type == "cuda" if setting is None else setting


def peak_flops(device: torch.device) -> float | None:
    """The device's peak in FLOP/s, None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next(
        (flops for key, flops in PEAK_FLOPS.items() if re.search(rf"\b{key}\b", name)), None
    )


def memory_mb(device: torch.device) -> float:
    """Peak memory so far: the GPU's allocations, elsewhere the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def usage(device: torch.device, flops_per_s: float) -> dict[str, float | None]:
    """The share of the device's peak (MFU), None where it is not known, and the peak memory."""
    peak = peak_flops(device)
    mfu = flops_per_s / peak if peak and flops_per_s else None
    return {"mfu": mfu, "memory_mb": memory_mb(device)}


def seed_randomness(seed: int, step: int, rank: int) -> None:
    """Seed torch from (seed, step, rank), for any variant that draws random numbers.

    A resumed run then draws the same ones, without generator state in the checkpoint.
    """
    state = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))


# ---- what is recorded with every run and result ----


def environment() -> dict[str, Any]:
    """Versions, machine and commit."""
    changes = git("status", "--porcelain", "--untracked-files=no")
    commit = git("rev-parse", "HEAD")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
        "processors": os.cpu_count(),
        "commit": None if commit is None else commit.decode().strip(),
        "modified": bool(changes),
    }


def uncommitted_changes() -> bytes:
    """The working tree's changes since its commit, as a patch for `git apply`."""
    return git("diff", "HEAD", "--binary") or b""


def git(*arguments: str) -> bytes | None:
    """What git prints for this repository; None where it fails, as in a copy without history."""
    try:
        run = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True)
    except OSError:
        return None
    return run.stdout if run.returncode == 0 else None


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
