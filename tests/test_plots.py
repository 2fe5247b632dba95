"""What the pictures of several commands have in common."""

import pytest

from scripts.common.plots import (
    add_legend,
    heat_maps,
    length_axis,
    one_panel,
    panels,
    row_style,
    save_picture,
    show_equal_curves,
)
from tests.helpers import not_blank


def test_twenty_rows_look_different():
    assert len({tuple(row_style(i).items()) for i in range(20)}) == 20


def test_a_saved_picture_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    figure, axes = one_panel()
    axes.plot([1, 2], [3, 4])
    save_picture(figure, tmp_path / "one.png")
    assert not_blank(tmp_path / "one.png")
    assert capsys.readouterr().out == "picture: one.png\n"


def test_the_lengths_are_the_ticks():
    figure, axes = one_panel()
    length_axis(axes, "length", [1024], [1024, 8192])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1,024", "8,192"]
    (line,) = axes.lines
    assert list(line.get_xdata()) == [1024, 1024] and line.get_linestyle() == ":"


def test_a_heat_map_has_a_number_where_something_was_measured():
    maps = {name: [[0.0, None], [0.256, 1.0]] for name in ("a", "b")}
    figure = heat_maps(maps, [16, 2048], ["10%", "90%"], "found (%)")
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["a", "b"]
    for axes in panels:
        assert [text.get_text() for text in axes.texts] == ["0", "26", "100"]
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["16", "2,048"]


@pytest.mark.parametrize(
    "suffix, start", [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")]
)
def test_a_picture_has_the_format_of_its_suffix(tmp_path, suffix, start):
    figure, axes = one_panel()
    axes.plot([1, 2], [3, 4])
    save_picture(figure, tmp_path / f"new/one.{suffix}")
    assert (tmp_path / f"new/one.{suffix}").read_bytes().startswith(start)


@pytest.mark.parametrize("count", [1, 2])
def test_a_legend_covers_no_curve(count):
    figure, all_axes = panels(count)
    for axes in all_axes:
        for i in range(12):
            axes.plot([1, 2], [i, i], label=f"lssar_p15  dynamic_ntk:8, theta 500000, {i}")
    add_legend(figure)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert not any(box.overlaps(axes.get_tightbbox()) for axes in all_axes)
    assert box.x1 <= figure.bbox.x1 and all(axes.bbox.width > 350 for axes in all_axes)


def test_equal_curves_are_all_seen():
    """The first of two equal ones is wider; others are left as they are."""
    _, axes = one_panel()
    for label, y in (("a", [1, 2, 3]), ("b", [1, 2, 3]), ("c", [1, 2, 9]), ("_band", [1, 2, 3])):
        axes.plot([1, 2, 3], y, label=label)
    usual = axes.lines[0].get_linewidth()
    show_equal_curves(axes)
    first, *others = axes.lines
    assert first.get_linewidth() > 2 * usual and first.get_alpha() < 1
    assert all(line.get_linewidth() == usual and line.get_alpha() is None for line in others)
