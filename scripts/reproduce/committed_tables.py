"""Committed tables beside a comparison's entries, if they come from the same experiment.

table.json records the conditions of its runs: the settings of the scale that affect what a run
learns, the fingerprint of the data (for recall, a hash of its sequences), and in which settings of
their training its entries differ from the scale. Committed rows are shown only if the first two are
the same, if neither their entries nor the new ones train in another way than the scale does, and if
each run was measured on the same tokens or number of answers.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from config import LEARNED, ROOT, Config, settings_in
from data.tasks import fingerprint_of
from errors import UserError
from runtime.checkpoint import settings_of
from runtime.files import read_json
from scripts.common.runner import identity
from scripts.common.tables import summarise
from scripts.reproduce.entries import FIRST_SEED, Entry, Scale
from scripts.reproduce.kinds import GAIN
from scripts.reproduce.measure import Experiment, up_to_16x

# How weights are trained, which the entries of a table may change.
TRAINING = (
    *(key for key in settings_in("optimisation") if key != "seed"),
    "init_from",
    "document_mask",
)
# Facts of a measurement that name its data; not compared here, as the conditions have its hashes.
COMPARED_BY_CONDITIONS = ("data_dir", "val_sha256", "tokenizer", "recall sequences")


def conditions(scale: Scale, entries: Sequence[Entry]) -> dict:
    """Return what decides whether the runs of two tables can be compared.

    Raises UserError if the scale's data are missing.
    """
    config = scale.config
    settings = settings_of(config)
    keys = [key for key in LEARNED if key not in ("seed", "data_dir")]
    return {
        "settings": {key: settings[key] for key in (*keys, "init_from")},
        "data": fingerprint_of(config),
        "differing": sorted({key for key, _, _ in training_changes(scale, entries)}),
    }


def training_changes(scale: Scale, entries: Sequence[Entry]) -> Iterator[tuple[str, Any, Entry]]:
    """Yield each setting of the training that an entry changes, its value, and the entry."""
    for entry in entries:
        with suppress(UserError):  # as a quarter of two heads, which is not trained either
            config = scale.run(entry, FIRST_SEED).config
            for key in TRAINING:
                value = getattr(config, key)
                if value != getattr(scale.config, key):
                    yield key, value, entry


def find(scale: Scale, experiment: Experiment) -> tuple[dict | None, str]:
    """Return the committed table of the scale to show, or a sentence on why there is none.

    Of several it is the one with most rows. The sentence is empty where nothing is committed.
    """
    if experiment.evaluation is None:
        return None, ""
    tables = []
    for file in (ROOT / "results" / scale.name).glob("*/table.json"):
        table = read_json(file)
        if table["unit"] == experiment.unit and table["multiples"] and "conditions" in table:
            folder = file.parent.relative_to(ROOT).as_posix()
            tables.append(table | {"folder": folder})
    sentence = ""
    for table in sorted(tables, key=lambda table: (-len(table["rows"]), table["folder"])):
        try:
            reason = difference(table, scale, experiment)
        except UserError as error:  # --plan needs no data
            reason = f"cannot be compared: {error}"
        if reason is None:
            return table, ""
        sentence = sentence or f"Not beside {table['folder']}, which {reason}."
    return None, sentence


def open_table(folder: str, scale: Scale, experiment: Experiment) -> dict:
    """Return the table in a folder. Raises UserError if it cannot be compared."""
    table = read_json(Path(folder, "table.json"))
    if table is None:
        raise UserError(f"--beside {folder}: there is no table.json")
    try:
        reason = difference(table, scale, experiment)
    except (LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"--beside {folder}: its table.json was not made by compare or reproduce: {error!r}"
        ) from error
    if reason is not None:
        raise UserError(f"--beside {folder} cannot be compared: it {reason}")
    return table | {"folder": folder}


def difference(table: dict, scale: Scale, experiment: Experiment) -> str | None:
    """Return what rules out a table, to follow "it": "was trained with p = 3"; None if nothing.

    Raises UserError if the scale's data are missing.
    """
    if experiment.evaluation is None:
        return f"is of {scale.config.task}, whose runs are compared by their last validation alone"
    if table["unit"] != experiment.unit:
        return f"has {table['unit']}, not {experiment.unit}"
    before = table.get("conditions")
    if before is None:
        return "does not record its settings and data"
    if before.get("differing"):
        return f"has entries that differ in {', '.join(before['differing'])}"
    now = conditions(scale, ())
    for key, value in now["settings"].items():
        other = before["settings"].get(key, getattr(Config, key))  # of a setting that came later
        if other != value:
            return f"was trained with {key} = {other!r}, not {value!r}"
    for name, value in now["data"].items():
        if name != "text" and before["data"].get(name) != value:  # not every folder has `text`
            return f"was trained on other {name}, by their hash"
    change = next(training_changes(scale, experiment.entries), None)
    if change is not None:
        key, value, entry = change
        expected = getattr(scale.config, key)
        return f"was trained with {key} = {expected!r}, not {value!r} as {entry.name}"
    evaluation = experiment.evaluation(scale.config)
    measured = identity(evaluation, evaluation.apply_to(scale.config))
    length = scale.config.block_size
    for row in table["rows"].values():
        for run in row["runs"]:
            if run["evaluation"].get("trained_length", length) != length:
                return "has runs of several training lengths"
            for key, value in measured.items():
                other = run["evaluation"].get(key)
                if key not in COMPARED_BY_CONDITIONS and other != value:
                    return f"was measured with {key} = {other!r}, not {value!r}"
    return None


def with_columns(committed: dict, table: dict) -> dict:
    """Return the committed rows that have no namesake in a table, with its columns.

    A gain from context at another multiple of the training length is left out.
    """
    same_longest = committed["multiples"][-1] == table["multiples"][-1]
    columns = [without_remark(column) for column in committed["columns"]]
    rows = {}
    for name, row in committed["rows"].items():
        if name in table["rows"]:
            continue
        runs = []
        for run in row["runs"]:
            value_of = dict(zip(columns, run["values"], strict=True))
            if not same_longest:
                value_of.pop(GAIN, None)
            values = [value_of.get(without_remark(column)) for column in table["columns"]]
            runs.append(run | {"values": values})
        rows[name] = summarise(runs)
    return {"folder": committed["folder"], "rows": rows}


def without_remark(column: str) -> str:
    """Return a column's name without "(available: ...)", which the gain from context may have."""
    return column.partition(" (")[0]


def standing(table: dict) -> list[str]:
    """Say of how many committed rows each entry's mean is above and below."""
    column = up_to_16x(table)
    folder = table["beside"]["folder"]
    means = [row["mean"][column] for row in table["beside"]["rows"].values()]
    others = [mean for mean in means if mean is not None]
    sentences = []
    for name, row in table["rows"].items():
        mean = row["mean"][column]
        if mean is not None and others:
            above = sum(mean > other for other in others)
            below = sum(mean < other for other in others)
            sentences.append(
                f"At {table['columns'][column]} `{name}` is above {above} and below {below} of the "
                f"{len(others)} rows of {folder} with a value there."
            )
    return sentences
