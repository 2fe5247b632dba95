"""Trains and measures the entries of a table, and writes it with the paper's values and a caption.

A table has the keys of scripts.common.tables, and

    name, device, paper_scale, unit
    multiples   of the training length, the first columns; null if no column is a length
    conditions  of its runs, as scripts.reproduce.committed_tables has them
    not_run     names of entries
    failures    sentences
"""

import argparse
import sys
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from config import SETTINGS, Config
from errors import Parser, UserError, did_you_mean
from runtime.files import check_writable
from scripts.common import runner
from scripts.common.labels import rope_by_label
from scripts.common.papers import TOKENIZER, TRAINED_LENGTH
from scripts.common.plots import save_picture
from scripts.common.tables import paired, ranged, spread, summarise, write
from scripts.eval_length import error_range
from scripts.reproduce import committed_tables
from scripts.reproduce.cost import print_cost, print_entries
from scripts.reproduce.entries import FIRST_SEED, Entry, Scale
from scripts.reproduce.headroom import HEADROOM, LONGER, available, by_seed
from scripts.reproduce.kinds import GAIN
from scripts.reproduce.measure import Experiment, Pictures, Work, in_tokens
from scripts.reproduce.planned import check_plan, left_to_train, stop_on_signals, train

# Facts of an evaluation that the caption mentions, if they are known.
MENTIONED = ("rope_theta", "tokens", "trials", "lm_eval")


def build_parser(name: str, doc: str, epilog: str) -> Parser:
    """Return a parser with the options of scripts.reproduce and scripts.compare."""
    parser = Parser(
        prog=f"python -m {name}",
        description=doc.split("\n\n")[0],
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--scale", required=True, help="124m (the papers'), a name in configs/scales, or FILE.py")
    add("--seeds", type=int, default=1, help=f"seeds per entry, from {FIRST_SEED} on (%(default)s)")
    add("--out", default="out", metavar="DIR", help="folder of the runs (%(default)s)")
    add("--results", metavar="DIR", help="folder of the tables (default: results in --out)")
    add("--again", action="store_true", help="measure again what has been measured")
    add("--plan", action="store_true", help="print what it would cost, and stop")
    return parser


def require_known(command: str, arguments: Iterable[str], options: Iterable[str]) -> None:
    """Raise UserError, with the nearest one, for an argument --KEY that is no option or setting."""
    for argument in arguments:
        key = argument.partition("=")[0].removeprefix("--")
        if argument.startswith("--") and key not in SETTINGS:
            hint = did_you_mean(key, (*options, *SETTINGS))
            raise UserError(
                f"--{key} is neither an option (python -m {command} --help) nor a setting "
                f"(python train.py --help); {hint}".rstrip("; ")
            )


def run_experiment(
    name: str, experiment: Experiment, scale: Scale, chosen: tuple[Entry, ...], options: Any
) -> None:
    """Print the cost; then train, measure, and write the table of this name and its pictures.

    `options` come from `build_parser`; --plan prints the cost only. Exits with 1 where a run
    failed.
    """
    if options.seeds < 1:
        raise UserError(f"--seeds {options.seeds} must be at least 1")
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    results = options.results or Path(options.out, "results")
    folder = Path(results) / scale.name / name
    work = Work(name, experiment, scale, chosen, seeds, options.again)
    runs = work.runs()
    check_plan(runs)
    for evaluation, run in work.evaluations():
        if options.plan:  # which needs no data
            runner.check_opening(evaluation, run.config)
        else:
            runner.check_evaluation(evaluation, run.config)
    if experiment.evaluation is not None and not options.plan:
        committed_tables.conditions(scale, ())  # table.json has them; raises without the data
    check_writable(folder)
    check_writable(scale.out)
    entries = "1 entry" if len(chosen) == 1 else f"{len(chosen)} entries"
    print(f"{experiment.title}, scale {scale.title}, {entries}")
    to_train = "computed without runs"
    if runs:
        to_train = left_to_train(runs)
    if options.plan:
        paper, _ = paper_values(experiment, scale)
        columns = column_names(experiment, scale.config)
        print_entries([entry.name for entry in chosen], columns, paper)
        print(to_train)
        print_cost(runs, scale.out)
        return
    print(to_train, flush=True)
    stop_on_signals()
    failures = train(runs)
    failures += work.measure()
    table = build_table(work, failures)
    save_table_pictures(folder, name, experiment.draw(table))
    if experiment.draw_first_seed is not None:
        save_table_pictures(folder, name, experiment.draw_first_seed(table))
    write(folder, table)
    print("\n" + (folder / "table.md").read_text(encoding="utf-8"))
    print(f"written: {folder}/table.md, table.json")
    if failures:
        sys.exit(1)


def save_table_pictures(folder: Path, name: str, pictures: Pictures) -> None:
    """Save a table's only picture under the table's name, several under their own."""
    if isinstance(pictures, Figure):
        pictures = {f"{name}.png": pictures}
    for file, picture in pictures.items():
        save_picture(picture, folder / file)


# ---- the table ----


def build_table(work: Work, failures: list[str]) -> dict:
    """Build the table of all available runs with these seeds.

    Raises UserError if there is none.
    """
    experiment = work.experiment
    config = work.scale.config
    multiples = experiment.multiples_at(config)
    columns = column_names(experiment, config)
    paper, paper_scale = paper_values(experiment, work.scale)
    rows = {}
    not_run = []
    for entry in experiment.entries:
        runs = work.results(entry)
        if runs:
            rows[entry.name] = summarise(runs) | {"paper": paper.get(entry.name)}
        else:
            not_run.append(entry.name)
    if not rows:
        raise UserError("; ".join(failures) or "no run of the table is trained")
    baseline = experiment.baseline if experiment.baseline in rows else ""
    if baseline:
        add_differences(rows, baseline)
    better = experiment.better
    if not isinstance(better, tuple):
        better = (better,) * len(columns)
    table: dict[str, Any] = {
        "name": work.name,
        "title": experiment.title,
        "scale": work.scale.title,
        "device": config.device,
        "paper_scale": paper_scale,
        "unit": experiment.unit,
        "columns": columns,
        "multiples": list(multiples) or None,
        "better": list(better),
        "digits": experiment.digits,
        "baseline": baseline,
        "same_tokens": experiment.compute is not None or config.tokenizer == TOKENIZER,
        "rows": rows,
        "not_run": not_run,
        "failures": failures,
    }
    if experiment.evaluation is not None:  # other tables are never shown beside a comparison
        table["conditions"] = committed_tables.conditions(work.scale, experiment.entries)
    if experiment.committed is not None:
        table["beside"] = committed_tables.with_columns(experiment.committed, table)
    sentences = caption(table, work)
    if GAIN in experiment.columns:
        sentences += add_headroom(table, work)
    return table | {"caption": sentences}


def column_names(experiment: Experiment, config: Config) -> list[str]:
    """Name the columns at the scale with this config: first lengths, such as "2x, 256"."""
    multiples = experiment.multiples_at(config)
    return [*(f"{m:g}x, {in_tokens(m, config):,}" for m in multiples), *experiment.columns]


def add_differences(rows: dict[str, dict], baseline: str) -> None:
    """Add to each row its differences from the baseline's, where they share a seed."""
    for name, row in rows.items():
        if name == baseline:
            continue
        difference = paired(row, rows[baseline])
        if difference["runs"]:
            row["difference"] = difference


def paper_values(experiment: Experiment, scale: Scale) -> tuple[dict[str, list], str]:
    """Return the paper's values of the columns for each entry, and the scale that they are for.

    A value is None where the paper has none; entries without any value are left out.
    """
    section = experiment.paper
    if section is None:
        return {}, experiment.paper_scale
    scales = section.get("scales") or {experiment.paper_scale: section["rows"]}
    name = scale.name if scale.name in scales else experiment.paper_scale
    keys = section.get("columns") or [length / TRAINED_LENGTH for length in section["lengths"]]
    paper = {}
    columns = (*experiment.multiples_at(scale.config), *experiment.columns)
    for entry, row in scales[name].items():
        value_of = dict(zip(keys, row, strict=True))
        values = [value_of.get(column) for column in columns]
        if any(value is not None for value in values):
            paper[entry] = values
    return paper, name


def add_headroom(table: dict, work: Work) -> list[str]:
    """Add the gain that is available to the heading of the gain's column; returns sentences.

    Returns no sentences if the scale has no headroom runs. A row is undecidable if its seeds differ
    by more than a model could gain, and by more than the context hurts it.
    """
    multiple = table["multiples"][-1]
    headroom = replace(work, experiment=HEADROOM)
    runs = {entry.name: headroom.results(entry) for entry in LONGER}
    gains = available(runs, in_tokens(multiple, work.scale.config))
    if not gains:
        return []
    mean = sum(gains) / len(gains)
    column = table["columns"].index(GAIN)
    table["columns"][column] = f"{GAIN} (available: {mean:+.4f})"
    sentences = [
        f"Available: what {multiple:g}x is worth to a softmax that was trained on it (`reproduce "
        f"headroom`), by seed {by_seed(gains)}."
    ]
    undecidable = []
    for name, row in table["rows"].items():
        gain = row["mean"][column]
        width = spread(row, column)
        if width is not None and width > max(mean, -gain):
            undecidable.append(f"`{name}`")
    if undecidable:
        names = ", ".join(undecidable)
        sentences.append(
            "Undecidable here, because gains at different seeds differ by more than the available "
            f"gain, and by more than the context hurts: {names}."
        )
    return sentences


# ---- the caption ----


def caption(table: dict, work: Work) -> list[str]:
    """Describe the training, the measurement, and what is missing."""
    rows = table["rows"].values()
    runs = [run for row in rows for run in row["runs"]]
    seeds = sorted({run["seed"] for run in runs} - {None})
    sentences = []
    if seeds:
        sentences.append(describe_training(table, work, seeds))
    else:
        sentences.append(f"{table['unit']}.")
    sentences.append(how_measured(table["rows"]))
    if len(seeds) > 1 and work.experiment.draw_first_seed is not None:
        sentences.append("The picture is of the first seed of each entry.")
    if work.experiment.note:
        sentences.append(work.experiment.note)
    sentences += work.experiment.remarks(table)
    if "beside" in table:
        sentences += committed_tables.standing(table)
    if table["not_run"]:
        names = ", ".join(f"`{name}`" for name in table["not_run"])
        sentences.append(f"Not finished: {names}.")
    sentences += [f"{failure}." for failure in table["failures"]]
    return sentences


def describe_training(table: dict, work: Work, seeds: list[int]) -> str:
    """Describe the models and their training."""
    models = []
    for entry in work.experiment.entries:
        if entry.name in table["rows"]:
            models.append(work.scale.run(entry, seeds[0]).config)
    layers = ranged([model.n_layer for model in models])
    width = ranged([model.n_embd for model in models])
    length = ranged([model.block_size for model in models])
    rows = table["rows"].values()
    tokens = ranged([run["tokens"] for row in rows for run in row["runs"]])
    if "recall" in work.scale.config.tasks:
        tokens = f"at most {tokens}"
    return (
        f"{table['unit']}; {layers} layers, {width} wide, trained at length {length} for "
        f"{tokens} tokens of {data_of(work.scale.config)}; {mean_over(seeds, rows)}."
    )


def data_of(config: Config) -> str:
    """Say what the models are trained on."""
    recall = f"recall task {config.recall}"
    text = config.data_dir
    if config.document_mask:
        text += ", with attention within documents"
    if config.task == "orbits":
        return "simulated orbits"
    if config.task == "recall":
        return recall
    if config.task == "language":
        return text
    return f"{text} and {recall} in turn"


def mean_over(seeds: list[int], rows: Collection[dict]) -> str:
    """Name the seeds, and how many of them the rows have."""
    names = ", ".join(str(seed) for seed in seeds)
    if len(seeds) == 1:
        return f"seed {names}"
    counts = [len(row["runs"]) for row in rows]
    if min(counts) < len(seeds):
        return f"mean over {ranged(counts)} of the seeds {names}"
    return f"mean over seeds {names}"


def how_measured(rows: dict[str, dict]) -> str:
    """Name the machine, the options and the versions."""
    runs = [run for row in rows.values() for run in row["runs"]]
    evaluations = [run["evaluation"] for run in runs]
    environments = []
    for item in (*runs, *evaluations):
        if item.get("environment"):
            environments.append(item["environment"])
    machines = distinct_values(environments, "machine")
    dtypes = distinct_values(evaluations, "dtype")
    facts = [f"in {dtypes} on {machines}" if dtypes else f"on {machines}"]
    facts += rope_of(rows)
    for key in MENTIONED:
        values = distinct_values(evaluations, key)
        if values:
            facts.append(f"{key} {values}")
    errors = []
    for evaluation in evaluations:
        errors += evaluation.get("standard_error", [])
    if errors_text := error_range(errors):
        facts.append(f"with a standard error over the text of {errors_text}")
    commits = []
    for environment in environments:
        if environment["commit"]:
            modified = " modified" if environment["modified"] else ""
            commits.append(environment["commit"][:7] + modified)
    sentence = f"Measured {', '.join(facts)}; torch {distinct_values(environments, 'torch')}"
    if commits:  # none in a copy without git
        sentence += f", commit {', '.join(dict.fromkeys(commits))}"
    return f"{sentence}."


def rope_of(rows: dict[str, dict]) -> list[str]:
    """Name the RoPE scaling of the rows whose names do not; [] if there are none."""
    scalings = {}
    for name, row in rows.items():
        evaluation = row["runs"][0]["evaluation"]
        if ":" not in name and "rope" in evaluation:
            scalings[name] = evaluation["rope"]
    return [rope_by_label(scalings)] if scalings else []


def distinct_values(items: list[dict], key: str) -> str:
    """List the distinct values of a key, in order of appearance."""
    values = []
    for item in items:
        value = item.get(key)
        if isinstance(value, int):
            values.append(f"{value:,}")
        elif value is not None:
            values.append(str(value))
    return ", ".join(dict.fromkeys(values))
