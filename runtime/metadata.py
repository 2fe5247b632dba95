"""What a run's folder records of its training, besides weights and metrics.

config.json        every setting, resolved
tokenizer.json     the tokenizer, unless it is built in
data_dir.txt       the absolute path of data_dir, which another working directory needs
environment.json   versions, machine and commit of the latest start; `starts`: the same for every
                   start, with its step, number of processes and dtype; the attention path; the
                   hash of the formulas; the fingerprint of the data; the checkpoint whose weights
                   init_from loaded; the settings that were changed when resuming
uncommitted.patch  changes of the repository since the commit, if any, with untracked .py files;
                   resuming at step 200 adds uncommitted_000200.patch
"""

import os
from pathlib import Path
from typing import Any

import msgspec

from config import Config
from data.shards import SIMULATED, Fingerprint, data_difference
from data.tasks import fingerprint_of
from data.tokenizer import copy_tokenizer
from errors import UserError
from layers.formulas import formulas_hash
from runtime.checkpoint import Training
from runtime.config_files import DATA_DIR
from runtime.device import environment, uncommitted
from runtime.distributed import world_size
from runtime.files import atomic_write, read_json, write_json


class StartRecord(msgspec.Struct):
    """The entries of environment.json that are read back; runs of older code lack some."""

    formulas: str | None = None  # layers.formulas.formulas_hash when the run began
    data: Fingerprint = {}  # what identifies the data
    began_with: dict[str, Any] | None = None  # step and sha256 of the checkpoint of init_from
    changes: list[dict[str, Any]] = []  # where the run was resumed: steps, values before and after
    starts: list[dict[str, Any]] = []  # environments, each with its step


def read_start_record(run: Path) -> StartRecord:
    return read_json(run / "environment.json", StartRecord) or StartRecord()


def formulas_difference(run: Path, config: Config) -> str | None:
    """Name the formulas, for a message, if the layers' outputs have changed since a run began.

    None if they have not, or if the run recorded no hash of them.
    """
    before = read_start_record(run).formulas
    if before is not None and before != formulas_hash(config):
        return f"formulas of {config.attention!r} that differ from the current code"
    return None


def data_difference_of(run: Path, config: Config) -> str | None:
    """Name the data, for a message, if a run began with data that differ from this config's.

    None if they are the same, if the run recorded none, or if data_dir is missing or incomplete,
    which its reader reports.
    """
    before = read_start_record(run).data
    if not before:
        return None
    try:
        now = fingerprint_of(config)
    except UserError:
        return None
    changed = data_difference(before, now)
    if changed is None:
        return None
    source = "this code" if changed in SIMULATED else config.data_dir
    return f"{changed} that differ from {source}"


def init_from_difference(run: Path, init_from: str) -> str | None:
    """If a run did not begin with the weights of `init_from`, return what it began with."""
    began = saved_init_from(run)
    if began == init_from or (began and Path(began).resolve() == Path(init_from).resolve()):
        return None
    return f"--init_from={began}" if began else "random weights"


def write_run_metadata(config: Config, facts: dict, training: Training) -> None:
    """Write the settings and environment to a run's folder, before its first step.

    `facts` are recorded too: what layers.selfcheck found, the fingerprint of the data, and the
    checkpoint that the run began with. A resumed run keeps that checkpoint, the fingerprint and the
    hash of the formulas from its first start, and appends its changed settings and its environment.
    Each start writes a patch.
    """
    run = Path(config.out_dir)
    copy_tokenizer(config.tokenizer, run)
    settings = config.as_dict()
    if config.resume:  # the weights come from the checkpoint: keep the original init_from
        settings["init_from"] = saved_init_from(run)
    write_json(run / "config.json", settings)
    with atomic_write(run / DATA_DIR, "w") as file:
        file.write(os.path.abspath(config.data_dir) + "\n")
    now = environment(training.device)
    record = now | facts
    starts = []
    resumed_at = training.resumed_at
    if resumed_at is None:
        record["formulas"] = formulas_hash(config)
    else:
        before = read_start_record(run)
        starts = [start for start in before.starts if start["step"] < resumed_at]
        record["formulas"] = before.formulas
        record["data"] = before.data
        record["began_with"] = before.began_with
        record["changes"] = [change for change in before.changes if change["step"] < resumed_at]
        if training.changes:
            record["changes"].append({"step": resumed_at, **training.changes})
    patch = f"uncommitted_{resumed_at:06d}.patch" if resumed_at else "uncommitted.patch"
    if record["modified"]:
        with atomic_write(run / patch) as file:
            file.write(uncommitted())
    else:
        (run / patch).unlink(missing_ok=True)
    if record["modified"] is not None:  # None: not in a git repository
        record["modified"] = any(run.glob("uncommitted*.patch"))  # at this start or an earlier one
    start = {
        "step": resumed_at or 0,
        "processes": world_size(),
        "dtype": str(training.dtype).removeprefix("torch."),
    }
    record["starts"] = [*starts, start | now]
    write_json(run / "environment.json", record)


def saved_init_from(run: Path) -> str:
    """The init_from that a run began with."""
    settings = read_json(run / "config.json", dict[str, Any]) or {}
    return settings.get("init_from", "")
