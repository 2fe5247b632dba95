"""Reproduce a table or figure of the papers: train, evaluate, and compare with the paper's numbers.

python -m scripts.reproduce table1 --scale tiny --seeds 2
python -m scripts.reproduce table_a6 --scale 124m --only phi_softplus,softmax

Prints the cost, trains the missing runs in OUT/<scale>/<row>/seed<seed> (on all GPUs of the
machine), evaluates them, and writes RESULTS/<scale>/<name>/table.md, .json, .csv, .tex and
pictures. All tables share the runs. An interrupted command continues where it stopped; nothing is
done twice. A run that another process is training is waited for. --only and --seeds limit the work;
--only also takes a variant of the table with any p (lssar_p7). The table has every available row
for these seeds; where RESULTS has one with other seeds, or with runs that are not here, it goes to
<name>_2 beside it.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

if not __package__:  # run as a file: the repository's modules are two folders above
    sys.path.insert(0, str(Path(__file__).parents[2]))

from config import choices
from errors import UserError, command
from runtime.files import check_writable, read_json
from scripts.common.arguments import AtLeast
from scripts.common.papers import TRAINED_LENGTH
from scripts.common.planned import (
    check,
    check_data,
    cost,
    missing_shards,
    stop_on_signals,
    train,
    with_bases,
)
from scripts.common.tables import summarise
from scripts.reproduce import report
from scripts.reproduce.measure import at
from scripts.reproduce.tables import EXPERIMENTS, Experiment
from scripts.reproduce.training import FIRST_SEED, Scale, Work, open_scale, split_p


@command
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.reproduce",
        description=__doc__.split("\n\n")[0],
        epilog=list_experiments() if {"-h", "--help"} & set(sys.argv) else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="one of the names below")
    parser.add_argument(
        "--scale", required=True, help="124m (the papers'), another of configs/scales, or a FILE.py"
    )
    parser.add_argument("--only", metavar="ROW,ROW", help="train and evaluate these rows only")
    parser.add_argument(
        "--seeds", action=AtLeast, at_least=1, default=1, help=f"runs a row, from seed {FIRST_SEED}"
    )
    parser.add_argument("--data", metavar="DIR", help="shards to train on instead of the scale's")
    parser.add_argument("--squad", metavar="FILE", help="SQuAD's train-v2.0.json, for fine-tuning")
    parser.add_argument("--out", default="out", metavar="DIR", help="where runs are (%(default)s)")
    parser.add_argument(
        "--results", default="results", metavar="DIR", help="where tables go (%(default)s)"
    )
    parser.add_argument("--plan", action="store_true", help="print what it would cost, and stop")
    parser.add_argument("--wandb_mode", default="auto", choices=choices("wandb_mode"))
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="a setting of the machine for all runs, such as batch_size=16",
    )  # fmt: skip
    arguments = parser.parse_args()
    name = arguments.name
    if name not in EXPERIMENTS:
        raise UserError(f"{name!r} is not one of {', '.join(EXPERIMENTS)}")
    experiment = EXPERIMENTS[name]
    chosen = tuple(dict.fromkeys(arguments.only.split(","))) if arguments.only else experiment.rows
    with_p(experiment, chosen)  # refuses what is no row of the table
    scale = open_scale(
        arguments.scale, arguments.out, arguments.data, arguments.wandb_mode, arguments.set,
        experiment.task,
    )  # fmt: skip
    evaluation = experiment.evaluation
    trained = evaluation.trained
    work = Work(
        scale,
        chosen,
        range(FIRST_SEED, FIRST_SEED + arguments.seeds),
        Path(arguments.results) / scale.name / name,
        arguments.squad,
        arguments.plan,
        missing_shards(scale.config) if trained and arguments.plan else None,
    )
    runs = work.runs if trained else []
    check(with_bases(runs), "--out")
    if not work.missing_shards:
        check_data(runs)
    evaluation.check(work)
    for folder in (work.folder, scale.out):
        check_writable(folder)

    print(f"{experiment.title}, scale {scale.name}, {len(chosen)} of {len(experiment.rows)} rows")
    if runs:
        print(cost(runs, scale.folders))
    print(evaluation.plan(work), flush=True)
    if trained:
        planned = {(row, seed) for row in chosen for seed in work.seeds}
        folder = table_folder(experiment, work, planned)
        beside = f"; {work.folder} has other runs or seeds" if folder != work.folder else ""
        print(f"the table goes to {folder}{beside}", flush=True)
    if arguments.plan:
        return
    stop_on_signals()
    failures = train(runs, lambda: cost(runs, scale.folders))
    failures += evaluation.measure(work)
    folder = table_folder(experiment, work, set())
    table = build_table(name, experiment, work, folder, failures)
    others = report.beside(work.folder, table, experiment.beside)
    report.write(folder, table, experiment.draw(table) | others)
    print("\n" + (folder / "table.md").read_text())
    print(f"written: {folder}")
    if failures:
        sys.exit(1)


def with_p(experiment: Experiment, names: Iterable[str]) -> list[str]:
    """The rows of a table and these, which may be its variants with another p, by p.

    Raises UserError for any other name.
    """
    rows = list(experiment.rows)
    for name in names:
        variant, p = split_p(name)
        family = [i for i, row in enumerate(rows) if split_p(row)[0] == variant]
        if name in rows:
            continue
        if p is None or not family or not experiment.evaluation.trained:
            more = "; or one of these variants with any p: lssar_p7"
            raise UserError(
                f"--only {name!r}: it must be one of {', '.join(experiment.rows)}"
                + (more if experiment.evaluation.trained else "")
            )
        larger = [i for i in family if (split_p(rows[i])[1] or 0) > p]
        rows.insert(larger[0] if larger else family[-1] + 1, name)
    return rows


def table_folder(experiment: Experiment, work: Work, planned: set[tuple[str, int]]) -> Path:
    """The folder NAME, or NAME_2, NAME_3 ... beside it: the first whose table can be replaced.

    That is one without a table, or whose table has only runs (a row and a seed each) that are
    `planned` or measured. So the committed tables of a fresh clone, which has no runs, stay.
    """

    def replaceable(folder: Path) -> bool:
        before = {(row, run["seed"]) for row, run in saved_runs(folder)} - planned
        rows = {row for row, _ in before}
        results = ((row, run) for row in rows for run in experiment.evaluation.results(work, row))
        return before <= {(row, run["seed"]) for row, run in results}

    beside = (Path(f"{work.folder}_{number}") for number in itertools.count(2))
    return next(filter(replaceable, itertools.chain([work.folder], beside)))


def saved_runs(folder: Path) -> list[tuple[str, dict]]:
    """Each row and run of the table in a folder; none where there is no table."""
    table = read_json(folder / "table.json") or {"rows": {}}
    return [(name, run) for name, row in table["rows"].items() for run in row["runs"]]


def list_experiments() -> str:
    """The names of all experiments, with their training cost from scratch."""
    lines = [
        "the names, and what each trains per seed, at scale 124m, or 109m of orbits; all share the "
        "runs:"
    ]
    for name, experiment in EXPERIMENTS.items():
        size = "109m" if experiment.task == "orbits" else "124m"
        scale = open_scale(size, "out", None, "disabled", [], experiment.task)
        rows = experiment.rows if experiment.evaluation.trained else ()
        runs = with_bases([scale.run(row, FIRST_SEED) for row in rows])
        tokens = sum(run.config.max_iters * run.config.total_batch_size for run in runs)
        what = f"{len(runs)} runs, {tokens / 1e9:.0f}B tokens" if runs else "no training"
        lines.append(f"  {name:16} {experiment.title}: {what}")
    return "\n".join(lines)


def build_table(
    name: str, experiment: Experiment, work: Work, folder: Path, failures: list[str]
) -> dict:
    """The table, in the format of report.py, of all available rows for these seeds.

    Beside the paper's rows, those asked for and those of the table that the folder has. Raises
    UserError where none is available.
    """
    evaluation, config = experiment.evaluation, work.scale.config
    paper, paper_scale = paper_values(experiment, work.scale)
    names = with_p(experiment, [*work.rows, *(row for row, _ in saved_runs(folder))])
    rows = {}
    for row in names:
        if results := evaluation.results(work, row):
            rows[row] = summarise(results) | {"paper": paper.get(row)}
    if not rows:
        raise UserError("no row is available: " + "; ".join(failures))
    keys, better = evaluation.columns(config), evaluation.better
    multiples = [key for key in keys if not isinstance(key, str)]
    table = {
        "name": name,
        "title": experiment.title,
        "scale": work.scale.name,
        "paper_scale": paper_scale,
        "unit": experiment.unit,
        "columns": [
            key if isinstance(key, str) else f"{key:g}x, {at(key, config):,}" for key in keys
        ],
        "paper_columns": [
            (key if isinstance(key, str) else f"{key * TRAINED_LENGTH:,.0f}") if paper else None
            for key in keys
        ],
        "multiples": multiples or None,
        "better": list(better) if isinstance(better, tuple) else [better] * len(keys),
        "compare": evaluation.compare,
        "digits": evaluation.digits,
        "rows": rows,
        "not_run": [row for row in names if row not in rows],
        "failures": failures,
    }
    report.compare(table)
    notes = (*experiment.notes, *evaluation.notes(config), *experiment.remarks(table))
    table["caption"] = report.caption(table, config, notes)
    return table


def paper_values(experiment: Experiment, scale: Scale) -> tuple[dict[str, list], str]:
    """The paper's values for the columns of each row, and the scale of these values.

    A value is None where the paper has none; rows without any value are left out.
    """
    section, name = experiment.paper, experiment.paper_scale
    if section is None:
        return {}, name
    rows = section.get("rows")
    if rows is None:
        name = scale.name if scale.name in section["scales"] else name
        rows = section["scales"][name]
    keys = section.get("columns") or [length / TRAINED_LENGTH for length in section["lengths"]]
    columns, paper = experiment.evaluation.columns(scale.config), {}
    for row, values in rows.items():
        known = dict(zip(keys, values, strict=True))
        if any(column in known for column in columns):
            paper[row] = [known.get(column) for column in columns]
    return paper, name


if __name__ == "__main__":
    main()
