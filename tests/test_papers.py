"""The papers' numbers, beside the configs that have them."""

import re
from pathlib import Path

import pytest

from config import Config
from scripts.common.papers import LSSAR, PAPERS
from scripts.reproduce import tables, training
from tests.helpers import CONFIGS, ROWS


@pytest.mark.parametrize("row", ROWS)
def test_first_line_of_every_config_has_the_papers_numbers(row):
    line, name = (CONFIGS / row).read_text().splitlines()[0], Path(row).stem
    if name.startswith("ssmax"):
        assert PAPERS["ssmax"] and not re.search(r"\d\.\d{3}", line)  # curves only
        return
    table = re.search(r"LSSAR Table (\w+)", line)[1].lower()
    section = LSSAR["table1" if table == "1" else f"table_{table}"]
    numbers = [float(number) for number in re.findall(r"\d+\.\d{3,}", line)]
    if table != "1":
        assert numbers.pop() == section["rows"]["softmax"][0]
    assert numbers == section["rows"][name]


def test_every_row_of_the_papers_has_a_config():
    for name, experiment in tables.EXPERIMENTS.items():
        for row in experiment.rows:
            assert training.find_row(row).file.is_file(), (name, row)
        if experiment.paper:
            scales = experiment.paper.get("scales", {"": experiment.paper.get("rows")})
            assert all(set(there) & set(experiment.rows) for there in scales.values()), name
    assert training.find_row("lssar_p5").changes(Config()) == {"p": 5.0}


def test_tables_that_the_papers_print_twice_agree():
    """Softmax, ReLU (Li et al.) and Sigmoid (Tab. A6) are in several tables."""
    losses = {}
    for key in ("table1", "table_a4", "table_a5", "table_a6"):
        for row, values in LSSAR[key]["rows"].items():
            assert losses.setdefault(row, values[0]) == values[0], (key, row)
    assert len(losses) == 26
