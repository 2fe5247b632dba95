"""Reproduce a table or figure of the papers: train, evaluate, and compare with the paper's numbers.

python -m scripts.reproduce table1 --scale tiny --seeds 2
python -m scripts.reproduce table_a6 --scale 124m --only phi_softplus,softmax --batch_size=16

Prints the cost, trains the missing runs in OUT/<scale>/<entry>/seed<seed> (on as many GPUs as
divide a step's micro-batches), evaluates them, and writes RESULTS/<scale>/<name>/table.md,
table.json and pictures. All tables share the runs. An interrupted command continues where it
stopped; nothing is done twice. Runs that another process is training are left to it and waited for.
--only and --seeds limit the work; the table has every entry that is available for these seeds.
RESULTS is out/results, so that the repository's own tables in results/ stay.

Other commands reproduce LSSAR's Table A7, the cost of a step (scripts.benchmark), and SSMax's Figs.
6 to 8, needles in a haystack (scripts.needle, on runs fine-tuned by scripts.finetune_squad).
"""

from collections.abc import Sequence

from errors import check_choice, command
from scripts.reproduce.entries import Entry, open_scale
from scripts.reproduce.report import build_parser, require_known, run_experiment
from scripts.reproduce.tables import EXPERIMENTS


@command
def main() -> None:
    names = "\n".join(f"  {name:20} {EXPERIMENTS[name].title}" for name in EXPERIMENTS)
    parser = build_parser(
        "scripts.reproduce",
        __doc__,
        "NAME is one of the following; settings of train.py that do not change what is learned, "
        f"such as --batch_size=16, go to all runs:\n{names}",
    )
    add = parser.add_argument
    add("name", metavar="NAME", choices=EXPERIMENTS, help="table or figure to reproduce")
    add("--only", metavar="ENTRY,ENTRY", help="only these entries; scripts.compare takes others")
    options, settings = parser.parse_known_args()
    require_known("scripts.reproduce", settings, vars(options))
    experiment = EXPERIMENTS[options.name]
    chosen = experiment.entries
    if options.only:
        chosen = choose(experiment.entries, options.only.split(","))
    scale = open_scale(options.scale, options.out, experiment.task, settings)
    run_experiment(options.name, experiment, scale, chosen, options)


def choose(entries: Sequence[Entry], names: Sequence[str]) -> tuple[Entry, ...]:
    """Return the entries of these names. Raises UserError for an unknown name."""
    entry_of = {entry.name: entry for entry in entries}
    for name in names:
        check_choice("--only", name, entry_of)
    return tuple(entry_of[name] for name in dict.fromkeys(names))


if __name__ == "__main__":
    main()
