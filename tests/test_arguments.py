"""Options whose values are checked while they are parsed."""

import argparse
from pathlib import Path

import pytest

from errors import UserError
from scripts.common.arguments import AtLeast, Lengths, add_runs


@pytest.mark.parametrize(
    "option, message",
    [
        ("--samples=0", "--samples 0 must be at least 1"),
        ("--lengths=1,x", "--lengths '1,x' must be whole numbers, such as 1024,2048"),
        ("--lengths=1,0", "--lengths '1,0' must be positive and distinct"),
        ("--lengths=8,8", "--lengths '8,8' must be positive and distinct"),
    ],
)
def test_options_are_refused_in_a_sentence(option, message):
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", action=AtLeast, at_least=1)
    parser.add_argument("--lengths", action=Lengths)
    with pytest.raises(UserError) as error:
        parser.parse_args([option])
    assert str(error.value) == message
    parsed = parser.parse_args(["--samples=1", "--lengths=8,4"])
    assert parsed.samples == 1 and parsed.lengths == (4, 8)


@pytest.mark.parametrize(
    "given, runs",
    [
        ("out/p1 out/p10 out/p15 out/p3", "out/p1 out/p3 out/p10 out/p15"),  # of a glob
        ("out/loss.csv out/p10 out/p3 out/sweep.png", "out/p3 out/p10"),
        ("softmax p10 p3", "softmax p10 p3"),  # as somebody wants it
        ("curves.png", "curves.png"),  # to be refused
    ],
)
def test_runs_are_in_natural_order(given, runs):
    parser = argparse.ArgumentParser()
    add_runs(parser)
    assert parser.parse_args(given.split()).runs == runs.split()


def test_the_file_of_a_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_runs(parser)
    assert parser.parse_args(["run"]).out is None
    assert parser.parse_args(["run", "--out=new/one.pdf"]).out == Path("new/one.pdf")
    Path("file").touch()
    for out, message in (("one.jpg", "must end in .png, .pdf, .svg"), ("file/a.png", "file: no")):
        with pytest.raises(UserError, match=message):
            parser.parse_args(["run", f"--out={out}"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
