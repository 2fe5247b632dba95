"""What a table says of its rows."""

from runtime.files import write_json
from scripts.reproduce import report


def table_of(**seeds):
    """A table of one column: the values of each row's seeds."""
    made = {
        name: report.summarise([{"values": [value]} for value in values])
        for name, values in seeds.items()
    }
    return {"rows": made, "better": ["lower"]}


def test_rows_that_the_seeds_cannot_tell_apart_are_not_ranked():
    assert report.best_rows(table_of(a=[1.0, 1.2], b=[1.05, 1.3], c=[1.5, 1.6]), 0) == {"a", "b"}
    assert report.best_rows(table_of(a=[1.0, 1.02], b=[1.1, 1.13]), 0) == {"a"}
    # a row that varies much cannot be told from a better one that does not
    assert report.best_rows(table_of(a=[1.0, 1.02], b=[1.0, 1.9]), 0) == {"a", "b"}
    assert report.best_rows(table_of(a=[0.0, 0.0], b=[0.0, 0.0], c=[1.0, 1.0]), 0) == {"a", "b"}
    assert report.best_rows(table_of(a=[1.0], b=[2.0]), 0) == set()
    higher = table_of(a=[1.0, 1.1], b=[2.0, 2.1]) | {"better": ["higher"]}
    assert report.best_rows(higher, 0) == {"b"}


def test_the_scales_of_figure_a2_side_by_side(tmp_path):
    """Of this table and of those of the other scales beside it; none where it would be alone."""
    rows = {"softmax": [3.0, 4.0], "lssar_p15": [3.0, 3.1]}
    table = {
        "name": "loss_by_length",
        "scale": "45m",
        "unit": "loss",
        "multiples": [1, 2],
        "rows": {
            name: report.summarise([{"values": values, "evaluation": {}}])
            for name, values in rows.items()
        },
    }
    scales = ("45m", "124m_edu", "355m")
    folder = tmp_path / "45m/loss_by_length"
    assert report.beside(folder, table, scales) == {}
    for scale in ("355m", "tiny"):
        (tmp_path / scale / "loss_by_length").mkdir(parents=True)
        write_json(tmp_path / scale / "loss_by_length/table.json", {**table, "scale": scale})
    (figure,) = report.beside(folder, table, scales).values()
    assert [axes.get_title() for axes in figure.axes] == ["45m", "355m"]
    assert [line.get_ydata().tolist() for line in figure.axes[1].lines] == list(rows.values())
    assert report.beside(tmp_path / "tiny/loss_by_length", table, ()) == {}
