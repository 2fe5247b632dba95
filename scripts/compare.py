"""Train several configs with the same seeds and batches, and compare each with the first one.

python -m scripts.compare configs/softmax.py configs/mine.py --scale tiny --seeds 3
python -m scripts.compare configs/lssar_p15.py --p=3,5,7,10 --scale tiny
python -m scripts.compare configs/softmax.py configs/ssmax.py --positions=rope,none \
    --scale recall/tiny --lengths 64,1024
python -m scripts.compare configs/softmax.py configs/softmax.py:yarn --scale tiny

Each config file is an entry, and with --SETTING=VALUE,VALUE each combination of a file and a value.
A setting of a config file overrides the scale's.

Beyond the training length RoPE is scaled by Dynamic NTK, except where windows keep every head with
RoPE within it, as in hybrids. FILE.py:VIEW evaluates the same run in another way, such as yarn, or
plain_rope.

Runs on text are evaluated by length, with the sliding-window control; runs on recall by their
accuracy at each length; runs on orbits by their last validation. The table has means and standard
deviations over seeds, and paired differences: an entry's number minus the first entry's number with
the same seed, which trains on the same batches (unless --total_batch_size or --align_documents
differs) and from the same initial weights where the shapes agree. T6, learned positions, bias =
False, SwiGLU and grouped keys draw other initial weights. Seeds change the loss of all entries
alike, so a difference may be the same at every seed and far smaller than the range over seeds.

Committed results of the same scale, in results/, are shown too, dashed in the picture, if their
settings and data (the sequences of recall, the shards of text) are the same. Otherwise a message
says what differs. --beside FOLDER shows another table, and --beside none shows no committed
results. A single config is enough.

Prints the cost, trains the missing runs in OUT/<scale>/<entry>/seed<seed>, which
scripts.reproduce shares, and writes RESULTS/<scale>/compare_<entries>/table.md, table.json and a
picture. The same entries with other --lengths or --seeds replace the table; the measurements stay
with the runs. An interrupted command continues where it stopped; nothing is done twice. To train
several runs at the same time, start the same command on each GPU, with CUDA_VISIBLE_DEVICES: runs
that another process is training are left to it. Each command measures whatever is not stored yet,
so some measurements may be made twice.
"""

import itertools
import shlex
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

from config import Config, choices, settings_in
from errors import UserError, check_choice, command
from layers.heads import check_attention
from runtime.config_files import format_value, load_config, parse, shorten
from scripts.common.command_line import parse_lengths
from scripts.eval_length import UNIT
from scripts.recall import Recall
from scripts.reproduce import committed_tables, kinds, metrics, pictures
from scripts.reproduce.entries import (
    CONFIGS,
    FIRST_SEED,
    SETTABLE,
    VIEWS,
    Entry,
    Scale,
    open_scale,
    refuse_seed,
    refuse_setting_of_runs,
)
from scripts.reproduce.measure import Experiment
from scripts.reproduce.report import build_parser, require_known, run_experiment

# Entries may not differ in these: losses on other data or at other lengths cannot be compared.
FIXED = (*settings_in("data"), "block_size", "first_batch")
# How the run of CONFIG.py:VIEW may be evaluated.
FILE_VIEWS = [view for view in VIEWS if view not in ("", "oracle")]


@command
def main() -> None:
    views = textwrap.fill(f"VIEW evaluates the run in another way: {', '.join(FILE_VIEWS)}", 79)
    epilog = f"{views}\nSETTING: one that python train.py --help lists"
    parser = build_parser("scripts.compare", __doc__, epilog)
    parser.usage = "%(prog)s CONFIG.py[:VIEW] ... --scale SCALE [--SETTING=VALUE,VALUE ...]"
    parser.add_argument(
        "--lengths",
        type=parse_lengths,
        help="lengths in tokens, besides the training length (default: its multiples)",
    )
    parser.add_argument(
        "--beside",
        metavar="FOLDER",
        help="folder of a table.json to show too, or none (default: a comparable committed table)",
    )
    options, rest = parser.parse_known_args()
    require_known("scripts.compare", rest, vars(options))
    configs = [text for text in rest if not text.startswith("--")]
    settings, grid = read_settings([text for text in rest if text.startswith("--")])
    if not configs:
        raise UserError("no config to train: give files, such as configs/softmax.py mine.py")
    if options.scale.endswith(".py"):
        task = load_config([options.scale]).tasks[-1]
        name = options.scale
    else:
        require_scale(options.scale)
        folder, _, name = options.scale.rpartition("/")
        task = folder or "language"
    scale = open_scale(name, options.out, task, settings)
    entries = entries_of(scale, configs, grid)
    experiment = build_experiment(scale, entries, task, options.lengths)
    experiment = with_committed(experiment, scale, options.beside)
    words = ["compare"]
    if task != "language":  # whose tables have names of their own
        words.append(task)
    words += [entry.name for entry in entries]
    table_name = shorten("_".join(words).replace(":", "-"))
    run_experiment(table_name, experiment, scale, entries, options)


def require_scale(name: str) -> None:
    """Raise UserError unless this is a name in configs/scales: tiny, or recall/tiny."""
    known = ["124m"]
    for path in sorted((CONFIGS / "scales").rglob("*.py")):
        scale = path.relative_to(CONFIGS / "scales").with_suffix("").as_posix()
        task = scale.rpartition("/")[0]
        if task in ("", *choices("task")):  # the folder t6 has the sizes of T6's heads alone
            known.append(scale)
    check_choice("--scale", name, [*known, "FILE.py"])


def read_settings(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Split settings into arguments for all runs, and the values of compared settings.

    Raises UserError for a setting without a value, and for a repeated setting.
    """
    values: dict[str, str] = {}
    for argument in arguments:
        key, equals, text = argument.removeprefix("--").partition("=")
        if not equals:
            raise UserError(f"--{key} needs its values after an equals sign: --{key}=VALUE,VALUE")
        if key in values:
            raise UserError(f"--{key} is given twice; all values go into one: --{key}=VALUE,VALUE")
        values[key] = text
    settings = [f"--{key}={text}" for key, text in values.items() if key in SETTABLE]
    grid = {key: text for key, text in values.items() if key not in SETTABLE}
    return settings, grid


def entries_of(scale: Scale, configs: list[str], grid: dict[str, str]) -> tuple[Entry, ...]:
    """Combine each config with each combination of the settings' values.

    Raises UserError for a combination that cannot be trained, such as lssar with p = None, or
    compared, for settings in which entries may not differ, for an unknown view, and where two
    entries have one name.
    """
    values = []
    for key, texts in grid.items():
        refuse_setting_of_runs(key)
        if key in FIXED or key == "init_from":  # a path, which cannot name a run
            raise UserError(
                f"--{key}: entries cannot differ in it; set it for all entries in --scale FILE.py"
            )
        values.append([(key, parse(key, text)) for text in texts.split(",")])
    entries: dict[str, Entry] = {}
    files: dict[str, Path] = {}  # of each run
    for text in configs:
        for combination in itertools.product(*values):
            entry = with_settings(parse_entry(text), dict(combination))
            file = entry.file.resolve()
            if entry.name in entries or files.setdefault(entry.run, file) != file:
                raise UserError(
                    f"two entries are called {entry.name}: rename a file, or drop a value"
                )
            entries[entry.name] = entry
            refuse_seed(str(entry.file))
            try:
                config = scale.run(entry, FIRST_SEED).config
                check_attention(config)
            except UserError as error:
                raise UserError(f"{entry.name}: {error}") from error
            require_fixed(entry.name, config, scale.config)
    return tuple(entries.values())


def parse_entry(text: str) -> Entry:
    """Return the entry of CONFIG.py or CONFIG.py:VIEW.

    Raises UserError for an unknown view, and for the folder of a run.
    """
    path = text
    view = ""
    if ".py:" in text:
        path, _, view = text.rpartition(":")
        check_choice(f"{text}: view", view, FILE_VIEWS)
    file = Path(path)
    if file.is_dir():
        raise UserError(
            f"{text} is a folder; this trains config files. To compare finished runs: "
            f"python -m scripts.eval_length {text} RUN"
        )
    return Entry(file.stem, file, view=view)


def with_settings(entry: Entry, settings: dict[str, Any]) -> Entry:
    """Return the entry with these settings, and with a run that is called by them."""
    assignments = [f"{key}={format_value(value)}" for key, value in settings.items()]
    return replace(entry, run=",".join([entry.run, *assignments]), settings=settings)


def build_experiment(
    scale: Scale, entries: tuple[Entry, ...], task: str, lengths: tuple[int, ...] | None
) -> Experiment:
    """Choose the measurement by the task. Raises UserError for a view of orbits."""
    if lengths:
        trained = scale.config.block_size
        multiples = tuple(length / trained for length in sorted({trained, *lengths}))
    elif any(scale.run(entry, FIRST_SEED).config.positions == "learned" for entry in entries):
        multiples = (1,)
    elif task == "recall":
        multiples = Recall.multiples
    else:
        multiples = kinds.MULTIPLES
    title = entries[0].name
    baseline = ""
    if len(entries) > 1:
        baseline = title
        title = f"Compared with {baseline}"
    made_by = f"Made by `python -m scripts.compare {shlex.join(sys.argv[1:])}`."
    if task == "orbits":
        if lengths:
            raise UserError("--lengths: orbits are compared by their last validation alone")
        experiment = last_validation(title, entries)
    elif task == "recall":
        experiment = kinds.recall(title, entries, multiples, kinds.accuracies_if_learned)
    elif multiples[-1] > 1:
        experiment = kinds.loss_and_gain(title, entries, multiples)
    else:
        experiment = kinds.loss(title, entries, multiples)
    return replace(
        experiment,
        baseline=baseline,
        better=None,
        draw=pictures.together,
        note=made_by,
    )


def with_committed(experiment: Experiment, scale: Scale, beside: str | None) -> Experiment:
    """Add the committed table that --beside names or, without it, that is comparable.

    Raises UserError if the named one is not.
    """
    committed = None
    if beside is None:
        committed, reason = committed_tables.find(scale, experiment)
        if reason:
            print(reason)
    elif beside != "none":
        committed = committed_tables.open_table(beside, scale, experiment)
    title = experiment.title
    if committed is not None and not experiment.baseline:
        title += f" beside {committed['folder']}"
    return replace(experiment, committed=committed, title=title)


def require_fixed(name: str, config: Config, scale: Config) -> None:
    """Raise UserError if an entry has other data or another length than the scale."""
    for key in FIXED:
        value = getattr(config, key)
        expected = getattr(scale, key)
        if value != expected:
            raise UserError(
                f"{name} cannot be compared: it has {key} = {value!r}, not the scale's "
                f"{expected!r}: set it in --scale FILE.py"
            )


def last_validation(title: str, entries: tuple[Entry, ...]) -> Experiment:
    """Compare the last validation losses in training. Raises UserError for an entry with a view."""
    for entry in entries:
        if entry.view:
            raise UserError(f"{entry.name}: orbits are compared by their last validation alone")
    return Experiment(
        title=title,
        unit=UNIT,
        entries=entries,
        multiples=(1,),
        read=metrics.last_validation,
    )


if __name__ == "__main__":
    main()
