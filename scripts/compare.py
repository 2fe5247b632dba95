"""Train several configs with the same seeds and batches, and compare each with the first one.

python -m scripts.compare configs/softmax.py configs/mine.py --scale tiny --seeds 3
python -m scripts.compare configs/lssar_p15.py --p=3,5,7,10 --scale tiny
python -m scripts.compare configs/softmax.py configs/ssmax.py --positions=rope,none \
    --scale recall/tiny --lengths 64,1024
python -m scripts.compare configs/softmax.py configs/hybrid_ssmax.py:plain_rope --scale tiny

Each config file is an entry, and with --SETTING=VALUE,VALUE each combination of a file and a value.
A setting of a config file overrides the scale's.

Beyond the training length RoPE is scaled by Dynamic NTK. FILE.py:VIEW evaluates the same run in
another way, such as yarn, or plain_rope, which is better for hybrids and sliding windows: their
heads with RoPE never see farther than in training.

Runs on text are evaluated by length, with the sliding-window control; runs on recall by their
accuracy at each length; runs on orbits by their last validation. The table has means and standard
deviations over seeds, and paired differences: an entry's number minus the first entry's number with
the same seed. Seeds change the loss of all entries alike, so that a difference may be the same at
every seed and far smaller than the range over seeds.

Prints the cost, trains the missing runs in OUT/<scale>/<entry>/seed<seed>, which
scripts.reproduce shares, and writes RESULTS/<scale>/compare_<entries>/table.md, table.json and a
picture. An interrupted command continues where it stopped; nothing is done twice. To train several
runs at the same time, start the same command on each GPU, with CUDA_VISIBLE_DEVICES: runs that
another process is training are left to it.
"""

import itertools
import shlex
import sys
from dataclasses import replace
from pathlib import Path

# for a script that is run as a file: the repository's modules are not beside it
sys.path.insert(0, str(Path(__file__).parents[1]))

from config import choices, load_config, names, parse, require_known_setting
from errors import UserError, command
from layers.heads import check_attention
from scripts.common.labels import shortened, shown
from scripts.common.options import lengths_of
from scripts.reproduce import metrics, pictures, tables
from scripts.reproduce.entries import FILES, FREE, VIEWS, Entry, Scale, find_entry, open_scale
from scripts.reproduce.measure import Experiment
from scripts.reproduce.report import carry_out, work_parser

# Settings that entries may differ in: losses on other data or at other lengths cannot be compared.
FIXED = (*names("data"), "block_size")
COMPARABLE = {*names("attention", "model", "optimisation")} - {"block_size", "seed"}
# How the run of FILE.py:VIEW is evaluated; none is plain_rope, and oracle is of orbits alone.
VIEWED = [view for view in VIEWS if view not in ("none", "oracle")]


@command
def main() -> None:
    parser = work_parser("scripts.compare", __doc__, "settings: python train.py --help")
    parser.usage = "%(prog)s CONFIG.py[:VIEW] ... --scale SCALE [--SETTING=VALUE,VALUE ...]"
    help = "to evaluate at, in tokens, besides the training length (default: its multiples)"
    parser.add_argument("--lengths", type=lengths_of, help=help)
    options, rest = parser.parse_known_args()
    files = [text for text in rest if not text.startswith("--")]
    settings: dict[str, str] = {}
    for key, equals, text in (text[2:].partition("=") for text in rest if text.startswith("--")):
        if not equals or key in settings:
            raise UserError(f"--{key} needs its values once: --{key}=VALUE,VALUE")
        settings[key] = text
    free = [f"--{key}={text}" for key, text in settings.items() if key in FREE]
    task, _, name = options.scale.rpartition("/")
    task = task or "language"
    if options.scale.endswith(".py"):
        task, name = load_config([options.scale]).tasks[-1], options.scale
    if task not in choices("task"):
        raise UserError(f"--scale {options.scale!r} must be a file of configs/scales, or a FILE.py")
    scale = open_scale(name, options.out, task, free)
    grid = {key: text for key, text in settings.items() if key not in FREE}
    entries = entries_of(scale, files, grid)
    scale = replace(scale, more={name.partition(":")[0]: one for name, one in entries.items()})
    experiment = compared(scale, tuple(entries), task, options.lengths)
    others = [] if task == "language" else [task]  # whose tables have names of their own
    name = shortened("_".join(["compare", *others, *entries]).replace(":", "-"))
    carry_out(name, experiment, scale, experiment.entries, options)


def entries_of(scale: Scale, files: list[str], grid: dict[str, str]) -> dict[str, Entry]:
    """The entries by name: each file, with each combination of the settings' values.

    Raises UserError for a combination that cannot be trained, such as lssar with p = None, for
    settings in which entries may not differ, for an unknown view, and where two entries have one
    name.
    """
    for key in grid:
        require_known_setting(key, "the command line")
        if key not in COMPARABLE:
            instead = "set it for all entries in --scale FILE.py (seeds: --seeds 3)"
            raise UserError(f"--{key}: entries cannot differ in it; {instead}")
    values = [[(key, parse(key, text)) for text in grid[key].split(",")] for key in grid]
    entries: dict[str, Entry] = {}
    paths: dict[str, Path] = {}  # the file of each run
    for text, changes in itertools.product(files, itertools.product(*values)):
        file, colon, view = text.rpartition(":") if ".py:" in text else (text, "", "")
        if colon and view not in VIEWED:
            raise UserError(f"{text}: {view!r} must be one of {', '.join(VIEWED)}")
        stem, path = Path(file).stem, Path(file).resolve()
        ours = stem in FILES and path == FILES[stem]
        entry = (find_entry(stem) if ours else Entry(Path(file))).changed(dict(changes))
        run = ",".join([stem, *(f"{key}={shown(value)}" for key, value in changes)])
        name = run + colon + view
        if name in entries or paths.setdefault(run, path) != path:
            raise UserError(f"two entries are called {name}: rename a file, or drop a value")
        entries[name] = entry
        check_attention(replace(scale, more={run: entry}).run(name, 0).config)
    return entries


def compared(
    scale: Scale, entries: tuple[str, ...], task: str, lengths: tuple[int, ...] | None
) -> Experiment:
    """The measurement of the entries, by the task."""
    if len(entries) < 2:
        raise UserError("nothing to compare: give two configs, or a setting two values: --p=3,5")
    configs = {name: scale.run(name, 0).config for name in entries}
    for (name, config), key in itertools.product(configs.items(), FIXED):
        value, wanted = getattr(config, key), getattr(scale.config, key)
        if value != wanted:
            instead = f"not the scale's {wanted!r}: set it in --scale FILE.py"
            raise UserError(f"{name} cannot be compared: it has {key} = {value!r}, {instead}")
    title, trained = f"Compared with {entries[0]}", configs[entries[0]].block_size
    multiples: tuple[float, ...] = tables.LENGTHS
    if task != "language":
        multiples = tables.RecallOptions.multiples
    if lengths:
        multiples = tuple(length / trained for length in sorted({trained, *lengths}))
    elif any(config.positions == "learned" for config in configs.values()):
        multiples = (1,)
    experiment = tables.loss(title, entries, multiples)
    if task == "orbits":
        if viewed := [name for name in entries if ":" in name]:
            raise UserError(f"{viewed[0]}: orbits are compared by their last validation alone")
        experiment = Experiment(title, tables.LOSS, entries, (1,), read=metrics.last_validation)
    elif task == "recall":
        experiment = tables.recall(title, entries, multiples, remarks=tables.accuracy_by_seed)
    note = f"Made by `python -m scripts.compare {shlex.join(sys.argv[1:])}`."
    return replace(experiment, baseline=entries[0], better=None, draw=pictures.together, note=note)


if __name__ == "__main__":
    main()
