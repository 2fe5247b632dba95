"""Labels of runs in tables and pictures, and the paths of their pictures."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from config import LEARNED
from runtime import run_folder
from runtime.config_files import format_value, shorten
from scripts.common.command_line import PICTURES

# The longest label of a run, in characters.
LONGEST_LABEL = 40


def label_runs(paths: Sequence[str | Path]) -> dict[str, str | Path]:
    """Runs by their labels. A run counts once, also under two spellings of its path.

    Pictures are left out: earlier commands have put them beside the runs, so that out/tiny/* has
    them too.
    """
    paths = [path for path in paths if Path(path).suffix not in PICTURES] or paths
    runs = list({Path(path).resolve(): path for path in paths}.values())
    return dict(zip(run_names(runs), runs, strict=True))


def run_names(paths: Sequence[str | Path]) -> list[str]:
    """Labels for tables and pictures: names, and settings in which the runs differ, or paths."""
    configs = [run_folder.read_config(path) for path in paths]
    if len(configs) == 1:
        return [configs[0].label]
    differing = []
    for key in LEARNED:
        # a run has its own copy of a tokenizer's file
        values = [
            config.tokenizer_id if key == "tokenizer" else getattr(config, key)
            for config in configs
        ]
        if any(value != values[0] for value in values):
            differing.append(key)
    show_names = not differing or len({config.label for config in configs}) > 1
    labels = []
    for config in configs:
        words = [config.label] if show_names else []
        for key in differing:
            if key not in ("attention", "p"):
                words.append(f"{key} {format_value(getattr(config, key))}")
        labels.append(", ".join(words))
    if len(set(labels)) == len(labels) and len(max(labels, key=len)) <= LONGEST_LABEL:
        return labels
    folder = common_folder(paths)
    return [os.path.relpath(Path(path).resolve(), folder) for path in paths]


def title_of(results: Mapping[str, dict]) -> str:
    """How the runs were opened, as far as all agree: "rope yarn, window 512".

    `results` are measurements by label. Runs with different RoPE scalings are named.
    """
    words = []
    for key in ("attention", "rope", "rope_factor", "rope_theta", "log_base", "window", "p"):
        values = {label: result.get(key) for label, result in results.items()}
        if len(set(values.values())) > 1:
            if key == "rope":
                words.append(rope_by_label(values))
            continue
        value = next(iter(values.values()))
        if value is not None:
            words.append(f"{key} {format_value(value)}")
    return ", ".join(words)


def rope_by_label(scalings: Mapping[str, str | None]) -> str:
    """Name the most common RoPE scaling, then the exceptions: "rope yarn, but none in `swa`"."""
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
