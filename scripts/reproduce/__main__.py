"""Reproduce a table or figure of the papers: train, evaluate, and compare with the paper's numbers.

python -m scripts.reproduce table1 --scale tiny --seeds 2
python -m scripts.reproduce table_a6 --scale 124m --only phi_softplus,softmax

Prints the cost, trains the missing runs in OUT/<scale>/<row>/seed<seed> (on all GPUs of the
machine), evaluates them, and writes RESULTS/<scale>/<name>/table.md, table.json and pictures. All
tables share the runs. An interrupted command continues where it stopped; nothing is done twice. A
run that another process is training is waited for. --only and --seeds limit the work; the table has
every available row for these seeds, and never replaces one with more rows or seeds.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from config import choices
from errors import UserError, command
from runtime.distributed import EXIT_STOPPED
from runtime.files import check_writable, read_json
from scripts.common.arguments import AtLeast
from scripts.common.papers import TRAINED_LENGTH
from scripts.reproduce import report
from scripts.reproduce.tables import EXPERIMENTS, Experiment, Work, at
from scripts.reproduce.training import (
    FIRST_SEED,
    Scale,
    check,
    check_data,
    cost,
    missing_shards,
    open_scale,
    train,
    with_bases,
)


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
    for row in chosen:
        if row not in experiment.rows:
            raise UserError(f"--only {row!r}: {name} has {', '.join(experiment.rows)}")
    scale = open_scale(
        arguments.scale, arguments.out, arguments.data, arguments.wandb_mode, arguments.set
    )
    evaluation = experiment.evaluation
    trained = evaluation.trained
    work = Work(
        scale,
        chosen,
        range(FIRST_SEED, FIRST_SEED + arguments.seeds),
        Path(arguments.results) / scale.name / name,
        arguments.squad,
        missing_shards(scale.config) if trained and arguments.plan else None,
    )
    runs = work.runs if trained else []
    check(with_bases(runs))
    if not work.missing_shards:
        check_data(runs)
    evaluation.check(work)
    for folder in (work.folder, scale.out):
        check_writable(folder)

    print(f"{experiment.title}, scale {scale.name}, {len(chosen)} of {len(experiment.rows)} rows")
    if runs:
        print(cost(runs, scale))
    print(evaluation.plan(work), flush=True)
    if arguments.plan:
        return
    if trained:
        rows = {row for row in experiment.rows if row in chosen or evaluation.results(work, row)}
        refuse_smaller_table(work.folder, {(row, seed) for row in rows for seed in work.seeds})
    stop_on_signals()
    failures = train(runs, scale)
    failures += evaluation.measure(work)
    table = build_table(name, experiment, work, failures)
    refuse_smaller_table(work.folder, runs_of(table), failures)
    others = report.beside(work.folder, table, experiment.beside)
    report.write(work.folder, table, experiment.draw(table) | others)
    print("\n" + (work.folder / "table.md").read_text())
    print(f"written: {work.folder}")
    if failures:
        sys.exit(1)


def runs_of(table: dict) -> set[tuple[str, int]]:
    """The row and seed of every run in a table."""
    return {(name, run["seed"]) for name, row in table["rows"].items() for run in row["runs"]}


def refuse_smaller_table(
    folder: Path, available: set[tuple[str, int]], failures: Sequence[str] = ()
) -> None:
    """Raise UserError where the folder's table has rows or seeds that are missing now.

    So it is in a clone that has the table but not the runs.
    """
    before = runs_of(read_json(folder / "table.json") or {"rows": {}})
    if lost := sorted(before - available):
        seeds = {seed: [row for row, s in lost if s == seed] for _, seed in lost}
        shown = "; ".join(f"seed {seed} of {', '.join(rows)}" for seed, rows in seeds.items())
        raise UserError(
            f"{folder} has a table of {len(before)} runs; the new one would be without {shown}; "
            + "; ".join([*failures, "--results DIR writes the new one elsewhere"])
        )


def stop_on_signals() -> None:
    """Exit on the signals that end a job or close a terminal, so that the child ends too."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, lambda *_: sys.exit(EXIT_STOPPED))


def list_experiments() -> str:
    """The names of all experiments, with their training cost from scratch."""
    scale = open_scale("124m", "out", None, "disabled", [])
    lines = ["the names, and what each trains at scale 124m per seed; all share the runs:"]
    for name, experiment in EXPERIMENTS.items():
        rows = experiment.rows if experiment.evaluation.trained else ()
        runs = with_bases([scale.run(row, FIRST_SEED) for row in rows])
        tokens = sum(run.config.max_iters * run.config.total_batch_size for run in runs)
        what = f"{len(runs)} runs, {tokens / 1e9:.0f}B tokens" if runs else "no training"
        lines.append(f"  {name:16} {experiment.title}: {what}")
    return "\n".join(lines)


def build_table(name: str, experiment: Experiment, work: Work, failures: list[str]) -> dict:
    """The table, in the format of report.py, of all available rows for these seeds.

    Raises UserError where there is none.
    """
    evaluation, config = experiment.evaluation, work.scale.config
    paper, paper_scale = paper_values(experiment, work.scale)
    rows = {}
    for row in experiment.rows:
        if results := evaluation.results(work, row):
            rows[row] = report.summarise(results) | {"paper": paper.get(row)}
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
        "not_run": [row for row in experiment.rows if row not in rows],
        "failures": failures,
    }
    report.compare(table)
    table["caption"] = report.caption(table, config, (*experiment.notes, *evaluation.notes(config)))
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
