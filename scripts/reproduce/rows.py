"""The rows of the papers' tables at a scale, and the run behind each row and seed.

All tables share the runs: OUT/<scale>/<row>/seed<seed>.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from config import ROOT, Config, load_config, names
from errors import UserError
from layers.rope import Rope
from scripts.common.papers import SSMAX
from scripts.common.planned import PlannedRun

CONFIGS = ROOT / "configs"
FIRST_SEED = Config.seed
# --set takes these: they do not change what is learned.
PER_MACHINE = (*names("machine", "logs"), "timeout")
# A table row run:view evaluates a run with these options. p5 is a view too.
VIEWS: dict[str, dict] = {name: {"rope": name} for name in Rope.SCALINGS} | {
    # Dynamic NTK is NTK with s = length / training length; this is one s for all lengths
    "ntk16": {"rope": "ntk", "rope_factor": 16.0},
    "plain_rope": {"rope": "none"},
    "adaptive_temperature": {"attention": "adaptive_temperature"},
    "oracle": {"oracle": True},
}


@dataclass(frozen=True)
class TableRow:
    """A config file, and the settings that depend on the scale."""

    file: Path
    changes: Callable[[Config], dict] = lambda scale: {}
    base: str | None = None  # the table row whose final weights this run starts from


def swap(scale: Config) -> dict:
    """SSMax (e): the weights of softmax with s = 1 / mean of log n (Sect. 3)."""
    return {"s_init": scale.block_size / math.lgamma(scale.block_size + 1), "max_iters": 0}


def before_swap(scale: Config) -> dict:
    return {"max_iters": scale.max_iters - scale.max_iters // 8}


def swap_and_train(scale: Config) -> dict:
    """SSMax (f): the last 25,000 of 200,000 steps, with 1,000 of warm-up, scaled to max_iters.

    The data order continues. AdamW starts anew: the paper does not mention its moments.
    """
    return swap(scale) | {
        "first_batch": before_swap(scale)["max_iters"],
        "max_iters": scale.max_iters // 8,
        "warmup_iters": max(1, scale.max_iters // 200),
    }


def t6_blocks(scale: Config) -> dict:
    """The blocks of T6 with linear projections, and with as many parameters as GPT-2."""
    hidden = 8 * scale.n_embd // 3
    return {"norm": "rmsnorm", "mlp": "swiglu", "mlp_hidden": hidden, "bias": False}


def probe(scale: Config) -> dict:
    """SSMax Fig. 2 needs fewer steps than the other figures."""
    return {"max_iters": min(scale.max_iters, SSMAX["figure2"]["steps"])}


def quarter(setting: str) -> Callable[[Config], dict]:
    """A window of a quarter of the training length, as the config file has it for 1,024 tokens."""
    return lambda scale: {setting: max(1, scale.block_size // 4)}


def two_points(scale: Config) -> dict:
    """A window of two points of each body in the largest system."""
    return {"window": 2 * (scale.planets + 1)}


SOFTMAX, SSMAX_FILE = CONFIGS / "softmax.py", CONFIGS / "ssmax.py"
ROWS = {
    "softmax_before_f": TableRow(SOFTMAX, before_swap),
    "ssmax_e": TableRow(SSMAX_FILE, swap, "softmax"),
    "ssmax_f": TableRow(SSMAX_FILE, swap_and_train, "softmax_before_f"),
    "ssmax_probe": TableRow(CONFIGS / "ablations/ssmax_probe.py", probe),
    "untrained": TableRow(SOFTMAX, lambda scale: {"max_iters": 0}),
    "softmax_window": TableRow(SOFTMAX, two_points),
    "softmax_swiglu": TableRow(SOFTMAX, t6_blocks),
    "lssar_p15_swiglu": TableRow(CONFIGS / "lssar_p15.py", t6_blocks),
    "swa": TableRow(CONFIGS / "swa.py", quarter("window")),
} | {
    name: TableRow(CONFIGS / f"{name}.py", quarter("local_window"))
    for name in ("hybrid", "hybrid_ssmax", "hybrid_lssar_p5")
}


def find_row(name: str) -> TableRow:
    """The entry of ROWS, the config of this name, or a config with another p (lssar_p7)."""
    if name in ROWS:
        return ROWS[name]
    folders = (CONFIGS, CONFIGS / "ablations")
    files = {path.stem: path for folder in folders for path in folder.glob("*.py")}
    if name in files:
        return TableRow(files[name])
    variant, p = split_p(name)
    file = files.get(f"{variant}_p15") or files.get(variant)
    if p is None or file is None:
        raise UserError(f"{name!r} is neither a config of configs/ nor a config with p (lssar_p7)")
    return TableRow(file, lambda scale: {"p": p})


def split_p(name: str) -> tuple[str, float | None]:
    """("lssar", 7.0) of lssar_p7; (name, None) where the name has no p."""
    variant, _, p = name.rpartition("_p")
    if re.fullmatch(r"\d+(\.\d+)?", p) and f"{float(p):g}" == p:
        return variant, float(p)
    return name, None


def view_options(view: str) -> dict:
    """The options with which a view evaluates a run: {"p": 5.0} for p5."""
    return VIEWS[view] if view in VIEWS else {"p": float(view[1:])} if view else {}


@dataclass(frozen=True)
class Scale:
    """A scale: its name, and the config file and settings of all its runs."""

    name: str
    arguments: tuple[str, ...]
    out: Path

    @cached_property
    def config(self) -> Config:
        return load_config([*self.arguments])

    def run(self, name: str, seed: int) -> PlannedRun:
        name, _, view = ("untrained:oracle" if name == "oracle" else name).partition(":")
        row = find_row(name)
        base = self.run(row.base, seed) if row.base else None
        changes = row.changes(self.config)
        changes |= {"seed": seed, "out_dir": self.out / self.name / name / f"seed{seed}"}
        changes |= {"init_from": base.folder} if base else {}
        # T6 has its own sizes at each scale
        sizes = CONFIGS / "scales" / row.file.stem.partition("_")[0] / f"{self.name}.py"
        arguments = [str(row.file), *self.arguments, *([str(sizes)] if sizes.is_file() else [])]
        arguments += [f"--{key}={value}" for key, value in changes.items()]
        return PlannedRun(name, load_config(arguments), arguments, base, view)


def open_scale(
    name: str, out: str, task: str = "language", data: str | None = None, settings: tuple = ()
) -> Scale:
    """The scale of --scale: 124m (the defaults), a file of configs/scales, or another file.

    `settings` are the values of --set. The scales of orbits have a folder of their own, as do
    their runs.
    """
    own = "" if task == "language" else task
    known: dict[str, tuple[str, ...]] = {} if own else {"124m": ()}
    known |= {path.stem: (str(path),) for path in sorted((CONFIGS / "scales" / own).glob("*.py"))}
    if own and data:
        raise UserError(f"--data {data}: {task} are simulated, and need no data")
    if name.endswith(".py"):
        known, name = {Path(name).stem: (name,)}, Path(name).stem
    if name not in known:
        raise UserError(f"--scale {name!r} must be one of {', '.join(known)}, or a config file")
    for pair in settings:
        if pair.partition("=")[0] not in PER_MACHINE:
            raise UserError(
                f"--set {pair!r} would train other runs; write it into a file and give it as "
                f"--scale FILE.py. --set takes KEY=VALUE of {', '.join(sorted(PER_MACHINE))}"
            )
    extra = [f"--{pair}" for pair in settings] + ([f"--data_dir={data}"] if data else [])
    scale = Scale(name, (*known[name], *extra), Path(out) / own)
    if scale.config.task != task:
        raise UserError(f"--scale {name}: task = {scale.config.task!r}, but this needs {task!r}")
    return scale
