"""A run's folder: its config, metrics and checkpoints, saved whole or not at all, and read back.

config.json        every setting, resolved
environment.json   versions, machine, commit
metrics.jsonl      one object a line: a step, or a validation
latest.pt          all that resuming needs, from the last checkpoint
best.pt            the weights with the lowest validation loss
"""

import json
import os
import pickle
import platform
import subprocess
from pathlib import Path

import torch

from config import Config
from errors import UserError
from files import read_json, replacing, write_json
from model import GPT


def save(path, state: dict) -> None:
    """Write a checkpoint that appears only when it is whole and on disk."""
    with replacing(path) as file:
        torch.save(state, file)


def load(path, device="cpu") -> dict:
    """A checkpoint's content, its tensors on `device`. Nothing in the file is run as code.

    Raises UserError where it is missing or damaged.
    """
    try:
        return torch.load(path, map_location=device, weights_only=True, mmap=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such checkpoint") from None
    except (RuntimeError, OSError, pickle.UnpicklingError, EOFError, ValueError) as error:
        raise UserError(f"{path}: the checkpoint cannot be read: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def read_config(run) -> Config:
    """The Config saved with a run; UserError where there is none or it is no longer valid."""
    path = Path(run) / "config.json"
    values = read_json(path)
    if values is None:
        raise UserError(f"{run}: no config.json in it; a run is a folder that train.py made")
    try:
        return Config(**values)
    except TypeError as error:
        raise UserError(f"{path}: {error}") from error


def load_weights(model: GPT, run, which: str = "latest") -> int:
    """Copy a run's weights into the model; returns the step they are from.

    The attention variant may be another one: its learnable scalars then keep their first values.
    Raises UserError where the run has no checkpoint or its shapes do not fit.
    """
    path = Path(run) / f"{which}.pt"
    state = load(path)
    mine, saved = model.state_dict(), state["model"]
    scalars = {name for name in mine | saved if name.rpartition(".")[2] in ("s", "b", "p_n")}
    missing = [name for name in mine if name not in saved and name not in scalars]
    unknown = [name for name in saved if name not in mine and name not in scalars]
    for name in sorted(mine.keys() & saved.keys()):
        if mine[name].shape != saved[name].shape:
            missing.append(f"{name} {list(saved[name].shape)} for {list(mine[name].shape)}")
    if missing or unknown:
        raise UserError(
            f"{path}: its model is another one: {', '.join((missing + unknown)[:3])} "
            "do not fit; n_layer, n_head, n_embd, norm, mlp, bias and the vocabulary must agree"
        )
    model.load_state_dict(saved, strict=False)
    return state["step"]


def start_metrics(path: Path, step: int) -> None:
    """Keep the metrics up to a step: what a stopped run logged after its checkpoint comes again."""
    lines = path.read_text().splitlines() if path.exists() else []
    with replacing(path, "w") as file:
        for line in lines:
            try:
                keep = json.loads(line)["step"] <= step
            except (ValueError, KeyError):
                keep = False  # the line that a kill cut short
            if keep:
                file.write(line + "\n")


def environment() -> dict:
    """Versions, machine and commit, as they are saved with every run and result."""
    here = Path(__file__).parent

    def git(*arguments):
        try:
            run = subprocess.run(("git", *arguments), cwd=here, capture_output=True, text=True)
        except OSError:
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
        "processors": os.cpu_count(),
        "commit": git("rev-parse", "HEAD"),
        "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_header(run: Path, config: Config) -> None:
    """What a run's folder holds before its first step."""
    run.mkdir(parents=True, exist_ok=True)
    write_json(run / "config.json", config.as_dict())
    write_json(run / "environment.json", environment())
