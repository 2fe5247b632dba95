"""Tables: aligned columns in a terminal, and results over seeds as JSON, Markdown, CSV and LaTeX.

A table of results is a dict, as table.json has it:

    title, columns, paper_columns, better ("lower", "higher"; None: not ranked), digits
    compare     "difference" or "ratio", of ours and the paper's
    caption     sentences
    rows        {row: {paper, mean, low, high, compared: lists over columns, or null; compared is
                {"ours": ..., "paper": ...} for a ratio; runs: one for each seed, with its values,
                folder, step, tokens, environment and evaluation}}
"""

import csv
import io
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from runtime.files import atomic_write, write_json

SIDES = ("mean", "low", "high")
# Keys of an evaluation that are too long for table.json.
LONG = ("parts", "loss_by_position", "groups", "heads", "keys", "rows", "curves", "positive",
        "distances", "dead_rows", "dead_keys")  # fmt: skip
# Keys of an evaluation that a caption mentions where present.
HOW = ("tokens", "trials", "samples", "limit", "lm_eval", "shape", "rounds")
# Characters that LaTeX reads as commands.
ESCAPED = str.maketrans({character: f"\\{character}" for character in "&%$#_{}"})


def print_table(
    rows: Sequence[Sequence[str]], left: int = 1, width: int = 0, remarks: Sequence[str] = ()
) -> None:
    """Print aligned columns.

    The first `left` are flush left, the rest flush right and at least `width` wide. `remarks` are
    printed after the first rows.
    """
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    for i, row in enumerate(rows):
        cells = [cell.ljust(w) for cell, w in zip(row[:left], widths[:left], strict=True)]
        cells += [
            cell.rjust(max(w, width)) for cell, w in zip(row[left:], widths[left:], strict=True)
        ]
        print(("".join(cells) + (f"   {remarks[i]}" if i < len(remarks) else "")).rstrip())


# ---- results over seeds ----


def summarise(runs: list[dict]) -> dict:
    """Mean, lowest and highest value of every column over the seeds' runs."""
    columns = list(zip(*(run["values"] for run in runs), strict=True))
    return {
        "mean": [statistics.mean(values) for values in columns],
        "low": [min(values) for values in columns],
        "high": [max(values) for values in columns],
        "runs": runs,
    }


def spread(row: dict, column: int) -> float | None:
    """The range over seeds; None for a single one."""
    return row["high"][column] - row["low"][column] if len(row["runs"]) > 1 else None


def best_rows(table: dict, column: int) -> set[str]:
    """The best row of a column and all rows that cannot be distinguished from it.

    Two rows are distinguishable if their means differ by more than the larger of their ranges over
    seeds; rows of a single seed cannot be compared at all.
    """
    means = {name: row["mean"][column] for name, row in table["rows"].items()}
    spreads = {name: spread(row, column) for name, row in table["rows"].items()}
    known = {name: width for name, width in spreads.items() if width is not None}
    if not known or table["better"][column] is None:
        return set()
    pick = min if table["better"][column] == "lower" else max
    best = pick(known, key=means.__getitem__)
    return {
        name
        for name, width in known.items()
        if name == best or abs(means[name] - means[best]) <= max(width, known[best])
    }


def seed_sentences(table: dict, seeds: Sequence[int]) -> list[str]:
    """Sentences of a caption on the spread over seeds, and on what is bold because of it."""
    last = max((i for i, better in enumerate(table["better"]) if better), default=0)
    if len(seeds) == 1 and table["better"][last]:
        return ["One seed: the spread between seeds is not known, so nothing is ranked."]
    if len(seeds) < 2:
        return []
    rows, digits = table["rows"], table["digits"]
    columns = range(len(table["columns"]))
    widest = [max(spread(row, i) or 0 for row in rows.values()) for i in columns]
    sentences = [
        "± is half the range over seeds, where it is not 0; the widest range of each column: "
        + ", ".join(f"{width:.{digits}f}" for width in widest) + "."
    ]  # fmt: skip
    if any(len(row["runs"]) == 1 for row in rows.values()):
        sentences.append("Rows of a single seed are not compared.")
    if best := best_rows(table, last):
        names = ", ".join(f"`{name}`" for name in rows if name in best)
        sentences.append(
            "Bold: the best of a column and every row that cannot be told from it, because the "
            "means differ by no more than the larger of the two rows' ranges. In "
            f"the column {table['columns'][last]}: {names}."
        )
    return sentences


def how_measured(runs: list[dict]) -> str:
    """A sentence of a caption on how the runs were measured, with which versions."""
    evaluations = [run["evaluation"] for run in runs]
    environments = [run["environment"] for run in runs] + [e["environment"] for e in evaluations]
    facts = [f"on {distinct_values(environments, 'machine')}"]
    if dtypes := distinct_values(evaluations, "dtype").replace("None", ""):
        facts = [f"in {dtypes} {facts[0]}"]
    if scaling := distinct_values(evaluations, "rope").replace("None", ""):
        facts.append(f"RoPE scaling {scaling}")
    if theta := distinct_values(evaluations, "rope_theta").replace("None", ""):
        facts.append(f"RoPE base {theta}")
    for key in HOW:
        if values := distinct_values(evaluations, key).replace("None", ""):
            facts.append(f"{key} {values}")
    return (
        f"Measured {', '.join(facts)}; torch {distinct_values(environments, 'torch')}, commit "
        f"{distinct_values(environments, 'commit', 7)}."
    )


def ranged(values: Iterable[int]) -> str:
    numbers = list(values)
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def distinct_values(items: list[dict], key: str, width: int | None = None) -> str:
    """The distinct values of a key, in order of appearance."""
    texts = (f"{v:,}" if isinstance(v := item.get(key), int) else str(v) for item in items)
    return ", ".join(dict.fromkeys(text[:width] for text in texts))


# ---- files ----


def write(folder: Path, stem: str, table: dict, pictures: Sequence[str]) -> None:
    """Save a table of results as STEM.json, .md, .csv and .tex; Markdown shows the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{stem}.json", without(table, LONG))
    for suffix, text in (
        ("md", markdown(table, pictures)), ("csv", spreadsheet(table)), ("tex", latex(table)),
    ):  # fmt: skip
        with atomic_write(folder / f"{stem}.{suffix}", "w") as file:
            file.write(text)


def without(value: Any, keys: tuple[str, ...]) -> Any:
    """A copy of nested dicts and lists, without these keys in each `evaluation`."""
    if isinstance(value, list):
        return [without(item, keys) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: without(item, keys) for key, item in value.items()}
    for name in {"evaluation", "control"} & kept.keys():
        kept[name] = {k: v for k, v in kept[name].items() if k not in keys}
    return kept


def title(table: dict) -> str:
    return table["title"] + (f", scale {table['scale']}" if "scale" in table else "")


def markdown(table: dict, pictures: Sequence[str]) -> str:
    heads = headings(table)
    lines = [f"# {title(table)}", ""]
    lines += ["| row | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name, cells in printed_rows(table, "**{}**".format):
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    lines += ["", *(f"- {sentence}" for sentence in table["caption"]), ""]
    return "\n".join(lines + [f"![{name}]({name})\n" for name in pictures])


def latex(table: dict) -> str:
    """A tabular with the rules of booktabs; the caption is in comments."""
    lines = [
        f"% {line}" for line in (title(table), *table["caption"], r"needs \usepackage{booktabs}")
    ]
    lines += [rf"\begin{{tabular}}{{l{'r' * len(table['columns'])}}}", r"\toprule"]
    lines += [" & ".join(["", *(head.translate(ESCAPED) for head in headings(table))]) + r" \\"]
    lines += [r"\midrule"]
    for name, cells in printed_rows(table, r"\textbf{{{}}}".format):
        marked = (cell.replace("±", r"$\pm$").replace("-", "$-$") for cell in cells)
        lines.append(" & ".join([rf"\texttt{{{name.translate(ESCAPED)}}}", *marked]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def spreadsheet(table: dict) -> str:
    """CSV with every digit: each column's mean, its range over seeds, and the paper's value."""
    rows, many = table["rows"], any(len(row["runs"]) > 1 for row in table["rows"].values())
    paper = any(row["paper"] for row in rows.values())
    kinds = ["mean", *(["low", "high"] if many else []), *(["paper"] if paper else [])]
    text = io.StringIO()
    sheet = csv.writer(text, lineterminator="\n")
    heads = [f"{name} {kind}".removesuffix(" mean") for name in table["columns"] for kind in kinds]
    sheet.writerow(["row", "runs", *heads])
    for name, row in rows.items():
        columns = zip(*(row[kind] or [None] * len(table["columns"]) for kind in kinds), strict=True)
        sheet.writerow([name, len(row["runs"]), *itertools.chain(*columns)])
    return text.getvalue()


def headings(table: dict) -> list[str]:
    """The columns, each with the paper's own name for it where that is another."""
    return [
        ours if paper is None or ours.endswith(paper) else f"{ours} (paper {paper})"
        for ours, paper in zip(table["columns"], table["paper_columns"], strict=True)
    ]


def printed_rows(table: dict, bold: Callable[[str], str]) -> Iterator[tuple[str, list[str]]]:
    """Each row's name and printed cells; `bold` marks the best values of a column."""
    columns = range(len(table["columns"]))
    best = [best_rows(table, column) for column in columns]
    for name, row in table["rows"].items():
        marks = [bold if name in best[column] else str for column in columns]
        yield name, [cell(table, row, column, marks[column]) for column in columns]


def cell(table: dict, row: dict, column: int, mark: Callable[[str], str]) -> str:
    """Our value, half the range over seeds, and in parentheses the paper's value and comparison."""
    digits = table["digits"]
    text = mark(f"{row['mean'][column]:,.{digits}f}")
    if width := spread(row, column):
        text += f" ± {width / 2:.{digits}f}"
    paper = row["paper"] and row["paper"][column]
    if table["compare"] == "ratio":
        text += f", {row['compared']['ours'][column]:.2f}x"
        if paper is not None:
            text += f" ({paper:.{digits}f}, {row['compared']['paper'][column]:.2f}x)"
    elif paper is not None:
        text += f" ({paper:.{digits}f}; {row['compared'][column]:+.{digits}f})"
    return text
