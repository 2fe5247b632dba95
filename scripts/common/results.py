"""Results files, such as eval_length.json: lists of measurements, so that none is made twice."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from errors import UserError
from runtime.device import environment
from runtime.files import locked, read_json, write_json


def read_results(path: Path) -> list[dict]:
    """The measurements in a results file. Raises UserError where it holds something else."""
    results = read_json(path)
    if results is not None and not isinstance(results, list):
        raise UserError(f"{path}: it has no list of measurements; move it out of the way")
    return results or []


def matches(measurement: dict, facts: dict) -> bool:
    return all(measurement.get(key) == value for key, value in facts.items())


def select_parts(measurement: dict, key: str, names: Sequence[str]) -> dict | None:
    """The measurement with only these entries of measurement[key]; None if one is missing."""
    if not set(names) <= measurement[key].keys():
        return None
    return measurement | {key: {name: measurement[key][name] for name in names}}


class Results:
    """One measurement in a results file; `facts` identify it.

    It is read again whenever it is needed, since another process may be adding to it. Saving after
    each part lets an interrupted command continue from there.
    """

    def __init__(self, path: Path, facts: dict):
        self.path, self.facts = path, facts

    @property
    def values(self) -> dict:
        """What has been saved of the measurement, empty at first."""
        return next((m for m in read_results(self.path) if matches(m, self.facts)), {})

    @property
    def parts(self) -> dict[str, dict]:
        """The named parts saved so far."""
        return self.values.get("parts", {})

    def save(self, **values: Any) -> None:
        """Save the measurement in place of the one before."""
        self.update(lambda _: values)

    def add(self, part: str, value: dict) -> None:
        self.update(lambda values: {"parts": values.get("parts", {}) | {part: value}})

    def update(self, change: Callable[[dict], dict]) -> None:
        """Save `change(values)` in place of the values."""
        with locked(self.path.parent):
            measurements = read_results(self.path)
            known = (i for i, m in enumerate(measurements) if matches(m, self.facts))
            i = next(known, len(measurements))
            values = change(measurements[i] if i < len(measurements) else {})
            measurements[i : i + 1] = [self.facts | values | {"environment": environment()}]
            write_json(self.path, measurements)

    def discard(self, key: str) -> None:
        """Remove `key` from all other measurements of the file."""
        with locked(self.path.parent):
            kept = [
                m if matches(m, self.facts) else {k: v for k, v in m.items() if k != key}
                for m in read_results(self.path)
            ]
            write_json(self.path, kept)


def without_nan(value: Any) -> Any:
    """Nested lists with None in place of NaN, which JSON lacks."""
    if isinstance(value, list):
        return [without_nan(v) for v in value]
    return None if math.isnan(value) else value
