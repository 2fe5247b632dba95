"""Our table beside the paper's: its rows, columns, caption and folder.

A table has the entries of scripts.common.tables, and

    name, scale, paper_scale, unit
    multiples   of the training length, the first columns; null where columns are no lengths
    not_run     names of table rows
    failures    sentences
"""

import itertools
from collections.abc import Iterable
from pathlib import Path

from config import Config
from errors import UserError
from runtime.files import read_json
from scripts.common.papers import TRAINED_LENGTH
from scripts.common.tables import how_measured, ranged, seed_sentences, summarise
from scripts.reproduce.measure import OfRuns, Work, at
from scripts.reproduce.rows import split_p
from scripts.reproduce.tables import Experiment

CONTROL_NOTE = (
    "Sliding window: the same weights with plain RoPE, where each query sees as many keys as in "
    "training at most; independent windows of that length have the loss of 1x at any length. The "
    "gain from context is the lower of the two minus the loss with the full context, at the "
    "longest length: above 0 the model uses the text beyond its training length, below 0 that text "
    "hurts it."
)


def with_p(experiment: Experiment, chosen: Iterable[str]) -> list[str]:
    """The table rows of an experiment and the chosen ones, which may have another p, by p."""
    rows, trained = list(experiment.rows), isinstance(experiment.measurement, OfRuns)
    for name in chosen:
        variant, p = split_p(name)
        family = [i for i, row in enumerate(rows) if split_p(row)[0] == variant]
        if name in rows:
            continue
        if p is None or not family or not trained:
            more = "; or one of these variants with any p: lssar_p7" if trained else ""
            raise UserError(f"--only {name!r} must be one of {', '.join(experiment.rows)}{more}")
        larger = [i for i in family if (split_p(rows[i])[1] or 0) > p]
        rows.insert(larger[0] if larger else family[-1] + 1, name)
    return rows


def table_folder(experiment: Experiment, work: Work, planned: Iterable[tuple[str, int]]) -> Path:
    """NAME, or NAME_2, NAME_3 ... beside it: the first folder whose table can be replaced.

    A table can be replaced where each of its runs (table row and seed) is `planned` or measured.
    So a fresh clone, which has no runs, keeps the committed tables.
    """
    results = experiment.measurement.results
    beside = (Path(f"{work.folder}_{number}") for number in itertools.count(2))
    for folder in itertools.chain([work.folder], beside):
        before = saved_runs(folder) - {*planned}
        names = {name for name, _ in before}
        if before <= {(name, run["seed"]) for name in names for run in results(work, name)}:
            return folder
    raise AssertionError("unreachable")


def saved_runs(folder: Path) -> set[tuple[str, int]]:
    """The table row and the seed of each run in the table of a folder."""
    table = read_json(folder / "table.json") or {"rows": {}}
    return {(name, run["seed"]) for name, entry in table["rows"].items() for run in entry["runs"]}


def build_table(
    name: str, experiment: Experiment, work: Work, folder: Path, failures: list[str]
) -> dict:
    """The table of all available runs with these seeds.

    Its rows are those of the experiment, of this command, and of the table in the folder.
    """
    measurement, config = experiment.measurement, work.scale.config
    columns = measurement.columns
    columns = columns if isinstance(columns, tuple) else columns(config)
    better = measurement.better
    paper, paper_scale = paper_values(experiment, work.scale.name, columns)
    saved = sorted(row for row, _ in saved_runs(folder))
    names, entries = with_p(experiment, [*work.rows, *saved]), {}
    for row in names:
        if results := measurement.results(work, row):
            entries[row] = summarise(results) | {"paper": paper.get(row)}
    if not entries:
        raise UserError("no table row is available: " + "; ".join(failures))
    table = {
        "name": name,
        "title": experiment.title,
        "scale": work.scale.name,
        "paper_scale": paper_scale,
        "unit": experiment.unit,
        "columns": [
            key if isinstance(key, str) else f"{key:g}x, {at(key, config):,}" for key in columns
        ],
        "paper_columns": [
            (key if isinstance(key, str) else f"{key * TRAINED_LENGTH:,.0f}") if paper else None
            for key in columns
        ],
        "multiples": [key for key in columns if not isinstance(key, str)] or None,
        "better": list(better) if isinstance(better, tuple) else [better] * len(columns),
        "digits": measurement.digits,
        "rows": entries,
        "not_run": [row for row in names if row not in entries],
        "failures": failures,
    }
    return table | {
        "caption": caption(table, config, (*experiment.notes, *experiment.remarks(table)))
    }


def paper_values(experiment: Experiment, scale: str, columns: tuple) -> tuple[dict[str, list], str]:
    """The paper's values of these columns for each table row, and the scale they are for.

    A value is None where the paper has none; table rows without any value are left out.
    """
    section, values_of = experiment.paper, experiment.paper_scale
    if section is None:
        return {}, values_of
    if "scales" in section:
        values_of = scale if scale in section["scales"] else values_of
    rows = section["scales"][values_of] if "scales" in section else section["rows"]
    keys = section.get("columns") or [length / TRAINED_LENGTH for length in section["lengths"]]
    known = {name: dict(zip(keys, values, strict=True)) for name, values in rows.items()}
    paper = {name: [values.get(key) for key in columns] for name, values in known.items()}
    known_rows = {name: v for name, v in paper.items() if v != [None] * len(v)}
    return known_rows, values_of


def caption(table: dict, config: Config, notes: Iterable[str]) -> list[str]:
    """Sentences on the measurement, on the spread over seeds, and on what is missing."""
    entries = table["rows"].values()
    runs = [run for entry in entries for run in entry["runs"]]
    seeds = sorted({run["seed"] for run in runs} - {None})
    sentences = [table["unit"] + "."]
    if seeds:  # else the numbers follow from formulas
        source = "simulated orbits" if config.task == "orbits" else config.data_dir
        sentences = [
            f"{table['unit']}; {config.n_layer} layers, {config.n_embd} wide, trained at length "
            f"{config.block_size:,} for {ranged([run['tokens'] for run in runs])} tokens of "
            f"{source}; {'mean over seeds' if len(seeds) > 1 else 'seed'} "
            f"{', '.join(map(str, seeds))}."
        ]
    if any(entry["paper"] for entry in entries):
        sentences.append("In parentheses the paper's value and our value minus it.")
        if seeds and table["scale"] != table["paper_scale"]:
            sentences.append(
                f"The paper's values are for {table['paper_scale']}. At scale {table['scale']} the "
                "model, the data and the number of tokens differ, so compare the table rows with "
                "each other, not with the paper's values."
            )
    sentences += [*seed_sentences(table, seeds), how_measured(runs)]
    if any("control" in run["evaluation"] for run in runs):
        sentences.append(CONTROL_NOTE)
    sentences += notes
    if table["not_run"]:
        missing = ", ".join(f"`{name}`" for name in table["not_run"])
        sentences.append(f"Not run yet: {missing}.")
    return sentences + [f"{failure}." for failure in table["failures"]]
