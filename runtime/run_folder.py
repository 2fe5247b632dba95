"""Reads a run's folder, which train.py writes.

torch, which takes seconds to import, is imported only to read a checkpoint, which may be nanoGPT's.
"""

import re
from pathlib import Path
from typing import Any

from config import Config
from errors import UserError
from runtime.config_files import did_you_mean_run, find_data, read_run, saved_settings
from runtime.files import convert, read_pt
from runtime.nanogpt import convert_checkpoint, is_nanogpt_checkpoint


def checkpoints(run: str | Path) -> list[Path]:
    """Return the checkpoints that a run can be resumed from, the newest first."""
    files = [path for path in Path(run).glob("*.pt") if re.fullmatch(r"step_\d{6,}", path.stem)]
    return sorted(files, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def latest_step(run: str | Path) -> int | None:
    """Return the step of a run's newest checkpoint, None where there is none."""
    paths = checkpoints(run)
    return step_of(paths[0]) if paths else None


def is_checkpoint(run: str | Path) -> bool:
    """Tell whether the path is the file of a checkpoint, not the folder of a run."""
    return Path(run).suffix == ".pt"


def folder_of(run: str | Path) -> Path:
    """Return the folder of a run, or the folder that a checkpoint's file lies in."""
    return Path(run).parent if is_checkpoint(run) else Path(run)


def no_checkpoint(run: str | Path) -> str:
    """Return a sentence on a path without a checkpoint."""
    hint = did_you_mean_run(run)
    return (
        f"{run}: no checkpoint found; {hint}a run is a folder that train.py made, or "
        "the .pt file of a checkpoint in it"
    )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint's content as `read_pt`, nanoGPT's in the form of ours.

    Raises UserError if it cannot be read.
    """
    content = convert(read_pt(path), dict[str, Any], path)
    return convert_checkpoint(content, path) if is_nanogpt_checkpoint(content) else content


def read_config(run: str | Path) -> Config:
    """Return the Config that a run, or the file of a checkpoint, was saved with.

    Raises UserError if there is none or it is no longer valid.
    """
    if is_checkpoint(run):
        path = Path(run)
        if not path.exists():
            raise UserError(no_checkpoint(run))
        values = saved_settings(read_checkpoint(path).get("config"), path)
    else:
        path = Path(run) / "config.json"
        values = read_run(run)
    try:
        config = Config(**values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    # the run, or the folder in which it was trained, may have moved
    return config.replace(out_dir=str(folder_of(run)), data_dir=find_data(config.data_dir))
