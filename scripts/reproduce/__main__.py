"""Reproduce a table or figure of the papers: train, evaluate, and compare with the paper's numbers.

python -m scripts.reproduce table1 --scale tiny --seeds 2
python -m scripts.reproduce table_a6 --scale 124m --only phi_softplus,softmax

Prints the cost, trains the missing runs in OUT/<scale>/<row>/seed<seed> (on all GPUs of the
machine), evaluates them, and writes RESULTS/<scale>/<name>/table.md, table.json and pictures. All
tables share the runs. An interrupted command continues where it stopped; nothing is done twice. It
waits for a run that another process is training. --only and --seeds limit the work; --only also
takes a variant of the table with any p (lssar_p7). The table has every available row for these
seeds. Where RESULTS has the table with other seeds, or with runs that are not here, the new table
is <name>_2 beside it.
"""

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a file: the repository's modules are two folders above
    sys.path.insert(0, str(Path(__file__).parents[2]))

from matplotlib.figure import Figure

from config import choices
from errors import UserError, command
from runtime.files import atomic_write, check_writable
from scripts.common.arguments import AtLeast
from scripts.common.planned import check, check_data, cost, stop_on_signals, train, with_bases
from scripts.common.plots import write_picture
from scripts.common.tables import write
from scripts.reproduce.measure import Work
from scripts.reproduce.pictures import scales_side_by_side
from scripts.reproduce.report import build_table, table_folder, with_p
from scripts.reproduce.rows import FIRST_SEED, open_scale
from scripts.reproduce.tables import EXPERIMENTS, Experiment


@command
def main() -> None:
    arguments = parse()
    name = arguments.name
    if name not in EXPERIMENTS:
        raise UserError(f"{name!r} is not one of {', '.join(EXPERIMENTS)}")
    experiment = EXPERIMENTS[name]
    work = plan_work(name, experiment, arguments)
    measurement, scale = experiment.measurement, work.scale
    runs = work.training(measurement)
    check(with_bases(runs), "--out")
    try:
        check_data(runs)
    except UserError:
        if not work.planning:
            raise
    measurement.check(work)
    for folder in (work.folder, scale.out):
        check_writable(folder)

    print(f"{experiment.title}, scale {scale.name}, {len(work.rows)} table rows")
    if runs:
        print(cost(runs, scale.folders))
    print(measurement.plan(work), flush=True)
    folder = table_folder(
        experiment, work, {(row, seed) for row in work.rows for seed in work.seeds}
    )
    if folder != work.folder:
        print(f"the table goes to {folder}; {work.folder} has other runs or seeds", flush=True)
    if arguments.plan:
        return
    stop_on_signals()
    failures = train(runs, lambda: cost(runs, scale.folders)) + measurement.measure(work)
    folder = table_folder(experiment, work, set())
    table = build_table(name, experiment, work, folder, failures)
    pictures = experiment.draw(table) | scales_side_by_side(work.folder, table, experiment.scales)
    for file, picture in pictures.items():
        if isinstance(picture, Figure):
            write_picture(picture, folder / file)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(folder / file) as copy:
                copy.write(picture.read_bytes())
    write(folder, "table", table, list(pictures))
    print("\n" + (folder / "table.md").read_text())
    print(f"written: {folder}")
    if failures:
        sys.exit(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.reproduce",
        description=__doc__.split("\n\n")[0],
        epilog=list_experiments() if {"-h", "--help"} & set(sys.argv) else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", metavar="NAME", help="one of the names below")
    add("--scale", required=True, help="124m (the papers'), a name in configs/scales, or a FILE.py")
    add("--only", metavar="ROW,ROW", help="train and evaluate these table rows only")
    add("--seeds", action=AtLeast, at_least=1, default=1, help=f"runs a row, from {FIRST_SEED} on")
    add("--data", metavar="DIR", help="shards to train on instead of the scale's")
    add("--squad", metavar="FILE", help="SQuAD's train-v2.0.json, for fine-tuning")
    add("--out", default="out", metavar="DIR", help="where runs are (%(default)s)")
    add("--results", default="results", metavar="DIR", help="where tables go (%(default)s)")
    add("--plan", action="store_true", help="print what it would cost, and stop")
    add("--wandb_mode", default="auto", choices=choices("wandb_mode"))
    help = "a setting of the machine for all runs, such as batch_size=16"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=help)
    return parser.parse_args()


def plan_work(name: str, experiment: Experiment, arguments: argparse.Namespace) -> Work:
    """The work that the command line asks for."""
    settings = (f"wandb_mode={arguments.wandb_mode}", *arguments.set)
    scale = open_scale(arguments.scale, arguments.out, experiment.task, arguments.data, settings)
    chosen = arguments.only.split(",") if arguments.only else experiment.rows
    with_p(experiment, chosen)  # refuses other names
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    folder = Path(arguments.results) / scale.name / name
    return Work(scale, tuple(dict.fromkeys(chosen)), seeds, folder, arguments.squad, arguments.plan)


def list_experiments() -> str:
    """The names of all experiments, with the cost of their training from scratch."""
    lines = [
        "the names, and the training of one seed at scale 124m, or 109m of orbits; all tables share"
        " the runs:"
    ]
    for name, experiment in EXPERIMENTS.items():
        scale = open_scale(
            "109m" if experiment.task == "orbits" else "124m", "out", experiment.task
        )
        work = Work(scale, experiment.rows, range(FIRST_SEED, FIRST_SEED + 1), Path())
        runs = with_bases(work.training(experiment.measurement))
        tokens = sum(run.config.max_iters * run.config.total_batch_size for run in runs)
        cost = f"{len(runs)} runs, {tokens / 1e9:.0f}B tokens" if runs else "no training"
        lines.append(f"  {name:16} {experiment.title}: {cost}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
