"""The pictures of the tables."""

from runtime.files import write_json
from scripts.common.tables import summarise
from scripts.reproduce import report


def test_the_scales_of_figure_a2_side_by_side(tmp_path):
    """Of this table and of those of the other scales beside it; none where it would be alone."""
    rows = {"softmax": [3.0, 4.0], "lssar_p15": [3.0, 3.1]}
    table = {
        "name": "loss_by_length",
        "scale": "45m",
        "unit": "loss",
        "multiples": [1, 2],
        "rows": {
            name: summarise([{"values": values, "evaluation": {}}]) for name, values in rows.items()
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


def test_variants_with_another_p_are_drawn_where_theirs_are(monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "grouped", lambda table, groups: drawn.append(groups) or {})
    monkeypatch.setattr(report, "positions", lambda table: {})
    names = ["softmax", "lssa", "lssar_p2.5", "lssar_p15", "fox"]
    table = {
        "name": "league",
        "scale": "tiny",
        "unit": "loss",
        "multiples": [1, 2],
        "columns": ["1x", "2x"],
        "rows": {name: summarise([{"values": [1.0, 2.0], "evaluation": {}}]) for name in names},
    }
    report.components(table)
    report.league(table, {"ours": ("softmax", "lssar_p15"), "others": ("softmax", "fox")})
    assert drawn[0] == {
        "not re-weighted": {name: name for name in ("softmax", "lssa", "fox")},
        "re-weighted, p = 2.5": {"lssar_p2.5": "lssar"},
        "re-weighted, p = 15": {"lssar_p15": "lssar"},
    }
    assert [list(panel) for panel in drawn[1].values()] == [
        ["softmax", "lssar_p2.5", "lssar_p15"], ["softmax", "fox"],
    ]  # fmt: skip
    (figure,) = report.loss_over_p(table).values()
    assert figure.axes[0].get_lines()[0].get_xdata().tolist() == [2.5, 15]
