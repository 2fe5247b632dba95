"""Whether a config continues the run in its folder, and from which checkpoint."""

import shlex
from pathlib import Path
from typing import Any

from config import FREE_ON_RESUME, LEARNED, RECORDED_ON_RESUME, SCHEDULE, Config
from errors import UserError
from optim import learning_rate
from runtime.checkpoint import (
    State,
    changes_since,
    find,
    load,
    settings_before,
    settings_of,
)
from runtime.config_files import format_value
from runtime.distributed import rank
from runtime.files import read_json
from runtime.metadata import formulas_difference, init_from_difference
from runtime.run_folder import checkpoints, no_checkpoint


def should_resume(run: Path, resume: bool | str) -> bool:
    """Tell whether the run in a folder is resumed; with "auto" it is if it has a checkpoint.

    Raises UserError if there is nothing to resume, or a new run would overwrite something. A run
    that ended before its first checkpoint was saved may be overwritten: it has no steps.
    """
    if checkpoints(run):
        if not resume:
            raise UserError(f"{run} holds a run: use --resume to continue it, or another --out_dir")
        return True
    if resume is True:
        raise UserError(no_checkpoint(run))
    path = run / "config.json"
    metrics = run / "metrics.jsonl"
    settings = read_json(path, dict[str, Any])
    if settings and "attention" not in settings:
        blocking = path
    elif metrics.is_file() and b'"loss"' in metrics.read_bytes():
        blocking = metrics
    else:
        return False
    raise UserError(
        f"{blocking} belongs to no run that can be resumed, and a new run would overwrite it; "
        "move it away, or give another --out_dir"
    )


def check_init_from(run: Path, init_from: str) -> None:
    """Raise UserError if a run that is resumed began with weights that differ from `init_from`."""
    began = init_from_difference(run, init_from) if init_from else None
    if began is not None:
        raise UserError(
            f"{run} began with {began}, not with --init_from={init_from}: leave it out to resume "
            "the run, or give another --out_dir"
        )


def load_to_resume(config: Config) -> State:
    """Load the latest checkpoint of a run that this config continues.

    Raises UserError if a setting or the formulas changed that must not change on resume, and if a
    new max_iters would change past learning rates and no schedule is given.
    """
    run = Path(config.out_dir)
    state = load(find(run, quiet=rank() > 0).path)
    before = settings_before(state)
    now = settings_of(config)
    for key, saved in before.items():
        if key not in FREE_ON_RESUME and key not in RECORDED_ON_RESUME and now.get(key) != saved:
            words = ["python", "train.py", str(run)]
            words += [f"--{k}={getattr(config, k)}" for k in LEARNED if now[k] != before[k]]
            words += [f"--init_from={run}", "--out_dir=NEW"]
            raise UserError(
                f"{run} was trained with {key} = {saved!r}, so it cannot be resumed with "
                f"{now.get(key)!r}; a new run from its weights, if they fit: {shlex.join(words)}"
            )
    edited = formulas_difference(run, config)
    if edited is not None:
        raise UserError(
            f"{run} was trained with {edited}: resume it with the commit that its environment.json "
            f"names, or start a new run from its weights: --init_from={run} --out_dir=NEW"
        )
    if config.max_iters < state.step:
        raise UserError(f"{run} has {state.step} steps: max_iters = {config.max_iters} is fewer")
    check_rate(run, config, state)
    return state


def check_rate(run: Path, config: Config, state: State) -> None:
    """Raise UserError if moving the schedule's end alone would make the learning rate jump.

    The message has two commands that continue the run, at the rate of its last step or, after a
    schedule that ended near 0, at a tenth of its peak.
    """
    moves_its_end = changes_since(state, config).keys() & SCHEDULE <= FREE_ON_RESUME
    if state.step == 0 or not moves_its_end:
        return
    before = settings_before(state)
    earlier = config.replace(**{key: before[key] for key in SCHEDULE})
    rate = learning_rate(state.step - 1, earlier)
    if rate == learning_rate(state.step - 1, config):
        return
    rate = max(rate, earlier.learning_rate / 10)
    constant = {"schedule": "constant", "learning_rate": rate, "min_lr": 0.0, "cooldown_iters": 0}
    cosine = constant | {"schedule": "cosine", "warmup_iters": state.step}
    commands = []
    for settings in (constant, cosine):
        words = ["python", "train.py", "--resume", str(run), f"--max_iters={config.max_iters}"]
        for key, value in settings.items():
            if value != before[key]:
                words.append(f"--{key}={format_value(value)}")
        commands.append(shlex.join(words))
    raise UserError(
        f"{run} followed a {earlier.schedule} schedule of {earlier.max_iters} steps up to step "
        f"{state.step}: with {config.max_iters} steps it would have had other learning rates. "
        f"Continue at a constant rate, {commands[0]}, or with a cosine from here, {commands[1]}"
    )
