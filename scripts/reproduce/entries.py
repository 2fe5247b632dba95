"""The entries of the papers' tables at a scale: the run behind each entry and seed.

All tables share the runs: OUT/<scale>/<entry>/seed<seed>.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from config import ROOT, Config, load_config, names, require_known_setting
from errors import UserError
from layers.rope import Rope
from scripts.common.papers import SSMAX
from scripts.common.planned import PlannedRun

CONFIGS = ROOT / "configs"
FIRST_SEED = Config.seed
# The settings that the command line may change: they do not change what is learned from a text.
FREE = (*names("machine", "logs"), "timeout", "data_dir")
# An entry run:view evaluates a run with these options. A view p5 has the option p = 5.
VIEWS: dict[str, dict] = {name: {"rope": name} for name in Rope.SCALINGS} | {
    # Dynamic NTK is NTK with s = length / training length; this is one s for all lengths
    "ntk16": {"rope": "ntk", "rope_factor": 16.0},
    "plain_rope": {"rope": "none"},
    "adaptive_temperature": {"attention": "adaptive_temperature"},
    "oracle": {"oracle": True},
}


@dataclass(frozen=True)
class Entry:
    """A config file, and the settings that depend on the scale."""

    file: Path
    changes: Callable[[Config], dict] = lambda scale: {}
    base: str | None = None  # the entry whose final weights this run starts from

    def changed(self, settings: dict) -> "Entry":
        """The entry with these settings."""
        return replace(self, changes=lambda scale: self.changes(scale) | settings)


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


def windows(name: str, scale: Config) -> dict:
    """The windows of this config file, which are for 1,024 tokens, at the training length."""
    file, share = load_config([str(FILES[name])]), scale.block_size / Config.block_size
    found = {key: getattr(file, key) for key in ("window", "local_window")}
    return {key: max(1, int(share * value)) for key, value in found.items() if value}


def longer(times: int) -> Callable[[Config], dict]:
    """Trained at a longer length, on as many tokens a step: headroom."""
    return lambda scale: {
        "block_size": times * scale.block_size,
        "batch_size": max(1, scale.batch_size // times),
    }


FILES = {path.stem: path for path in (*CONFIGS.glob("*.py"), *CONFIGS.glob("ablations/*.py"))}
# What recall crosses: normalisers, and other positions than RoPE, by the pattern of their names.
NORMALISERS = (
    "softmax", "softmax_logn", "ssmax", "lssa", "softmax_cosine", "lssar_p3", "lssar_p15",
    "sparsemax", "entmax15",
)  # fmt: skip
POSITIONS: dict[str, Callable[[Config], dict]] = {
    "{}_nope": lambda scale: {"positions": "none"},
    "{}_alibi": lambda scale: {"positions": "alibi"},
    # half of the heads see all keys without positions, half a window with RoPE
    "hybrid_{}": lambda scale: {"nope_share": 0.5} | windows("hybrid", scale),
}
SOFTMAX, SSMAX_FILE = CONFIGS / "softmax.py", CONFIGS / "ssmax.py"
ENTRIES = {name: Entry(file) for name, file in FILES.items()} | {
    "softmax_before_f": Entry(SOFTMAX, before_swap),
    "ssmax_e": Entry(SSMAX_FILE, swap, "softmax"),
    "ssmax_f": Entry(SSMAX_FILE, swap_and_train, "softmax_before_f"),
    "ssmax_probe": Entry(CONFIGS / "ablations/ssmax_probe.py", probe),
    "untrained": Entry(SOFTMAX, lambda scale: {"max_iters": 0}),
    # a window of two points of each body in the largest system
    "softmax_window": Entry(SOFTMAX, lambda scale: {"window": 2 * (scale.planets + 1)}),
    "softmax_swiglu": Entry(SOFTMAX, t6_blocks),
    "lssar_p15_swiglu": Entry(CONFIGS / "lssar_p15.py", t6_blocks),
    "softmax_4t": Entry(SOFTMAX, longer(4)),
    "softmax_16t": Entry(SOFTMAX, longer(16)),
}
for name in ("swa", "hybrid", "hybrid_ssmax", "hybrid_ssmax_quarter", "hybrid_lssar_p5"):
    ENTRIES[name] = Entry(FILES[name], partial(windows, name))
for normaliser, (pattern, positions) in itertools.product(NORMALISERS, POSITIONS.items()):
    ENTRIES.setdefault(pattern.format(normaliser), Entry(FILES[normaliser], positions))


def find_entry(name: str) -> Entry:
    """The entry of ENTRIES, which holds every config, or a config with another p (lssar_p7)."""
    variant, p = split_p(name)
    if name in ENTRIES:
        return ENTRIES[name]
    file = FILES.get(f"{variant}_p15") or FILES.get(variant)
    if p is None or file is None:
        raise UserError(f"{name!r} is neither a config of configs/ nor a config with p (lssar_p7)")
    return Entry(file).changed({"p": p})


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
    more: Mapping[str, Entry] = field(default_factory=dict)  # entries of scripts.compare

    @cached_property
    def config(self) -> Config:
        return load_config([*self.arguments])

    def run(self, name: str, seed: int) -> PlannedRun:
        name, _, view = ("untrained:oracle" if name == "oracle" else name).partition(":")
        entry = self.more.get(name) or find_entry(name)
        base = self.run(entry.base, seed) if entry.base else None
        changes = entry.changes(self.config)
        changes |= {"seed": seed, "out_dir": self.out / self.name / name / f"seed{seed}"}
        changes |= {"init_from": base.folder} if base else {}
        arguments, sizes = [*self.arguments, str(entry.file)], CONFIGS / f"scales/t6/{self.name}.py"
        if entry.file in (FILES["t6"], FILES["t6_lssar_p15"]) and sizes.is_file():
            arguments.append(str(sizes))
        arguments += [f"--{key}={value}" for key, value in changes.items()]
        return PlannedRun(name, load_config(arguments), arguments, base, view)


def open_scale(name: str, out: str, task: str = "language", settings: Sequence[str] = ()) -> Scale:
    """The scale of --scale: 124m (the defaults), a file of configs/scales, or another file.

    `settings` are arguments of train.py for all runs. The scales of other tasks than
    text have a folder of their own, as do their runs.
    """
    own = "" if task == "language" else task.rpartition("+")[2]
    files = sorted((CONFIGS / "scales" / own).glob("*.py"))
    known: dict[str, tuple[str, ...]] = {} if own else {"124m": ()}
    known |= {path.stem: (str(path),) for path in files}
    if name.endswith(".py"):
        known, name = {Path(name).stem: (name,)}, Path(name).stem
    if name not in known:
        raise UserError(f"--scale {name!r} must be one of {', '.join(known)}, or a config file")
    for key in (argument.partition("=")[0] for argument in settings):
        if key.startswith("--") and key[2:] not in FREE:
            require_known_setting(key[2:], "the command line")
            free = f"only {', '.join(sorted(FREE))} can"
            raise UserError(f"{key} cannot be set here, but in a file for --scale FILE.py; {free}")
    scale = Scale(name, (*known[name], *settings), Path(out) / own)
    if not {*task.split("+")} <= {*scale.config.tasks}:
        raise UserError(f"--scale {name}: task = {scale.config.task!r}, but this needs {task!r}")
    return scale
