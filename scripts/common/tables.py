"""Tables: aligned columns in a terminal, and results over seeds as JSON and Markdown.

A table of results is a dict, saved as table.json:

    title, columns, digits
    better      "lower" or "higher" for each column; None: the column is not ranked
    caption     sentences
    baseline    an entry that the others are compared with; empty: none
    rows        name of an entry -> paper, mean, low, high and deviation, which are lists over
                columns, and runs: for each seed its values, folder, step, tokens, environment and
                evaluation. A value that means nothing is None. With a baseline also difference:
                the same of the differences between runs with the same seed.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from runtime.files import atomic_write, write_json

SIDES = ("mean", "low", "high")
# The entries of an evaluation that table.json has, besides text, numbers and the control.
LISTS = ("lengths", "loss", "environment")


def print_table(lines: Sequence[Sequence[str]], left: int = 1, width: int = 0) -> None:
    """Print aligned columns.

    The first `left` columns are flush left, the others flush right and at least `width` wide.
    """
    widths = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.ljust(w) if i < left else cell.rjust(max(w, width))
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        print("".join(cells).rstrip())


# ---- results over seeds ----


def summarise(runs: list[dict]) -> dict:
    """Over the runs of the seeds, every column's mean, lowest, highest value and deviation."""
    columns = list(zip(*(run["values"] for run in runs), strict=True))

    def over_seeds(summary: Callable) -> list[float | None]:
        return [None if None in values else summary(values) for values in columns]

    sides = {"mean": over_seeds(statistics.mean), "low": over_seeds(min), "high": over_seeds(max)}
    several = len(runs) > 1
    deviation = over_seeds(statistics.stdev) if several else [None] * len(columns)
    return sides | {"deviation": deviation, "runs": runs}


def paired(entry: dict, baseline: dict) -> dict:
    """The summary of the differences between the runs of two entries that share a seed."""
    other = {run["seed"]: run["values"] for run in baseline["runs"]}
    differences = []
    for run in entry["runs"]:
        pairs = zip(run["values"], other.get(run["seed"], []), strict=False)
        values = [None if None in pair else pair[0] - pair[1] for pair in pairs]
        differences += [{"seed": run["seed"], "values": values}] if values else []
    return summarise(differences)


def spread(entry: dict, column: int) -> float | None:
    """The range over seeds; None for a single seed, or without a value."""
    known = len(entry["runs"]) > 1 and entry["mean"][column] is not None
    return entry["high"][column] - entry["low"][column] if known else None


def best_entries(table: dict, column: int) -> set[str]:
    """The best entry in a column, and all that cannot be distinguished from it.

    Two are distinguishable if their means differ by more than the larger of their ranges over
    seeds. Entries of a single seed are not compared.
    """
    means = {name: entry["mean"][column] for name, entry in table["rows"].items()}
    spreads = {name: spread(entry, column) for name, entry in table["rows"].items()}
    known = {name: width for name, width in spreads.items() if width is not None}
    if not known or table["better"][column] is None:
        return set()
    best = (min if table["better"][column] == "lower" else max)(known, key=means.__getitem__)
    return {
        name
        for name, width in known.items()
        if name == best or abs(means[name] - means[best]) <= max(width, known[best])
    }


# ---- files ----


def write(folder: Path, table: dict, pictures: Sequence[str]) -> None:
    """Save a table of results as table.json and table.md, which shows the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {}
    for name, entry in table["rows"].items():
        runs = [run | {"evaluation": short(run["evaluation"])} for run in entry["runs"]]
        rows[name] = entry | {"runs": runs}
    write_json(folder / "table.json", table | {"rows": rows})
    with atomic_write(folder / "table.md", "w") as file:
        file.write(markdown(table, pictures))


def short(evaluation: dict) -> dict:
    """An evaluation without its long entries, such as the loss at every position."""
    found = {k: v for k, v in evaluation.items() if k in LISTS or not isinstance(v, (list, dict))}
    return found | ({"control": short(evaluation["control"])} if "control" in evaluation else {})


def markdown(table: dict, pictures: Sequence[str]) -> str:
    columns, rows = range(len(table["columns"])), table["rows"].items()
    best = [best_entries(table, column) for column in columns]
    head = [line("", table["columns"]), "|---" * (len(columns) + 1) + "|"]
    lines = [f"# {table['title']}, scale {table['scale']}", "", *head]
    for name, entry in rows:
        lines.append(line(f"`{name}`", [cell(table, entry, i, name in best[i]) for i in columns]))
    if table["baseline"]:
        lines += ["", f"Minus `{table['baseline']}`, with the same seed:", "", *head]
    for name, difference in ((name, entry.get("difference")) for name, entry in rows):
        for label, one in by_seed(f"`{name}`", difference).items() if difference else ():
            lines.append(line(label, [cell(table, one, i, sign="+") for i in columns]))
    lines += ["", *(f"- {sentence}" for sentence in table["caption"]), ""]
    return "\n".join(lines + [f"![{name}]({name})\n" for name in pictures])


def line(label: str, cells: Sequence[str]) -> str:
    return f"| {label} | {' | '.join(cells)} |"


def by_seed(name: str, summary: dict) -> dict[str, dict]:
    """A summary by its name and, if it is of several runs, one for each seed."""
    runs = summary["runs"] if len(summary["runs"]) > 1 else []
    return {name: summary} | {f"seed {run['seed']}": summarise([run]) for run in runs}


def cell(table: dict, entry: dict, column: int, bold: bool = False, sign: str = "") -> str:
    """Our value ± half the range over seeds, or the standard deviation where entries are compared.

    In parentheses the paper's value and ours minus it.
    """
    digits, value = table["digits"], entry["mean"][column]
    if value is None:
        return "–"
    paper = (entry.get("paper") or {column: None})[column]
    text = f"**{value:{sign}z,.{digits}f}**" if bold else f"{value:{sign}z,.{digits}f}"
    width = entry["deviation"][column] if table["baseline"] else spread(entry, column)
    if width is not None:
        text += f" ± {width if table['baseline'] else width / 2:.{digits}f}"
    return text if paper is None else f"{text} ({paper:.{digits}f}; {value - paper:+.{digits}f})"
