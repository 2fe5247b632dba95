"""Reproduce a table or figure of the papers: train, evaluate, and compare with the paper's numbers.

python -m scripts.reproduce table1 --scale tiny --seeds 2
python -m scripts.reproduce table_a6 --scale 124m --only phi_softplus,softmax

Prints the cost, trains the missing runs in OUT/<scale>/<row>/seed<seed> (on all GPUs of the
machine), evaluates them, and writes RESULTS/<scale>/<name>/table.md, table.json and pictures. All
tables share the runs. An interrupted command continues where it stopped; nothing is done twice.
Runs that another process is training are left to it and waited for. --only and --seeds limit the
work; --only also takes a variant of the table with any p (lssar_p7). The table has every available
row for these seeds. RESULTS is out/results, so that the repository's own tables in results/ stay.

Commands of their own: scripts.benchmark is LSSAR's Table A7, the cost of a step; SSMax's Figs. 6 to
8, needles in a haystack, are scripts.needle for runs fine-tuned by scripts.finetune_squad.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

if not __package__:  # run as a file: the repository's modules are two folders above
    sys.path.insert(0, str(Path(__file__).parents[2]))

from config import choices
from errors import UserError, command
from runtime.files import read_json
from scripts.common.planned import with_bases
from scripts.reproduce.measure import Work
from scripts.reproduce.report import carry_out, with_p
from scripts.reproduce.rows import FIRST_SEED, open_scale
from scripts.reproduce.tables import EXPERIMENTS


@command
def main() -> None:
    arguments = parse()
    name, experiment = arguments.name, EXPERIMENTS.get(arguments.name)
    if experiment is None:
        raise UserError(f"{name!r} is not one of {', '.join(EXPERIMENTS)}")
    if arguments.seeds < 1:
        raise UserError(f"--seeds {arguments.seeds} must be at least 1")
    settings = (f"wandb_mode={arguments.wandb_mode}", *arguments.set)
    scale = open_scale(arguments.scale, arguments.out, experiment.task, arguments.data, settings)
    rows = tuple(arguments.only.split(",") if arguments.only else experiment.rows)
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    folder = Path(arguments.results) / scale.name / name
    saved = (read_json(folder / "table.json") or {"rows": {}})["rows"]
    experiment = replace(experiment, rows=with_p(experiment, [*rows, *saved]))
    work = Work(scale, rows, seeds, folder)
    carry_out(name, experiment, work, "table", "--out", arguments.plan)


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
    add("--seeds", type=int, default=1, help=f"runs a table row, from {FIRST_SEED} on (1)")
    add("--data", metavar="DIR", help="shards to train on instead of the scale's")
    add("--out", default="out", metavar="DIR", help="where runs are (%(default)s)")
    add("--results", default="out/results", metavar="DIR", help="where tables go (%(default)s)")
    add("--plan", action="store_true", help="print what it would cost, and stop")
    add("--wandb_mode", default="auto", choices=choices("wandb_mode"))
    help = "a setting of the machine for all runs, such as batch_size=16"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=help)
    return parser.parse_args()


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
        runs = with_bases(experiment.measurement.training(work))
        tokens = sum(run.config.max_iters * run.config.total_batch_size for run in runs)
        cost = f"{len(runs)} runs, {tokens / 1e9:.0f}B tokens" if runs else "no training"
        lines.append(f"  {name:16} {experiment.title}: {cost}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
