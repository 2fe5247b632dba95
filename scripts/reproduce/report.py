"""Our table beside the paper's: its training and measurement, its entries, columns and caption.

A table has the keys of scripts.common.tables, and

    name, scale, paper_scale, unit
    multiples   of the training length, the first columns; null where columns are no lengths
    not_run     names of entries
    failures    sentences
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from errors import UserError
from runtime.files import check_writable
from scripts.common.options import Parser
from scripts.common.papers import TRAINED_LENGTH
from scripts.common.planned import check, cost, price, stop_on_signals, train, with_bases
from scripts.common.plots import save_picture
from scripts.common.tables import paired, spread, summarise, write
from scripts.reproduce.entries import FIRST_SEED, Scale
from scripts.reproduce.measure import Experiment, Work, at
from scripts.reproduce.tables import EXPERIMENTS, GAIN, HEADROOM, available

# Facts of an evaluation that the caption mentions, if they are known.
MENTIONED = ("rope", "rope_theta", "tokens", "trials", "samples", "limit", "lm_eval")
HOW_TO_READ = "How to read the columns, ± and bold: docs/evaluations.md, A table of the papers."


def work_parser(name: str, doc: str, epilog: str) -> Parser:
    """A parser with the options of scripts.reproduce and scripts.compare."""
    parser = Parser(
        prog=f"python -m {name}", description=doc.split("\n\n")[0], epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--scale", required=True, help="124m (the papers'), a file in configs/scales, or a FILE.py")
    add("--seeds", type=int, default=1, help=f"of each entry, from {FIRST_SEED} on (1)")
    add("--out", default="out", metavar="DIR", help="where runs are (%(default)s)")
    add("--results", default="out/results", metavar="DIR", help="where tables go (%(default)s)")
    add("--again", action="store_true", help="measure again what has been measured")
    add("--plan", action="store_true", help="print what it would cost, and stop")
    return parser


def carry_out(
    name: str, experiment: Experiment, scale: Scale, chosen: tuple[str, ...], options: Any
) -> None:
    """Print the cost; then train, measure, and write the table of this name and its pictures.

    `options` are those of `work_parser`; --plan prints the cost only. Exits with 1 where a run
    failed.
    """
    if options.seeds < 1:
        raise UserError(f"--seeds {options.seeds} must be at least 1")
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    folder = Path(options.results) / scale.name / name
    work = Work(name, experiment, scale, chosen, seeds, options.again)
    runs, evaluated = work.runs(), work.evaluated()
    check(with_bases(runs))
    for run in evaluated if not options.plan else ():  # a plan needs no data
        work.check(run)
    check_writable(folder)
    check_writable(scale.out)
    print(f"{experiment.title}, scale {scale.name}, {len(chosen)} entries")
    if runs:
        print(cost(runs))
    if options.plan:
        print(price(runs))
        return
    left = sum(work.again or not work.stored(run) for run in evaluated)
    print(f"to evaluate: {left} runs" if runs else "it takes no runs", flush=True)
    stop_on_signals()
    failures = train(runs) + work.measure()
    table = build_table(work, failures)
    drawn = experiment.draw(table)
    pictures = {f"{name}.png": drawn} if isinstance(drawn, Figure) else drawn
    for file, picture in pictures.items():
        save_picture(picture, folder / file)
    write(folder, table, list(pictures))
    print("\n" + (folder / "table.md").read_text())
    print(f"written: {folder}/table.md, table.json")
    if failures:
        sys.exit(1)


def build_table(work: Work, failures: list[str]) -> dict:
    """The table of all available runs with these seeds."""
    experiment, config, better = work.experiment, work.scale.config, work.experiment.better
    columns = experiment.columns(config) if callable(experiment.columns) else experiment.columns
    paper, paper_scale = paper_values(experiment, work.scale.name, columns)
    results = {name: runs for name in experiment.entries if (runs := work.results(name))}
    if not results:
        raise UserError("; ".join(failures) or "no run of the table is trained")
    rows = {name: summarise(runs) | {"paper": paper.get(name)} for name, runs in results.items()}
    baseline = experiment.baseline if experiment.baseline in rows else ""
    for entry in [entry for name, entry in rows.items() if baseline not in ("", name)]:
        if (difference := paired(entry, rows[baseline]))["runs"]:
            entry["difference"] = difference
    table = {
        "name": work.name,
        "title": experiment.title,
        "scale": work.scale.name,
        "paper_scale": paper_scale,
        "unit": experiment.unit,
        "columns": [c if isinstance(c, str) else f"{c:g}x, {at(c, config):,}" for c in columns],
        "multiples": [column for column in columns if not isinstance(column, str)] or None,
        "better": list(better) if isinstance(better, tuple) else [better] * len(columns),
        "digits": experiment.digits,
        "baseline": baseline,
        "rows": rows,
        "not_run": [name for name in experiment.entries if name not in results],
        "failures": failures,
    }
    worth = what_is_available(work, table)
    return table | {"caption": caption(table, work) + worth}


def what_is_available(work: Work, table: dict) -> list[str]:
    """Write what the longest length is worth beside the gain from context; returns sentences.

    None where the table has no gains, or the scale no runs of headroom. Where the seeds differ by
    more than a model could gain, and by more than it is hurt, whether it gains is undecidable.
    """
    if GAIN not in table["columns"]:
        return []
    longest, headroom = table["multiples"][-1], replace(work, experiment=EXPERIMENTS["headroom"])
    entries = {name: headroom.results(name) for name in HEADROOM[1:]}
    worth = available(entries, at(longest, work.scale.config))
    if not worth:
        return []
    mean, column = sum(worth) / len(worth), table["columns"].index(GAIN)
    table["columns"][column] = f"{GAIN} (available: {mean:+.4f})"
    gains = {n: (e["mean"][column] or 0, spread(e, column) or 0) for n, e in table["rows"].items()}
    wide = ", ".join(f"`{n}`" for n, (gain, range_) in gains.items() if range_ > max(mean, -gain))
    return [
        f"Available: what {longest:g}x is worth to a softmax that was trained on it (`reproduce "
        f"headroom`), by seed {', '.join(f'{one:+.4f}' for one in worth)}.",
        *([f"Undecidable here, as the gains of seeds differ by more: {wide}."] if wide else []),
    ]


def paper_values(experiment: Experiment, scale: str, columns: tuple) -> tuple[dict[str, list], str]:
    """The paper's values of these columns for each entry, and the scale they are for.

    A value is None where the paper has none; entries without any value are left out.
    """
    section = experiment.paper or {"rows": {}, "lengths": []}
    scales = section.get("scales") or {experiment.paper_scale: section["rows"]}
    values_of = scale if scale in scales else experiment.paper_scale
    keys = section.get("columns") or [length / TRAINED_LENGTH for length in section["lengths"]]
    known = {name: dict(zip(keys, row, strict=True)) for name, row in scales[values_of].items()}
    paper = {name: [values.get(key) for key in columns] for name, values in known.items()}
    return {name: values for name, values in paper.items() if set(values) != {None}}, values_of


def caption(table: dict, work: Work) -> list[str]:
    """Sentences on the measurement, on the spread over seeds, and on what is missing."""
    entries = table["rows"].values()
    runs = [run for entry in entries for run in entry["runs"]]
    seeds = sorted({run["seed"] for run in runs} - {None})
    sentences = [trained(table, work, seeds) if seeds else f"{table['unit']}."]
    if any(entry["paper"] for entry in entries):
        scale = f" at scale {table['paper_scale']}" if seeds else ""
        sentences.append(f"In parentheses the paper's value{scale}, and our value minus it.")
    sentences += [*([spread_sentence(table, len(seeds))] if seeds else []), how_measured(runs)]
    if len(seeds) > 1 and "curves" in runs[0]["evaluation"]:
        sentences.append(f"The picture is of seed {seeds[0]}.")
    sentences += [*filter(None, [work.experiment.note]), *work.experiment.remarks(table)]
    if table["not_run"]:
        sentences.append(f"Not run yet: {', '.join(f'`{name}`' for name in table['not_run'])}.")
    return [*sentences, HOW_TO_READ, *(f"{failure}." for failure in table["failures"])]


def trained(table: dict, work: Work, seeds: list[int]) -> str:
    """A sentence on the models and their training."""
    config = work.scale.config
    shapes = [work.scale.run(name, seeds[0]).config for name in table["rows"]]
    sizes = ("n_layer", "n_embd", "block_size")
    layers, wide, length = (ranged([getattr(c, key) for c in shapes]) for key in sizes)
    task, text = f"recall task {config.recall}", config.data_dir
    made = {"orbits": "simulated orbits", "recall": task, "language": text}
    source = made.get(config.task, f"{text} and {task} in turn")
    tokens = [run["tokens"] for entry in table["rows"].values() for run in entry["runs"]]
    counts = [len(entry["runs"]) for entry in table["rows"].values()]
    few = f"{ranged(counts)} of the " * (min(counts) < len(seeds))
    return (
        f"{table['unit']}; {layers} layers, {wide} wide, trained at length {length} for "
        f"{'at most ' * ('recall' in config.tasks)}{ranged(tokens)} tokens of {source}; "
        f"{f'mean over {few}seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}."
    )


def spread_sentence(table: dict, seeds: int) -> str:
    """A sentence of the caption: what ± and bold mean over so many seeds."""
    if seeds < 2:
        return "One seed: the spread between seeds is not known, so nothing is ranked."
    if table["baseline"]:
        return "± is the standard deviation over seeds, of differences too."
    return "± is half the range over seeds; a bold value cannot be distinguished from the best."


def how_measured(runs: list[dict]) -> str:
    """A sentence of the caption on the machine, the options and the versions."""
    evaluations = [run["evaluation"] for run in runs]
    made = [one["environment"] for one in (*runs, *evaluations) if one.get("environment")]
    dtypes, machines = distinct(evaluations, "dtype"), distinct(made, "machine")
    facts = [f"in {dtypes} on {machines}" if dtypes else f"on {machines}"]
    facts += [f"{key} {found}" for key in MENTIONED if (found := distinct(evaluations, key))]
    commits = (f"{e['commit'][:7]}{' modified' * e['modified']}" for e in made if e["commit"])
    return (
        f"Measured {', '.join(facts)}; torch {distinct(made, 'torch')}, commit "
        f"{', '.join(dict.fromkeys(commits))}."
    )


def distinct(items: list[dict], key: str) -> str:
    """The distinct values of a key, in order of appearance."""
    values = [item[key] for item in items if item.get(key) is not None]
    return ", ".join(dict.fromkeys(f"{v:,}" if isinstance(v, int) else str(v) for v in values))


def ranged(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
