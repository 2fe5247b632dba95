"""Reproduce a table or figure of the papers: train, evaluate, and compare with the paper's numbers.

python -m scripts.reproduce table1 --scale tiny --seeds 2
python -m scripts.reproduce table_a6 --scale 124m --only phi_softplus,softmax --batch_size=16

Prints the cost, trains the missing runs in OUT/<scale>/<entry>/seed<seed> (on all GPUs of the
machine), evaluates them, and writes RESULTS/<scale>/<name>/table.md, table.json and pictures. All
tables share the runs. An interrupted command continues where it stopped; nothing is done twice.
Runs that another process is training are left to it and waited for. --only and --seeds limit the
work; the table has every entry that is available for these seeds. RESULTS is out/results, so that
the repository's own tables in results/ stay.

Commands of their own: scripts.benchmark is LSSAR's Table A7, the cost of a step; SSMax's Figs. 6 to
8, needles in a haystack, are scripts.needle for runs fine-tuned by scripts.finetune_squad.
"""

import argparse
import functools
import sys
from pathlib import Path

if not __package__:  # run as a file: the repository's modules are two folders above
    sys.path.insert(0, str(Path(__file__).parents[2]))

from errors import UserError, command
from scripts.common.runner import Parser, value_of
from scripts.reproduce.entries import FIRST_SEED, open_scale
from scripts.reproduce.measure import Work
from scripts.reproduce.report import carry_out
from scripts.reproduce.tables import EXPERIMENTS


@command
def main() -> None:
    parser = Parser(
        prog="python -m scripts.reproduce",
        description=__doc__.split("\n\n")[0],
        epilog="NAME is one of the following; settings of train.py that do not change what is "
        "learned, such as --batch_size=16, go to all runs:\n"
        + "\n".join(f"  {name:16} {one.title}" for name, one in EXPERIMENTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, at_least_one = parser.add_argument, functools.partial(value_of, int, 1)
    add("name", metavar="NAME", choices=EXPERIMENTS, help="of a table or figure")
    add("--scale", required=True, help="124m (the papers'), a name in configs/scales, or a FILE.py")
    add("--only", metavar="ENTRY,ENTRY", help="train and evaluate these entries of the table only")
    add("--seeds", type=at_least_one, default=1, help=f"of each entry, from {FIRST_SEED} on (1)")
    add("--out", default="out", metavar="DIR", help="where runs are (%(default)s)")
    add("--results", default="out/results", metavar="DIR", help="where tables go (%(default)s)")
    add("--plan", action="store_true", help="print what it would cost, and stop")
    options, settings = parser.parse_known_args()
    experiment = EXPERIMENTS[options.name]
    chosen = tuple(options.only.split(",")) if options.only else experiment.entries
    if unknown := set(chosen) - set(experiment.entries):
        known = ", ".join(experiment.entries)
        raise UserError(f"--only {min(unknown)!r} must be one of {known}")
    scale = open_scale(options.scale, options.out, experiment.task, settings)
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    folder = Path(options.results) / scale.name / options.name
    work = Work(options.name, experiment, scale, chosen, seeds, folder)
    carry_out(work, "table", "--out", options.plan)


if __name__ == "__main__":
    main()
