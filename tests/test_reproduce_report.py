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
