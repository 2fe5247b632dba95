"""Tables of results over seeds."""

import pytest

from runtime.files import read_json
from scripts.common.tables import best_entries, cell, summarise
from scripts.reproduce.pictures import control_losses, together
from scripts.reproduce.report import how_measured
from tests.runs import ROOT


def table_of(better="lower", **entries):
    """A table of one column: each entry's values by seed."""
    rows = {}
    for name, values in entries.items():
        rows[name] = summarise([{"values": [value]} for value in values])
    return {"rows": rows, "better": [better]}


def test_entries_that_tie_are_all_best():
    assert best_entries(table_of(a=[1.0, 1.2], b=[1.05, 1.3], c=[1.5, 1.6]), 0) == {"a", "b"}
    assert best_entries(table_of(a=[1.0, 1.02], b=[1.1, 1.13]), 0) == {"a"}
    # an entry that varies much ties with a better one that does not
    assert best_entries(table_of(a=[1.0, 1.02], b=[1.0, 1.9]), 0) == {"a", "b"}
    assert best_entries(table_of(a=[0.0, 0.0], b=[0.0, 0.0], c=[1.0, 1.0]), 0) == {"a", "b"}
    assert best_entries(table_of(a=[1.0], b=[2.0]), 0) == set()
    assert best_entries(table_of("higher", a=[1.0, 1.1], b=[2.0, 2.1]), 0) == {"b"}


@pytest.mark.parametrize("same_tokens, expected", [(True, " (3.00; -1.00)"), (False, " (3.00)")])
def test_no_difference_from_a_paper_with_another_tokenizer(same_tokens, expected):
    table = {"digits": 2, "same_tokens": same_tokens}
    several = summarise([{"values": [value]} for value in (1.0, 2.0, 3.0)]) | {"paper": [3.0]}
    assert cell(table, several, 0) == f"2.00 ± 1.00{expected}"
    single = summarise([{"values": [2.0]}]) | {"paper": [3.0]}
    assert cell(table, single, 0) == f"2.00{expected}"


def test_the_band_of_a_picture_is_the_standard_deviation():
    run = {"seed": 1, "evaluation": {}}
    row = summarise([run | {"values": [value]} for value in (1.0, 2.0, 6.0)]) | {"paper": None}
    table = {"scale": "tiny", "unit": "nats", "multiples": [1], "baseline": "", "rows": {"a": row}}
    figure = together(table)
    band, in_legend = figure.axes[0].collections
    (path,) = band.get_paths()
    low = 3 - 7**0.5
    high = 3 + 7**0.5
    assert {round(y, 6) for y in path.vertices[:, 1]} == {round(low, 6), round(high, 6)}
    assert in_legend.get_label() == "± standard deviation, n = 3"


def test_the_caption_names_commits_with_uncommitted_changes():
    environment = {"machine": "M", "torch": "2"}
    trained = environment | {"commit": "b" * 40, "modified": False}
    measured = environment | {"commit": "a" * 40, "modified": True}
    runs = [{"environment": trained, "evaluation": {"environment": measured}}]
    assert how_measured(runs) == "Measured on M; torch 2, commit bbbbbbb, aaaaaaa modified."


def test_controls_of_committed_tables_are_at_the_lengths_of_their_columns():
    """Some controls were measured at other lengths too."""
    table = read_json(ROOT / "results/tiny/league/table.json")
    for row in table["rows"].values():
        controls = [run["evaluation"]["control"] for run in row["runs"]]
        (trained,) = {run["evaluation"]["trained_length"] for run in row["runs"]}
        losses = control_losses(table, row["runs"])
        assert len(losses) == len(table["multiples"])
        for multiple, loss in zip(table["multiples"], losses, strict=True):
            place = [control["lengths"].index(trained * multiple) for control in controls]
            of_seeds = [c["loss"][i] for c, i in zip(controls, place, strict=True)]
            assert loss == pytest.approx(sum(of_seeds) / len(of_seeds))
