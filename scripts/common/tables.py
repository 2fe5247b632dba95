"""Tables: aligned columns in a terminal, and results over seeds as JSON and Markdown.

A table of results is a dict, saved as table.json:

    title, scale, columns, digits
    better      "lower" or "higher" for each column; None: the column is not ranked
    caption     sentences
    baseline    the entry that the others are compared with; empty: none
    same_tokens whether the paper's models read tokens of the same tokenizer
    rows        name of an entry -> paper, mean, low, high and deviation, which are lists over
                columns, and runs: for each seed its values, folder, step, tokens, environment and
                evaluation. A value that means nothing is None. With a baseline also `difference`:
                mean, low, high, deviation and runs of the row's values minus the baseline's at the
                same seed.
    beside      the folder of another table, and its rows with these columns; or no such key
"""

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from runtime.files import atomic_write, write_json

HOW_TO_READ = "How to read the columns, ± and bold: docs/evaluations.md, A table of the papers."
# The lists and dicts of an evaluation that table.json keeps; see `short`.
KEPT = ("lengths", "loss", "standard_error", "environment")


def print_table(rows: Sequence[Sequence[str]], width: int = 0) -> None:
    """Print rows of cells in aligned columns.

    The first column is flush left, the others flush right and at least `width` wide.
    """
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    for row in rows:
        line = row[0].ljust(widths[0])
        for text, column_width in zip(row[1:], widths[1:], strict=True):
            line += text.rjust(max(column_width, width))
        print(line.rstrip())


# ---- results over seeds ----


def summarise(runs: list[dict]) -> dict:
    """Return each column's mean, lowest and highest value and standard deviation over the runs.

    They are None in a column where a run has no finite value. A single run has no deviation.
    """
    columns = list(zip(*(run["values"] for run in runs), strict=True))
    one_run = len(runs) == 1

    def by_column(statistic: Callable) -> list[float | None]:
        return [statistic(values) if all_finite(values) else None for values in columns]

    return {
        "mean": by_column(statistics.mean),
        "low": by_column(min),
        "high": by_column(max),
        "deviation": [None] * len(columns) if one_run else by_column(statistics.stdev),
        "runs": runs,
    }


def all_finite(values: Sequence[float | None]) -> bool:
    return all(value is not None and math.isfinite(value) for value in values)


def paired(entry: dict, baseline: dict) -> dict:
    """Summarise the differences between the runs of two entries that share a seed."""
    references = {run["seed"]: run["values"] for run in baseline["runs"]}
    differences = []
    for run in entry["runs"]:
        if run["seed"] not in references:
            continue
        pairs = zip(run["values"], references[run["seed"]], strict=True)
        values = [None if None in pair else pair[0] - pair[1] for pair in pairs]
        differences.append({"seed": run["seed"], "values": values})
    return summarise(differences)


def spread(entry: dict, column: int) -> float | None:
    """The range over seeds; None for a single seed, or without a value."""
    if entry["deviation"][column] is None:
        return None
    return entry["high"][column] - entry["low"][column]


def ranged(values: Sequence[int]) -> str:
    """Return the lowest and the highest value: "6 to 12", or "6" where they are the same."""
    low = min(values)
    high = max(values)
    if low == high:
        return f"{low:,}"
    return f"{low:,} to {high:,}"


def best_entries(table: dict, column: int) -> set[str]:
    """The best entry in a column, and all that tie with it.

    Two entries tie if the table shows the same mean for both, or if their means differ by no more
    than the larger of their ranges over seeds. Entries of a single seed are not compared.
    """
    means = {}
    spreads = {}
    for name, entry in table["rows"].items():
        width = spread(entry, column)
        if width is not None:
            means[name] = entry["mean"][column]
            spreads[name] = width
    if not means or table["better"][column] is None:
        return set()
    choose = min if table["better"][column] == "lower" else max
    best = choose(means, key=means.__getitem__)
    digits = table["digits"]
    tied = {best}
    for name, mean in means.items():
        looks_the_same = round(mean, digits) == round(means[best], digits)
        if looks_the_same or abs(mean - means[best]) <= max(spreads[name], spreads[best]):
            tied.add(name)
    return tied


# ---- files ----


def write(folder: Path, table: dict) -> None:
    """Save a table of results as table.json and table.md, which shows the folder's pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = sorted(path.name for path in folder.glob("*.png"))
    rows = {}
    for name, entry in table["rows"].items():
        runs = [run | {"evaluation": short(run["evaluation"])} for run in entry["runs"]]
        rows[name] = entry | {"runs": runs}
    write_json(folder / "table.json", table | {"rows": rows})
    with atomic_write(folder / "table.md", "w") as file:
        file.write(markdown(table, pictures))


def short(evaluation: dict) -> dict:
    """An evaluation without its long entries, such as the loss at every position."""
    entries = {}
    for key, value in evaluation.items():
        if key in KEPT or not isinstance(value, (list, dict)):
            entries[key] = value
    if "control" in evaluation:
        entries["control"] = short(evaluation["control"])
    return entries


def markdown(table: dict, pictures: Sequence[str]) -> str:
    """The table, the differences from its baseline, its caption and its pictures."""
    columns = range(len(table["columns"]))
    head = [f"|  | n | {' | '.join(table['columns'])} |", "|---" * (len(columns) + 2) + "|"]
    lines = [f"# {table['title']}, scale {table['scale']}", "", *head]
    for name, entry in table["rows"].items():
        bold = [column for column in columns if name in best_entries(table, column)]
        lines.append(markdown_row(table, f"`{name}`", entry, bold))
    if any("difference" in entry for entry in table["rows"].values()):
        lines += ["", f"Minus `{table['baseline']}`, with the same seed:", "", *head]
        for name, entry in table["rows"].items():
            if "difference" in entry:
                lines += difference_rows(table, name, entry["difference"])
    if "beside" in table:
        lines += ["", f"{table['beside']['folder']}, of the same settings and data:", "", *head]
        for name, entry in table["beside"]["rows"].items():
            lines.append(markdown_row(table, f"`{name}`", entry))
    lines.append("")
    lines += [f"- {sentence}" for sentence in (*table["caption"], *reading(table))]
    lines.append("")
    lines += [f"![{name}]({name})\n" for name in pictures]
    return "\n".join(lines)


def reading(table: dict) -> list[str]:
    """Say what n, ±, bold and parentheses mean in this table."""
    rows = table["rows"].values()
    sentences = []
    seeds = max(len(row["runs"]) for row in rows)
    if seeds > 1:
        sentences.append(
            "n is the number of seeds, ± the standard deviation over them (none where they agree); "
            "the standard error of a mean is ± / √n."
        )
        if not table["baseline"] and any(table["better"]):
            sentences.append("A bold value cannot be distinguished from the best.")
    elif rows_have_seeds(table):
        sentences.append("One seed: the spread between seeds is not known, so nothing is ranked.")
    if any(row["paper"] for row in rows):
        scale = f" at scale {table['paper_scale']}" if rows_have_seeds(table) else ""
        sentence = f"In parentheses the paper's value{scale}"
        if table["same_tokens"]:
            sentence += ", and our value minus it."
        else:
            sentence += ", of another tokenizer: a difference would mean nothing."
        sentences.append(sentence)
    return [*sentences, HOW_TO_READ]


def rows_have_seeds(table: dict) -> bool:
    """Whether the rows are of trained models; else they are computed from formulas."""
    return any(run["seed"] is not None for row in table["rows"].values() for run in row["runs"])


def difference_rows(table: dict, name: str, difference: dict) -> list[str]:
    """The mean difference from the baseline and, of several seeds, the difference of each."""
    rows = [markdown_row(table, f"`{name}`", difference, sign="+")]
    if len(difference["runs"]) > 1:
        for run in difference["runs"]:
            label = f"seed {run['seed']}"
            rows.append(markdown_row(table, label, summarise([run]), sign="+"))
    return rows


def markdown_row(
    table: dict, label: str, entry: dict, bold: Sequence[int] = (), sign: str = ""
) -> str:
    """A line of the table, with bold values in the columns `bold`."""
    cells = []
    for column in range(len(table["columns"])):
        cells.append(cell(table, entry, column, column in bold, sign))
    return f"| {label} | {len(entry['runs'])} | {' | '.join(cells)} |"


def cell(table: dict, entry: dict, column: int, bold: bool = False, sign: str = "") -> str:
    """Our value ± the standard deviation over seeds; in parentheses the paper's value.

    If both count the same tokens, our value minus the paper's follows.
    """
    value = entry["mean"][column]
    if value is None:
        return "–"
    digits = table["digits"]
    text = f"{value:{sign}z,.{digits}f}"
    if bold:
        text = f"**{text}**"
    if entry["deviation"][column]:  # None: a single seed
        text += f" ± {entry['deviation'][column]:.{digits}f}"
    if entry.get("paper") and entry["paper"][column] is not None:
        paper = entry["paper"][column]
        difference = f"; {value - paper:+.{digits}f}" if table["same_tokens"] else ""
        text += f" ({paper:.{digits}f}{difference})"
    return text
