"""Tables of results over seeds."""

from scripts.common.tables import best_entries, summarise
from scripts.reproduce.report import how_measured


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


def test_the_caption_names_commits_with_uncommitted_changes():
    environment = {"machine": "M", "torch": "2"}
    trained = environment | {"commit": "b" * 40, "modified": False}
    measured = environment | {"commit": "a" * 40, "modified": True}
    runs = [{"environment": trained, "evaluation": {"environment": measured}}]
    assert how_measured(runs) == "Measured on M; torch 2, commit bbbbbbb, aaaaaaa modified."
