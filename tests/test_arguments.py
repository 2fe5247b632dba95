"""Options whose values are checked while they are parsed."""

import argparse

import pytest

from errors import UserError
from scripts.common.arguments import AtLeast, Lengths


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
    assert parsed.samples == 1 and parsed.lengths == (8, 4)
