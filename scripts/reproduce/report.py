"""Our table beside the paper's: its training and measurement, its rows, columns and caption.

A table has the entries of scripts.common.tables, and

    name, scale, paper_scale, unit
    multiples   of the training length, the first columns; null where columns are no lengths
    not_run     names of table rows
    failures    sentences
"""

import sys
from collections.abc import Iterable

from matplotlib.figure import Figure

from errors import UserError
from runtime.files import check_writable
from scripts.common.papers import TRAINED_LENGTH
from scripts.common.planned import check, check_data, cost, stop_on_signals, train, with_bases
from scripts.common.plots import save_picture
from scripts.common.tables import how_measured, ranged, seed_sentences, summarise, write
from scripts.reproduce.measure import Work, at
from scripts.reproduce.rows import split_p
from scripts.reproduce.tables import Experiment

CONTROL_NOTE = (
    "Sliding window: the same weights with plain RoPE, where each query sees as many keys as in "
    "training at most; independent windows of that length have the loss of 1x at any length. The "
    "gain from context is the lower of the two minus the loss with the full context, at the "
    "longest length: above 0 the model uses the text beyond its training length, below 0 that text "
    "hurts it."
)


def with_p(experiment: Experiment, chosen: Iterable[str]) -> tuple[str, ...]:
    """The table rows of an experiment and the chosen ones, which may have another p, by p."""
    rows, trained = list(experiment.rows), not experiment.measurement.compute
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
    return tuple(rows)


def carry_out(
    name: str, experiment: Experiment, work: Work, stem: str, elsewhere: str, plan: bool
) -> None:
    """Print the cost; then, without `plan`, train, measure, and write the table and its pictures.

    The files are STEM.md, STEM.json and NAME.png in the folder of the work. `elsewhere` is the
    option that moves the runs to another folder. Exits with 1 where a run failed.
    """
    measurement = experiment.measurement
    runs = measurement.training(work)
    check(with_bases(runs), elsewhere)
    if not plan:  # which needs no data
        check_data(runs)
        measurement.check(work)
    check_writable(work.folder)
    check_writable(work.scale.out)
    print(f"{experiment.title}, scale {work.scale.name}, {len(work.rows)} table rows")
    print(f"{cost(runs) if runs else 'to train: nothing'}\n{measurement.plan(work)}", flush=True)
    if plan:
        return
    stop_on_signals()
    failures = train(runs) + measurement.measure(work)
    table = build_table(name, experiment, work, failures)
    drawn = experiment.draw(table)
    pictures = {f"{name}.png": drawn} if isinstance(drawn, Figure) else drawn
    for file, picture in pictures.items():
        save_picture(picture, work.folder / file)
    write(work.folder, stem, table, list(pictures))
    print("\n" + (work.folder / f"{stem}.md").read_text())
    print(f"written: {work.folder / stem}.md, .json")
    if failures:
        sys.exit(1)


def build_table(name: str, experiment: Experiment, work: Work, failures: list[str]) -> dict:
    """The table of all available runs with these seeds."""
    measurement, config = experiment.measurement, work.scale.config
    columns = measurement.columns
    columns = columns if isinstance(columns, tuple) else columns(config)
    better = measurement.better
    paper, paper_scale = paper_values(experiment, work.scale.name, columns)
    entries = {}
    for row in experiment.rows:
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
        "not_run": [row for row in experiment.rows if row not in entries],
        "failures": failures,
    }
    return table | {
        "caption": caption(table, work, (*experiment.notes, *experiment.remarks(table)))
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


def caption(table: dict, work: Work, notes: Iterable[str]) -> list[str]:
    """Sentences on the measurement, on the spread over seeds, and on what is missing."""
    entries = table["rows"].values()
    runs = [run for entry in entries for run in entry["runs"]]
    seeds = sorted({run["seed"] for run in runs} - {None})
    sentences = [table["unit"] + "."]
    if seeds:  # else the numbers follow from formulas
        config = work.scale.config
        shapes = [work.scale.run(name, seeds[0]).config for name in table["rows"]]
        layers, wide = (ranged([getattr(c, k) for c in shapes]) for k in ("n_layer", "n_embd"))
        source = "simulated orbits" if config.task == "orbits" else config.data_dir
        sentences = [
            f"{table['unit']}; {layers} layers, {wide} wide, trained at length "
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
