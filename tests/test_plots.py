"""What the pictures of several commands have in common."""

from scripts.common.plots import heat_maps, length_axis, one_panel, row_style, save_picture
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
