"""What the pictures of several commands have in common."""

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
