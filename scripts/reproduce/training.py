"""The rows of the papers' tables at a scale, and the run that each is with one seed.

A run of a scale is in OUT/<scale>/<row>/seed<seed>, whichever table needs it.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from config import MAY_CHANGE_ON_RESUME, Config, load_config
from errors import UserError
from runtime.device import ROOT
from scripts.common.papers import SSMAX
from scripts.common.planned import RECIPE, PlannedRun

CONFIGS = ROOT / "configs"
FIRST_SEED = Config.seed
# Settings that may differ between machines that train one table; the rest define a run.
PER_MACHINE = MAY_CHANGE_ON_RESUME - RECIPE
PER_MACHINE -= {"data_dir", "out_dir", "resume", "init_from", "dry_run"}


@dataclass(frozen=True)
class Row:
    """A row of a table: its config file and its changes to a scale's settings."""

    name: str
    file: Path
    changes: Callable[[Config], dict] = lambda scale: {}
    base: str | None = None  # the row whose final weights it starts from

    def sizes(self, scale: str) -> list[str]:
        """The config file with T6's sizes at a scale, behind that of the scale, if there is one."""
        file = CONFIGS / "scales" / self.file.stem.partition("_")[0] / f"{scale}.py"
        return [str(file)] if file.is_file() else []


def swap(scale: Config) -> dict:
    """SSMax (e): softmax's weights as they are; s is 1 over the mean of log n (Sect. 3)."""
    return {"s_init": scale.block_size / math.lgamma(scale.block_size + 1), "max_iters": 0}


def before_swap(scale: Config) -> dict:
    return {"max_iters": scale.max_iters - scale.max_iters // 8}


def kept_step(scale: Config) -> int | None:
    """The step of the softmax run's checkpoint that (f) can start from, if any.

    With a constant learning rate, training up to it does not depend on the total steps. Other
    schedules have none.
    """
    step = before_swap(scale)["max_iters"]
    constant = scale.schedule == "constant" and step % scale.checkpoint_interval == 0
    return step if constant else None


def keep_for_swap(scale: Config) -> dict:
    return {"keep_every": step} if (step := kept_step(scale)) else {}


def swap_and_train(scale: Config) -> dict:
    """SSMax (f): the last 25,000 of 200,000 steps, 1,000 of them warm-up, scaled to max_iters.

    It goes on in the data order. AdamW starts anew: the paper says that the learning rate is warmed
    up again, and nothing of the moments, which s could not have had.
    """
    return swap(scale) | {
        "first_batch": before_swap(scale)["max_iters"],
        "max_iters": scale.max_iters // 8,
        "warmup_iters": max(1, scale.max_iters // 200),
    }


def t6_blocks(scale: Config) -> dict:
    """The rest of T6's blocks around linear projections; as many parameters as GPT-2's."""
    hidden = 8 * scale.n_embd // 3
    return {"norm": "rmsnorm", "mlp": "swiglu", "mlp_hidden": hidden, "bias": False}


def probe(scale: Config) -> dict:
    """SSMax Fig. 2 is after fewer steps than the models of the other figures."""
    return {"max_iters": min(scale.max_iters, SSMAX["figure2"]["steps"])}


def quarter(setting: str) -> Callable[[Config], dict]:
    """A window of a quarter of the training length, as its config has it at 1,024 tokens."""
    return lambda scale: {setting: max(1, scale.block_size // 4)}


def untrained(scale: Config) -> dict:
    """A random trunk, for what fine-tuning alone gives."""
    return {"max_iters": 0}


def two_points(scale: Config) -> dict:
    """A window of the last two points of the largest system, that is of two of each body."""
    return {"window": 2 * (scale.planets + 1)}


ROWS = {
    row.name: row
    for row in (
        Row("ssmax_e", CONFIGS / "ssmax.py", swap, "softmax"),
        Row("ssmax_f", CONFIGS / "ssmax.py", swap_and_train, "softmax_before_f"),
        Row("softmax", CONFIGS / "softmax.py", keep_for_swap),
        Row("softmax_before_f", CONFIGS / "softmax.py", before_swap),
        Row("untrained", CONFIGS / "softmax.py", untrained),
        Row("softmax_window", CONFIGS / "softmax.py", two_points),
        Row("softmax_swiglu", CONFIGS / "softmax.py", t6_blocks),
        Row("lssar_p15_swiglu", CONFIGS / "lssar_p15.py", t6_blocks),
        Row("swa", CONFIGS / "swa.py", quarter("window")),
        *(
            Row(name, CONFIGS / f"{name}.py", quarter("local_window"))
            for name in ("hybrid", "hybrid_ssmax", "hybrid_lssar_p5")
        ),
        Row("ssmax_probe", CONFIGS / "ablations/ssmax_probe.py", probe),
    )
}


# Rows that are another row's run, seen in another way.
VIEWS = {"oracle": "untrained:oracle"}


def find_row(name: str) -> Row:
    """The row named after a config, after a variant and any p (lssar_p7), or in ROWS.

    Raises UserError where there is none.
    """
    if name in ROWS:
        return ROWS[name]
    for folder in (CONFIGS, CONFIGS / "ablations"):
        if (folder / f"{name}.py").is_file():
            return Row(name, folder / f"{name}.py")
    variant, p = split_p(name)
    for file in (f"{variant}_p15.py", f"{variant}.py"):
        for folder in (CONFIGS, CONFIGS / "ablations"):
            if p is not None and (folder / file).is_file():
                return Row(name, folder / file, lambda scale: {"p": p})
    raise UserError(f"{name!r} is neither a config of configs/ nor one with p, such as lssar_p7")


def split_p(name: str) -> tuple[str, float | None]:
    """A row's variant and p: ("lssar", 7.0) of lssar_p7, (name, None) where it names no p."""
    variant, _, p = name.rpartition("_p")
    if re.fullmatch(r"\d+(\.\d+)?", p) and f"{float(p):g}" == p:
        return variant, float(p)
    return name, None


@dataclass(frozen=True)
class Scale:
    """A scale: its name, its config file if any, and the command line's settings for all runs."""

    name: str
    files: tuple[str, ...]
    out: Path
    settings: tuple[str, ...]  # as --key=value

    @property
    def config(self) -> Config:
        return load_config([*self.files, *self.settings])

    @property
    def folders(self) -> dict[Path, str]:
        """The folder of every run of this scale, with the name of its row."""
        return {path: path.parent.name for path in (self.out / self.name).glob("*/seed*")}

    def run(self, row_name: str, seed: int) -> PlannedRun:
        name, _, view = VIEWS.get(row_name, row_name).partition(":")
        row, base, kept = find_row(name), None, None
        changes = row.changes(self.config) | {
            "seed": seed, "out_dir": self.out / self.name / name / f"seed{seed}",
        }  # fmt: skip
        if row.base == "softmax_before_f" and (kept := kept_step(self.config)):
            base = self.run("softmax", seed)
            changes["init_from"] = base.folder / f"step_{kept:06d}.pt"
        elif row.base:
            base = self.run(row.base, seed)
            changes["init_from"] = base.folder
        arguments = [str(row.file), *self.files, *row.sizes(self.name), *self.settings]
        arguments += [f"--{key}={value}" for key, value in changes.items()]
        return PlannedRun(name, load_config(arguments), arguments, base, kept, view)


@dataclass(frozen=True)
class Work:
    """The work of one command: rows and seeds of a scale, and the folder of the table."""

    scale: Scale
    rows: tuple[str, ...]
    seeds: range
    folder: Path
    squad: str | None = None  # SQuAD's train-v2.0.json
    planning: bool = False  # --plan: data that are not here are no error
    missing_shards: str | None = None  # a sentence on them; only when planning

    @property
    def runs(self) -> list[PlannedRun]:
        """All rows of one seed before the next seed, so that a first table is complete early."""
        return [self.scale.run(row, seed) for seed in self.seeds for row in self.rows]


def open_scale(
    name: str,
    out: str,
    data: str | None,
    wandb_mode: str,
    settings: list[str],
    task: str = "language",
) -> Scale:
    """The scale of --scale: 124m (train.py's defaults), a file of configs/scales, or any file.

    Those of other tasks are in folders of configs/scales, and their runs in folders of `out`.
    Raises UserError for an unknown scale, and for a setting that would change the runs.
    """
    own = "" if task == "language" else task
    known: dict[str, tuple[str, ...]] = {} if own else {"124m": ()}
    known |= {path.stem: (str(path),) for path in sorted((CONFIGS / "scales" / own).glob("*.py"))}
    if own and data:
        raise UserError(f"--data {data}: {task} have no shards, they are simulated")
    if name.endswith(".py"):
        known = {Path(name).stem: (name,)}
        name = Path(name).stem
    elif name not in known:
        raise UserError(f"--scale {name!r} must be one of {', '.join(known)}, or a config file")
    for pair in settings:
        key, equals, _ = pair.partition("=")
        if not equals:
            raise UserError(f"--set {pair!r} must be KEY=VALUE, such as batch_size=16")
        if key not in PER_MACHINE:
            raise UserError(
                f"--set {pair!r} would change the scale's runs, which only --scale FILE.py "
                f"may do; --set takes {', '.join(sorted(PER_MACHINE))}"
            )
    extra = [f"--wandb_mode={wandb_mode}", *(f"--{pair}" for pair in settings)]
    if data:
        extra.append(f"--data_dir={data}")
    scale = Scale(name, known[name], Path(out) / own, tuple(extra))
    if scale.config.task != task:
        raise UserError(f"--scale {name}: task = {scale.config.task!r}, but this needs {task!r}")
    return scale
