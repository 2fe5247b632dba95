"""Tables: aligned columns in a terminal, and results over seeds as JSON and Markdown.

A table of results is a dict, saved as table.json:

    title, columns, digits
    better      "lower" or "higher" for each column; None: the column is not ranked
    caption     sentences
    rows        name of an entry -> paper, mean, low and high, which are lists over columns, and
                runs: for each seed its values, folder, step, tokens, environment and evaluation.
                A value that means nothing is None.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from runtime.files import atomic_write, write_json

SIDES = ("mean", "low", "high")
# The entries of an evaluation that table.json has, besides text, numbers and the control.
LISTS = ("lengths", "loss", "environment")
# Facts of an evaluation that the caption mentions, if they are known.
MENTIONED = ("rope", "rope_theta", "tokens", "trials", "samples", "limit", "lm_eval")


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
    """The mean, lowest and highest value of every column over the runs of the seeds."""
    columns = list(zip(*(run["values"] for run in runs), strict=True))

    def over_seeds(summary: Callable) -> list[float | None]:
        return [None if None in values else summary(values) for values in columns]

    sides = {"mean": over_seeds(statistics.mean), "low": over_seeds(min), "high": over_seeds(max)}
    return sides | {"runs": runs}


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


def seed_sentences(table: dict, seeds: int) -> list[str]:
    """Sentences of the caption on the spread over so many seeds, and on the bold values."""
    ranked = any(table["better"])
    if seeds < 2:
        one = "One seed: the spread between seeds is not known, so nothing is ranked."
        return [one] if ranked else []
    bold = (
        "Bold: the best value of a column, and every value that cannot be distinguished from it "
        "because the means differ by no more than the larger of the two ranges."
    )
    return ["± is half the range over seeds, where it is not 0.", *([bold] if ranked else [])]


def how_measured(runs: list[dict]) -> str:
    """A sentence of the caption on the machine, the options and the versions."""
    evaluations = [run["evaluation"] for run in runs]
    environments = [run["environment"] for run in runs] + [e["environment"] for e in evaluations]
    dtypes, machines = distinct(evaluations, "dtype"), distinct(environments, "machine")
    facts = [f"in {dtypes} on {machines}" if dtypes else f"on {machines}"]
    facts += [f"{key} {found}" for key in MENTIONED if (found := distinct(evaluations, key))]
    return (
        f"Measured {', '.join(facts)}; torch {distinct(environments, 'torch')}, commit "
        f"{distinct(environments, 'commit', 7)}."
    )


def distinct(items: list[dict], key: str, width: int | None = None) -> str:
    """The distinct values of a key, in order of appearance."""
    values = [item[key] for item in items if item.get(key) is not None]
    texts = (f"{value:,}" if isinstance(value, int) else str(value) for value in values)
    return ", ".join(dict.fromkeys(text[:width] for text in texts))


def ranged(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


# ---- files ----


def write(folder: Path, stem: str, table: dict, pictures: Sequence[str]) -> None:
    """Save a table of results as STEM.json and STEM.md, which shows the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {
        name: entry
        | {"runs": [run | {"evaluation": short(run["evaluation"])} for run in entry["runs"]]}
        for name, entry in table["rows"].items()
    }
    write_json(folder / f"{stem}.json", table | {"rows": rows})
    with atomic_write(folder / f"{stem}.md", "w") as file:
        file.write(markdown(table, pictures))


def short(evaluation: dict) -> dict:
    """An evaluation without its long entries, such as the loss at every position."""
    found = {k: v for k, v in evaluation.items() if k in LISTS or not isinstance(v, (list, dict))}
    return found | ({"control": short(evaluation["control"])} if "control" in evaluation else {})


def markdown(table: dict, pictures: Sequence[str]) -> str:
    columns = table["columns"]
    best = [best_entries(table, column) for column in range(len(columns))]
    lines = [f"# {table['title']}, scale {table['scale']}", ""]
    lines += ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, entry in table["rows"].items():
        cells = (cell(table, entry, i, name in names) for i, names in enumerate(best))
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    lines += ["", *(f"- {sentence}" for sentence in table["caption"]), ""]
    return "\n".join(lines + [f"![{name}]({name})\n" for name in pictures])


def cell(table: dict, entry: dict, column: int, bold: bool) -> str:
    """Our value, half the range over seeds; in parentheses the paper's value and ours minus it."""
    digits, value = table["digits"], entry["mean"][column]
    if value is None:
        return "–"
    paper = entry["paper"] and entry["paper"][column]
    text = f"**{value:,.{digits}f}**" if bold else f"{value:,.{digits}f}"
    if width := spread(entry, column):
        text += f" ± {width / 2:.{digits}f}"
    return text if paper is None else f"{text} ({paper:.{digits}f}; {value - paper:+.{digits}f})"
