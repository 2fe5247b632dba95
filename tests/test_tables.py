"""Tables of results over seeds."""

import math

import pytest

from runtime.files import read_json
from scripts.common.labels import rope_by_label, title_of
from scripts.common.plots import STYLES
from scripts.common.tables import best_entries, cell, markdown, summarise
from scripts.reproduce.pictures import control_losses, together
from scripts.reproduce.report import how_measured
from scripts.reproduce.tables import EXPERIMENTS
from tests.runs import ROOT


def row_of(values, **more):
    """A row of one column, from its values by seed."""
    runs = []
    for value in values:
        runs.append({"seed": 1, "evaluation": {}, "values": [value]})
    return summarise(runs) | more


def best(better="lower", **entries):
    """The best of these entries: each has its values by seed."""
    rows = {name: row_of(values) for name, values in entries.items()}
    table = {"rows": rows, "better": [better], "digits": 2}
    return best_entries(table, column=0)


def test_entries_that_tie_are_all_best():
    assert best(a=[1.0, 1.2], b=[1.05, 1.3], c=[1.5, 1.6]) == {"a", "b"}
    assert best(a=[1.0, 1.02], b=[1.1, 1.13]) == {"a"}
    # an entry that varies much ties with a better one that does not
    assert best(a=[1.0, 1.02], b=[1.0, 1.9]) == {"a", "b"}
    assert best(a=[0.0, 0.0], b=[0.0, 0.0], c=[1.0, 1.0]) == {"a", "b"}
    # what the table rounds alike ties
    assert best(a=[1.003, 1.003], b=[1.004, 1.004], c=[1.006, 1.006]) == {"a", "b"}
    assert best(a=[1.0], b=[2.0]) == set()
    assert best("higher", a=[1.0, 1.1], b=[2.0, 2.1]) == {"b"}


def test_a_value_that_is_not_finite_leaves_its_column_empty():
    for value in (math.nan, math.inf):
        row = row_of([1.0, value])
        assert row["mean"] == row["high"] == row["deviation"] == [None]
    assert best(a=[1.0, math.nan], b=[2.0, 2.1]) == {"b"}


@pytest.mark.parametrize("same_tokens, expected", [(True, " (3.00; -1.00)"), (False, " (3.00)")])
def test_no_difference_from_a_paper_with_another_tokenizer(same_tokens, expected):
    table = {"digits": 2, "same_tokens": same_tokens}
    several = row_of([1.0, 2.0, 3.0], paper=[3.0])
    assert cell(table, several, 0) == f"2.00 ± 1.00{expected}"
    single = row_of([2.0], paper=[3.0])
    assert cell(table, single, 0) == f"2.00{expected}"


def table_of(rows):
    """A table of one length without a baseline."""
    return {
        "title": "A table",
        "scale": "tiny",
        "unit": "nats",
        "multiples": [1],
        "columns": ["1x, 16"],
        "better": ["lower"],
        "digits": 2,
        "baseline": "",
        "rows": rows,
        "caption": [],
    }


def test_no_heading_of_differences_without_a_row():
    first = row_of([1.0], paper=None)
    alone = table_of({"a": first}) | {"baseline": "a"}
    assert "Minus" not in markdown(alone, [])
    other = row_of([2.0], paper=None, difference=row_of([1.0]))
    both = table_of({"a": first, "b": other}) | {"baseline": "a"}
    assert "Minus `a`, with the same seed:" in markdown(both, [])


def test_more_entries_than_line_styles_have_a_panel_for_each_config():
    values = [f"learning_rate={i}" for i in range(STYLES // 2)]
    names = ["a:yarn"]
    for config in "ab":
        names += [config, *(f"{config},{value}" for value in values)]
    rows = {name: row_of([1.0], paper=None) for name in names}
    panels = together(table_of(rows)).axes
    assert [axes.get_title() for axes in panels] == ["a", "b"]
    curves = [line.get_label() for line in panels[0].lines]
    assert curves == ["yarn", "a", *values]
    # a config that is in no other entry needs no panel of its own
    rows = {f"config{i}": row_of([1.0], paper=None) for i in range(STYLES + 1)}
    assert len(together(table_of(rows)).axes) == 1


def test_entries_of_the_panels_of_an_experiment_are_called_alike():
    """So that the legend has each once."""
    table = read_json(ROOT / "results/tiny_muon/norm_and_pairs/table.json")
    panels = EXPERIMENTS["norm_and_pairs"].draw(table).axes
    assert len(panels) == 6
    for axes in panels:
        labels = {line.get_label() for line in axes.lines}
        assert {"all", "all:plain_rope", "qk_norm_half"} <= labels


def test_the_band_of_a_picture_is_the_standard_deviation():
    figure = together(table_of({"a": row_of([1.0, 2.0, 6.0], paper=None)}))
    band, in_legend = figure.axes[0].collections
    (path,) = band.get_paths()
    low = 3 - 7**0.5
    high = 3 + 7**0.5
    edges = {round(y, 6) for y in path.vertices[:, 1]}
    assert edges == {round(low, 6), round(high, 6)}
    assert in_legend.get_label() == "± standard deviation, n = 3"


def test_the_caption_names_commits_with_uncommitted_changes():
    environment = {"machine": "M", "torch": "2"}
    trained = environment | {"commit": "b" * 40, "modified": False}
    measured = environment | {"commit": "a" * 40, "modified": True}
    run = {
        "environment": trained,
        "evaluation": {"environment": measured},
    }
    caption = how_measured({"softmax": {"runs": [run]}})
    assert caption == "Measured on M; torch 2, commit bbbbbbb, aaaaaaa modified."


def test_the_caption_names_the_rope_of_rows_whose_names_do_not():
    rows = {}
    for name, rope in {
        "softmax": "dynamic_ntk",
        "softmax:yarn": "yarn",
        "hybrid": "none",
        "ssmax": "dynamic_ntk",
        "swa": "none",
        "lssa": "dynamic_ntk",
    }.items():
        rows[name] = {"runs": [{"evaluation": {"rope": rope}}]}
    assert "on , rope dynamic_ntk, but none in `hybrid`, `swa`;" in how_measured(rows)
    assert rope_by_label({"softmax": "yarn"}) == "rope yarn"
    results = {name: row["runs"][0]["evaluation"] | {"p": 15.0} for name, row in rows.items()}
    title = "rope dynamic_ntk, but none in `hybrid`, `swa`, but yarn in `softmax:yarn`, p 15"
    assert title_of(results) == title


def test_controls_of_committed_tables_are_at_the_lengths_of_their_columns():
    """Some controls were measured at other lengths too."""
    table = read_json(ROOT / "results/tiny/league/table.json")
    for row in table["rows"].values():
        losses = control_losses(table, row["runs"])
        assert len(losses) == len(table["multiples"])
        evaluations = [run["evaluation"] for run in row["runs"]]
        (trained,) = {evaluation["trained_length"] for evaluation in evaluations}
        for multiple, loss in zip(table["multiples"], losses, strict=True):
            of_seeds = []
            for evaluation in evaluations:
                control = evaluation["control"]
                column = control["lengths"].index(trained * multiple)
                of_seeds.append(control["loss"][column])
            mean = sum(of_seeds) / len(of_seeds)
            assert loss == pytest.approx(mean)
