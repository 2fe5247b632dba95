"""Options that several commands have; an invalid value raises UserError."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from errors import UserError
from runtime.files import check_writable

PICTURES = (".png", ".pdf", ".svg")
# What lies beside the runs that it was made from.
PRODUCTS = (*PICTURES, ".csv", ".json", ".log", ".md", ".tex")


def add_runs(
    parser: argparse.ArgumentParser, help: str = "a run's folder, or a checkpoint's .pt"
) -> None:
    """Add the runs of a command, and --out, the file of the picture that it draws of them all."""
    parser.add_argument("runs", nargs="+", action=Runs, metavar="RUN", help=help)
    parser.add_argument(
        "--out", action=PictureFile, metavar="FILE",
        help="the picture of all runs: a .png, .pdf or .svg (default: beside the runs)",
    )  # fmt: skip


def natural_key(name: str) -> list[tuple[str, int]]:
    """A sorting key under which p3 comes before p10."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)]


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
    """Lengths in tokens, such as 1024,2048, in ascending order."""

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
        setattr(namespace, self.dest, tuple(sorted(lengths)))


class Runs(argparse.Action):
    """Runs as given. What a shell's glob has put into alphabetical order is put into natural order.

    So `out/sweep/*` gives p1, p3, p10, without the pictures and tables beside them.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values == sorted(values):
            runs = [run for run in values if Path(run).suffix not in PRODUCTS]
            values = sorted(runs or values, key=natural_key)
        setattr(namespace, self.dest, values)


class PictureFile(argparse.Action):
    """A file for a picture, in a format that its suffix names."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        path = Path(values)
        if path.suffix not in PICTURES:
            raise UserError(f"{option_string} {values!r} must end in {', '.join(PICTURES)}")
        check_writable(path.parent)
        setattr(namespace, self.dest, path)
