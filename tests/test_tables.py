"""Tables of results over seeds."""

import json

from scripts.common.tables import best_rows, summarise, write


def table_of(**seeds):
    """A table of one column: the values of each row's seeds."""
    evaluation = {"loss": [1.0], "parts": {}, "control": {"window": 16, "keys": [2]}}
    made = {
        name: summarise([{"values": [value], "evaluation": evaluation} for value in values])
        for name, values in seeds.items()
    }
    return {"rows": made, "better": ["lower"]}


def test_rows_that_the_seeds_cannot_tell_apart_are_not_ranked():
    assert best_rows(table_of(a=[1.0, 1.2], b=[1.05, 1.3], c=[1.5, 1.6]), 0) == {"a", "b"}
    assert best_rows(table_of(a=[1.0, 1.02], b=[1.1, 1.13]), 0) == {"a"}
    # a row that varies much cannot be told from a better one that does not
    assert best_rows(table_of(a=[1.0, 1.02], b=[1.0, 1.9]), 0) == {"a", "b"}
    assert best_rows(table_of(a=[0.0, 0.0], b=[0.0, 0.0], c=[1.0, 1.0]), 0) == {"a", "b"}
    assert best_rows(table_of(a=[1.0], b=[2.0]), 0) == set()
    higher = table_of(a=[1.0, 1.1], b=[2.0, 2.1]) | {"better": ["higher"]}
    assert best_rows(higher, 0) == {"b"}


def test_the_files_of_a_table_say_the_same(tmp_path):
    table = table_of(lssar_p3=[1.0, 1.5], softmax=[3.0, 3.5]) | {
        "title": "Losses", "columns": ["1x, 128"], "paper_columns": ["1,024"], "digits": 2,
        "caption": ["By hand."],
    }  # fmt: skip
    for row, paper in (("lssar_p3", [2.0]), ("softmax", None)):
        table["rows"][row]["paper"] = paper
    write(tmp_path / "new", "t", table, ["t.png"])
    markdown = (tmp_path / "new/t.md").read_text().splitlines()
    assert markdown[:2] == ["# Losses", ""] and markdown[-1] == "![t.png](t.png)"
    assert markdown[2:6] == [
        "| row | 1x, 128 (paper 1,024) |",
        "|---|---|",
        "| `lssar_p3` | **1.25** ± 0.25 (2.00; -0.75) |",
        "| `softmax` | 3.25 ± 0.25 |",
    ]
    saved = json.loads((tmp_path / "new/t.json").read_text())["rows"]["softmax"]
    assert saved["high"] == [3.5]
    evaluation = {"loss": [1.0], "control": {"window": 16}}  # without what is long
    assert saved["runs"][0] == {"values": [3.0], "evaluation": evaluation}
