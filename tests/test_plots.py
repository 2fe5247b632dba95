"""What the pictures of several commands have in common."""

import pytest

from scripts.common.plots import Curve, draw_curves, save_picture
from tests.helpers import not_blank


def test_a_saved_picture_has_the_format_of_its_suffix(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    curve = Curve("a", [1, 2], [3, 4])
    figure = draw_curves({"": [curve]}, "x", "y")
    first_bytes = {
        "a.png": b"\x89PNG",
        "a.pdf": b"%PDF",
        "a.svg": b"<?xml",
    }
    for name, expected in first_bytes.items():
        path = tmp_path / name
        save_picture(figure, path)
        assert path.read_bytes().startswith(expected)
        assert capsys.readouterr().out == f"picture: {name}\n"
    assert not_blank(tmp_path / "a.png")


def test_a_long_title_is_broken_between_words():
    name = "softmax,qk_norm=True,rope_share=0.5,learning_rate=0.016"
    figure = draw_curves({f"minus {name}, at 1,024 tokens": [Curve("a", [1, 2], [3, 4])]}, "x", "y")
    (axes,) = figure.axes
    assert axes.get_title().split("\n") == [
        "minus softmax, qk_norm=True, rope_share=0.5,",
        "learning_rate=0.016, at 1,024 tokens",
    ]


def test_a_logarithmic_axis_within_a_decade_has_labels():
    figure = draw_curves({"": [Curve("a", [16, 32], [1.3, 3.3])]}, "x", "y", "xy")
    figure.canvas.draw()
    (axes,) = figure.axes
    labels = [*axes.yaxis.get_ticklabels(minor=True), *axes.yaxis.get_ticklabels()]
    low, high = axes.get_ylim()
    shown = [label for label in labels if label.get_text() and low < label.get_position()[1] < high]
    assert len(shown) >= 2


def test_a_reference_takes_no_style_of_a_curve():
    chance = Curve("chance", [1, 2], [5, 5], style="reference")
    a = Curve("a", [1, 2], [3, 4])
    b = Curve("b", [1, 2], [4, 3])
    panels = {"one": [chance, a], "two": [b, chance]}
    figure = draw_curves(panels, "x", "y")
    styles = {}
    for axes in figure.axes:
        for line in axes.lines:
            label = line.get_label()
            style = (line.get_color(), line.get_marker(), line.is_dashed())
            assert styles.setdefault(label, style) == style
    assert styles == {
        "chance": ("0.3", "None", True),
        "a": ("C0", "o", False),
        "b": ("C1", "s", False),
    }


@pytest.mark.parametrize(
    "panels, count, label",
    [
        (1, 2, "a"),
        (1, 9, "b" * 40),
        (3, 43, "c" * 25),
    ],
)
def test_a_legend_takes_a_fifth_of_the_picture_at_most(tmp_path, panels, count, label):
    curves = []
    for i in range(count):
        curves.append(Curve(f"{label} {i}", [1, 2], [i, i]))
    curves.append(Curve(f"{label} 0", [1, 2], [0, 1], style="thin"))
    titles = map(str, range(panels))
    figure = draw_curves(dict.fromkeys(titles, curves), "x", "y", thin="thin: a window")
    save_picture(figure, tmp_path / "a.png")
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert len(legend.get_texts()) == count + 1
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert box.height < figure.bbox.height / 5
