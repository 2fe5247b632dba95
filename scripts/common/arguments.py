"""argparse actions for options with a checked value: an invalid one raises UserError."""

import argparse
from collections.abc import Sequence
from typing import Any

from errors import UserError


# Not `type` functions: argparse replaces a UserError raised by one with its own message.
class AtLeast(argparse.Action):
    """A whole number of at least `at_least`."""

    def __init__(self, option_strings: Sequence[str], dest: str, at_least: int, **more: Any):
        super().__init__(option_strings, dest, type=int, **more)
        self.at_least = at_least

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values < self.at_least:
            raise UserError(f"{self.option_strings[0]} {values} must be at least {self.at_least}")
        setattr(namespace, self.dest, values)


class Lengths(argparse.Action):
    """Lengths in tokens, such as 1024,2048."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name = self.option_strings[0]
        try:
            lengths = tuple(int(part) for part in values.split(","))
        except ValueError:
            message = f"{name} {values!r} must be whole numbers, such as 1024,2048"
            raise UserError(message) from None
        if min(lengths) < 1 or len(set(lengths)) < len(lengths):
            raise UserError(f"{name} {values!r} must be positive and distinct")
        setattr(namespace, self.dest, lengths)
