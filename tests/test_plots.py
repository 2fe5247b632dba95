"""What the pictures of several commands have in common."""

import pytest

from scripts.common.plots import Curve, draw_curves, heat_map, save_picture
from tests.helpers import not_blank


@pytest.mark.parametrize(
    "suffix, start", [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")]
)
def test_a_saved_picture_is_named_and_has_the_format_of_its_suffix(
    tmp_path, monkeypatch, capsys, suffix, start
):
    monkeypatch.chdir(tmp_path)
    save_picture(
        draw_curves({"": [Curve("a", [1, 2], [3, 4])]}, "x", "y"), tmp_path / f"a.{suffix}"
    )
    assert (tmp_path / f"a.{suffix}").read_bytes().startswith(start)
    assert suffix != "png" or not_blank(tmp_path / "a.png")
    assert capsys.readouterr().out == f"picture: a.{suffix}\n"


def test_a_heat_map_has_a_number_where_something_was_measured():
    figure = heat_map("a", {"10%": [0.0, None], "90%": [0.256, 1.0]}, ["16", "2,048"], "found (%)")
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["0", "26", "100"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["16", "2,048"]
