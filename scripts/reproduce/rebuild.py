"""Rebuild table.md and the pictures of means from table.json, without the runs.

python -m scripts.reproduce.rebuild results/tiny/league [FOLDER ...]

Means, standard deviations and differences are computed from each seed's values. Pictures of the
first seed, such as attention maps, are of measurements that table.json leaves out: they stay.
"""

from pathlib import Path

from errors import Parser, UserError, command
from runtime.files import read_json
from scripts.common.tables import summarise, write
from scripts.reproduce import pictures
from scripts.reproduce.report import add_differences, save_table_pictures
from scripts.reproduce.tables import EXPERIMENTS


@command
def main() -> None:
    parser = Parser(prog="python -m scripts.reproduce.rebuild", description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="folder of a table")
    for folder in parser.parse_args().folders:
        rebuild(folder)
        print(f"written: {folder}/table.md, table.json")


def rebuild(folder: Path) -> None:
    """Write the files of a table anew. Raises UserError without the JSON of a table."""
    file = folder / "table.json"
    table = read_json(file)
    if table is None:
        raise UserError(f"{folder} has no table.json")
    try:
        for row in table["rows"].values():
            row |= summarise(row["runs"])
        if table["baseline"]:
            add_differences(table["rows"], table["baseline"])
    except (LookupError, TypeError, AttributeError) as error:
        message = f"{file} was not made by compare or reproduce: {error!r}"
        raise UserError(message) from error
    name = table["name"]
    if name in EXPERIMENTS:
        save_table_pictures(folder, name, EXPERIMENTS[name].draw(table))
    elif table["multiples"]:  # of compare; not of an experiment that is no longer in EXPERIMENTS
        save_table_pictures(folder, name, pictures.together(table))
    write(folder, table)


if __name__ == "__main__":
    main()
