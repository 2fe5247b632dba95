"""Tables of results over seeds."""

from scripts.common.tables import best_entries, summarise
from scripts.reproduce.report import how_measured


def table_of(**seeds):
    """A table of one column: the values of each entry's seeds."""
    rows = {name: summarise([{"values": [x]} for x in values]) for name, values in seeds.items()}
    return {"rows": rows, "better": ["lower"]}


def test_entries_that_the_seeds_cannot_tell_apart_are_not_ranked():
    assert best_entries(table_of(a=[1.0, 1.2], b=[1.05, 1.3], c=[1.5, 1.6]), 0) == {"a", "b"}
    assert best_entries(table_of(a=[1.0, 1.02], b=[1.1, 1.13]), 0) == {"a"}
    # an entry that varies much cannot be told from a better one that does not
    assert best_entries(table_of(a=[1.0, 1.02], b=[1.0, 1.9]), 0) == {"a", "b"}
    assert best_entries(table_of(a=[0.0, 0.0], b=[0.0, 0.0], c=[1.0, 1.0]), 0) == {"a", "b"}
    assert best_entries(table_of(a=[1.0], b=[2.0]), 0) == set()
    higher = table_of(a=[1.0, 1.1], b=[2.0, 2.1]) | {"better": ["higher"]}
    assert best_entries(higher, 0) == {"b"}


def test_the_caption_names_commits_with_uncommitted_changes():
    def made(commit, modified):
        return {"machine": "M", "torch": "2", "commit": commit * 40, "modified": modified}

    runs = [{"evaluation": {"environment": made("a", True)}, "environment": made("b", False)}]
    assert how_measured(runs) == "Measured on M; torch 2, commit bbbbbbb, aaaaaaa modified."
