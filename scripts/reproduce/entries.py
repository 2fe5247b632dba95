"""The entries of the papers' tables: the run behind each of them, and how it is evaluated.

All tables share the runs: OUT/<scale>/<run>/seed<seed>.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from config import ROOT, Config, settings_in
from errors import UserError, check_choice
from layers.rope import Rope
from runtime.config_files import load_config, read_file, require_known_setting
from scripts.common.papers import SSMAX
from scripts.reproduce.planned import PlannedRun

CONFIGS = ROOT / "configs"
FILES = {path.stem: path for path in (*CONFIGS.glob("*.py"), *CONFIGS.glob("ablations/*.py"))}
T6 = (FILES["t6"], FILES["t6_lssar_p15"])  # whose heads differ from scale to scale
FIRST_SEED = Config.seed
# The settings that the command line may change: they do not change what is learned from a text.
SETTABLE = (*settings_in("machine", "logs"), "timeout", "data_dir")

# What each run of a table has for itself, and what to use instead.
OF_RUNS = {
    "seed": "--seeds 3 trains three seeds",
    "out_dir": "--out DIR is the folder of all runs",
    "name": "a run is named after its config file and settings",
    "resume": "the same command continues its runs",
    "dry_run": "--plan prints what the runs would cost",
}

# Values of p, in training and of evaluations with another p.
POWERS = (1, 2, 3, 5, 10, 15, 20, 30, 50, 100)

Settings = dict[str, Any]

# How a run may be evaluated: options of the evaluation, by the name of the view.
VIEWS: dict[str, Settings] = {
    "": {},  # the defaults
    "plain_rope": {"rope": "none"},
    **{name: {"rope": name} for name in Rope.SCALINGS if name != "none"},
    # Dynamic NTK is NTK with s = length / training length; this is one s for all lengths.
    "ntk16": {"rope": "ntk", "rope_factor": 16.0},
    **{f"p{p}": {"p": float(p)} for p in POWERS},
    "adaptive_temperature": {"attention": "adaptive_temperature"},
    "oracle": {"oracle": True},  # of orbits
}


@dataclass(frozen=True)
class Entry:
    """A row of a table: a run, which other entries may share, and how the run is evaluated."""

    run: str  # the name of the run's folder
    file: Path  # the config file of the run
    settings: Settings = field(default_factory=dict)  # override the file's
    # more settings, which depend on the config of the scale
    scaled: Callable[[Config], Settings] = lambda scale: {}
    base: "Entry | None" = None  # the entry whose final weights the run starts from
    view: str = ""  # how the run is evaluated, a name in VIEWS
    label: str = ""  # the name of the row, where it is neither RUN nor RUN:VIEW

    @property
    def name(self) -> str:
        """The name of the row: softmax, or softmax:yarn."""
        if self.label:
            return self.label
        if self.view:
            return f"{self.run}:{self.view}"
        return self.run

    @cached_property
    def config(self) -> Config:
        """The config of the run at the default scale."""
        settings = [f"--{key}={value}" for key, value in self.settings.items()]
        return load_config([str(self.file), *settings])


# ---- the configs of configs/ ----


def config_entry(name: str, view: str = "") -> Entry:
    """Return the entry of a config in configs/ or configs/ablations/, evaluated in this way."""
    return Entry(name, FILES[name], view=view)


def config_entries(*configs: str) -> tuple[Entry, ...]:
    """Return the entries of several configs."""
    return tuple(config_entry(config) for config in configs)


def with_dynamic_ntk(*configs: str) -> tuple[Entry, ...]:
    """Return two entries of each config: with the RoPE of the default, and with Dynamic NTK."""
    entries = []
    for config in configs:
        entries += [config_entry(config), config_entry(config, "dynamic_ntk")]
    return tuple(entries)


def at_other_p(name: str, *powers: int) -> dict[str, Entry]:
    """Return the entries of a config as it was trained, and evaluated with these p, by label."""
    entries = {"as trained": config_entry(name)}
    for p in powers:
        entries[f"p{p}"] = config_entry(name, f"p{p}")
    return entries


def config_with(name: str, run: str, **settings: Any) -> Entry:
    """Return the entry of a config with other settings, in a run of its own."""
    return replace(config_entry(name), run=run, settings=settings)


def with_p(variant: str, p: int) -> Entry:
    """Return the entry of a variant with this p; all config files of lssar have a p."""
    config = variant if variant in FILES else f"{variant}_p15"
    return config_with(config, f"{variant}_p{p}", p=float(p))


def hybrid(config: str) -> Entry:
    """Half of the heads see all keys without positions, and half a window with RoPE."""
    return config_with(config, f"hybrid_{config}", nope_share=0.5, local_window=0.25)


def by_name(*entries: Entry) -> dict[str, Entry]:
    """Return entries by their names, for a panel of a picture."""
    return {entry.name: entry for entry in entries}


def all_entries(panels: Mapping[str, Mapping[Any, Entry]]) -> tuple[Entry, ...]:
    """Return the entries of all panels, each once."""
    entries: dict[str, Entry] = {}
    for panel in panels.values():
        entries |= by_name(*panel.values())
    return tuple(entries.values())


# ---- SSMax's swaps of attention in a trained model, and its probe ----


def before_swap(scale: Config) -> Settings:
    return {"max_iters": scale.max_iters - scale.max_iters // 8}


def swap(scale: Config) -> Settings:
    """SSMax (e) takes the weights of softmax, and s = 1 / mean of log n (Sect. 3)."""
    return {"s_init": scale.block_size / math.lgamma(scale.block_size + 1), "max_iters": 0}


def swap_and_train(scale: Config) -> Settings:
    """SSMax (f): train the last 25,000 of 200,000 steps, 1,000 with warm-up, scaled to max_iters.

    The data order continues. AdamW starts anew: the paper does not mention its moments.
    """
    return swap(scale) | {
        "first_batch": before_swap(scale)["max_iters"],
        "max_iters": scale.max_iters // 8,
        "warmup_iters": max(1, scale.max_iters // 200),
    }


def probe_steps(scale: Config) -> Settings:
    """SSMax Fig. 2 needs fewer steps than the other figures."""
    return {"max_iters": min(scale.max_iters, SSMAX["figure2"]["steps"])}


SOFTMAX_BEFORE_F = Entry("softmax_before_f", FILES["softmax"], scaled=before_swap)
SSMAX_E = Entry("ssmax_e", FILES["ssmax"], scaled=swap, base=config_entry("softmax"))
SSMAX_F = Entry("ssmax_f", FILES["ssmax"], scaled=swap_and_train, base=SOFTMAX_BEFORE_F)
SSMAX_PROBE = Entry("ssmax_probe", FILES["ssmax_probe"], scaled=probe_steps)


# ---- T6, orbits and headroom ----


def t6_blocks(scale: Config) -> Settings:
    """Build blocks like T6's, with linear projections and as many parameters as GPT-2."""
    hidden = 8 * scale.n_embd // 3
    return {"norm": "rmsnorm", "mlp": "swiglu", "mlp_hidden": hidden, "bias": False}


SOFTMAX_SWIGLU = Entry("softmax_swiglu", FILES["softmax"], scaled=t6_blocks)
LSSAR_SWIGLU = Entry("lssar_p15_swiglu", FILES["lssar_p15"], scaled=t6_blocks)


def two_points_of_each_body(scale: Config) -> Settings:
    """Let a query see two points of each body in the largest system."""
    return {"window": 2 * (scale.planets + 1)}


SOFTMAX_WINDOW = Entry("softmax_window", FILES["softmax"], scaled=two_points_of_each_body)
UNTRAINED = Entry("untrained", FILES["softmax"], settings={"max_iters": 0})
TRUE_FORCES = replace(UNTRAINED, view="oracle", label="oracle")


def longer(times: int) -> Entry:
    """Return softmax, trained at a longer length on as many tokens a step."""

    def settings(scale: Config) -> Settings:
        return {
            "block_size": times * scale.block_size,
            "batch_size": scale.batch_size and max(1, scale.batch_size // times),
        }

    return Entry(f"softmax_{times}t", FILES["softmax"], scaled=settings)


# ---- scales ----


@dataclass(frozen=True)
class Scale:
    """A scale: its name, and the config file and settings of all its runs."""

    name: str
    title: str  # the name, after the folder of its task: recall/tiny
    arguments: tuple[str, ...]
    out: Path
    planned: dict[tuple[str, int], PlannedRun] = field(default_factory=dict, compare=False)

    @cached_property
    def config(self) -> Config:
        return load_config([*self.arguments])

    def run(self, entry: Entry, seed: int) -> PlannedRun:
        """Return the plan of an entry's run, which is made once.

        So a config file that is edited while a command trains changes nothing in its table. Raises
        UserError if the entry's settings contradict the scale's.
        """
        key = (entry.run, seed)
        if key not in self.planned:
            self.planned[key] = self.plan(entry, seed)
        return self.planned[key]

    def plan(self, entry: Entry, seed: int) -> PlannedRun:
        files = [str(entry.file)]
        sizes = CONFIGS / f"scales/t6/{self.name}.py"
        if entry.file.resolve() in T6 and sizes.is_file():
            files.append(str(sizes))
        settings = entry.scaled(self.config) | entry.settings
        settings["seed"] = seed
        settings["name"] = entry.run
        settings["out_dir"] = self.out / self.name / entry.run / f"seed{seed}"
        base = None
        if entry.base is not None:
            base = self.run(entry.base, seed)
            settings["init_from"] = base.folder
        assignments = [f"--{key}={value}" for key, value in settings.items()]
        arguments = [*self.arguments, *files, *assignments]
        return PlannedRun(load_config(arguments), arguments, base)


def open_scale(name: str, out: str, task: str = "language", settings: Sequence[str] = ()) -> Scale:
    """Return the scale of --scale: 124m (the defaults), a file of configs/scales, or another file.

    `settings` are arguments of train.py for all runs. The scales of other tasks than text have a
    folder of their own, as do their runs. Raises UserError for an unknown scale, for one of another
    task, for a file that sets seed, and for settings that are not SETTABLE.
    """
    folder = "" if task == "language" else task.split("+")[-1]
    scales: dict[str, list[str]] = {}
    if not folder:
        scales["124m"] = []
    for path in sorted((CONFIGS / "scales" / folder).glob("*.py")):
        scales[path.stem] = [str(path)]
    if name.endswith(".py"):
        files = [name]
        name = Path(name).stem
    else:
        check_choice("--scale", name, [*scales, "FILE.py"])
        files = scales[name]
    require_settable(settings)
    for file in files:
        refuse_seed(file)
    title = f"{folder}/{name}" if folder else name
    scale = Scale(name, title, (*files, *settings), Path(out) / folder)
    if not set(task.split("+")) <= set(scale.config.tasks):
        raise UserError(f"--scale {name}: task = {scale.config.task!r}, but this needs {task!r}")
    return scale


def refuse_setting_of_runs(key: str) -> None:
    """Raise UserError for a setting that each run of a table has for itself."""
    if key in OF_RUNS:
        raise UserError(f"--{key} cannot be set: each run has its own; {OF_RUNS[key]}")


def require_settable(settings: Sequence[str]) -> None:
    """Raise UserError for settings that the command line may not change."""
    for argument in settings:
        if not argument.startswith("--"):
            raise UserError(
                f"{argument} is not a setting --key=value; scripts.compare takes config files"
            )
        key = argument.removeprefix("--").partition("=")[0]
        refuse_setting_of_runs(key)
        require_known_setting(key, "the command line")
        if key not in SETTABLE:
            raise UserError(
                f"--{key} cannot be set here, but in a file for --scale FILE.py; "
                f"only {', '.join(sorted(SETTABLE))} can"
            )


def refuse_seed(file: str) -> None:
    """Raise UserError for a config file that sets seed, which differs from run to run."""
    if "seed" in read_file(file):
        raise UserError(f"{file} sets seed, but {OF_RUNS['seed']}")
