"""Labels of runs in tables and pictures, and the paths of their pictures."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime import run_folder
from runtime.config_files import shorten


def label_runs(paths: Sequence[str | Path]) -> dict[str, str | Path]:
    """Runs by their labels: their names or, if several have the same name, their paths.

    The paths begin in the `common_folder`. A run that is given twice counts once.
    """
    runs = list({Path(path).resolve(): path for path in paths}.values())
    labels = [run_folder.read_config(run).label for run in runs]
    if len(set(labels)) < len(labels):
        folder = common_folder(runs)
        labels = [os.path.relpath(Path(run).resolve(), folder) for run in runs]
    return dict(zip(labels, runs, strict=True))


def title_of(results: Mapping[str, dict]) -> str:
    """How the runs were opened, as far as all agree: "rope yarn, window 512".

    `results` are measurements by label. Runs with different RoPE scalings are named.
    """
    words = []
    for key in ("attention", "rope", "rope_factor", "rope_theta", "log_base", "window", "p"):
        values = {label: result.get(key) for label, result in results.items()}
        if len(set(values.values())) > 1:
            words += [rope_by_label(values)] if key == "rope" else []
            continue
        value = next(iter(values.values()))
        if value is not None:
            words.append(f"{key} {value}")
    return ", ".join(words)


def rope_by_label(scalings: Mapping[str, str | None]) -> str:
    """Name the most common RoPE scaling, and who has another: "rope yarn, but none in `swa`"."""
    labels = defaultdict(list)
    for label, scaling in scalings.items():
        labels[scaling].append(f"`{label}`")
    common, *others = sorted(labels, key=lambda scaling: -len(labels[scaling]))
    exceptions = [f", but {other} in {', '.join(labels[other])}" for other in others]
    return f"rope {common}{''.join(exceptions)}"


def common_folder(paths: Sequence[str | Path]) -> Path:
    """Where a picture of these runs goes: the run's folder, or the common parent of several."""
    if len(paths) == 1:
        return run_folder.folder_of(Path(paths[0]).resolve())
    return Path(os.path.commonpath([Path(path).resolve().parent for path in paths]))


def picture_path(paths: Sequence[str | Path], name: str) -> Path:
    """The file of a picture of these runs, in `common_folder`.

    The name of a picture of several runs, or of a checkpoint's file, contains their paths, so that
    other runs have other pictures.
    """
    folder = common_folder(paths)
    words = [name]
    for path in paths:
        inside = Path(path).resolve().relative_to(folder)  # empty for a single run
        if inside.parts:
            words.append("-".join(inside.parts).removesuffix(".pt"))
    return folder / f"{shorten('_'.join(words))}.png"
