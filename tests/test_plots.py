"""What the pictures of several commands have in common."""

import pytest

from scripts.common.plots import Curve, draw_curves, save_picture
from tests.helpers import not_blank


def test_a_saved_picture_has_the_format_of_its_suffix(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    figure = draw_curves({"": [Curve("a", [1, 2], [3, 4])]}, "x", "y")
    for name, start in (("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")):
        save_picture(figure, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
        assert capsys.readouterr().out == f"picture: {name}\n"
    assert not_blank(tmp_path / "a.png")


@pytest.mark.parametrize("panels, count, label", [(1, 2, "a"), (1, 9, "b" * 40), (3, 43, "c" * 25)])
def test_a_legend_takes_a_fifth_of_the_picture_at_most(tmp_path, panels, count, label):
    curves = [Curve(f"{label} {i}", [1, 2], [i, i]) for i in range(count)]
    curves.append(Curve(f"{label} 0", [1, 2], [0, 1], thin=True))
    figure = draw_curves({str(i): curves for i in range(panels)}, "x", "y", thin="thin: a window")
    save_picture(figure, tmp_path / "a.png")
    (legend,) = figure.legends
    box, whole = legend.get_window_extent(), figure.bbox
    assert len(legend.get_texts()) == count + 1
    assert 0 <= box.x0 and box.x1 <= whole.width and box.height < whole.height / 5
