"""Headroom: what a longer context is worth to a softmax that was trained on it."""

from collections.abc import Mapping, Sequence

from scripts.reproduce.entries import config_entry, longer
from scripts.reproduce.kinds import MULTIPLES, loss

LONGER = (longer(4), longer(16))  # the shorter first


def available(runs: Mapping[str, Sequence[dict]], length: int) -> list[float]:
    """Return, by seed, what a context of this length is worth to a softmax that was trained on it.

    `runs` are the measured runs of each entry of headroom. The value is the loss at T, reading T
    tokens at a time, minus the loss at `length`, of the run that was trained at this length or at
    the next longer length. A sliding window of T would have a lower loss, so the context beyond T
    is worth less than this.
    """
    gains: dict[int, float] = {}
    for entry in LONGER:
        for run in runs.get(entry.name, []):
            measured = run["evaluation"]
            losses = dict(zip(measured["lengths"], measured["loss"], strict=True))
            if measured["trained_length"] >= length and length in losses:
                gains.setdefault(run["seed"], measured["loss"][0] - losses[length])
    return list(gains.values())


def by_seed(gains: Sequence[float]) -> str:
    return ", ".join(f"{gain:+.4f}" for gain in gains)


def at_each_length(table: dict) -> list[str]:
    """Say what is available at each length beyond the first, by seed."""
    runs = {name: row["runs"] for name, row in table["rows"].items()}
    first_row = next(iter(runs.values()))
    lengths = first_row[0]["evaluation"]["lengths"]
    sentences = []
    for multiple, length in zip(table["multiples"], lengths, strict=True):
        gains = available(runs, length)
        if multiple > 1 and gains:
            sentences.append(f"Available at {multiple:g}x, by seed: {by_seed(gains)}.")
    return sentences


HEADROOM = loss(
    title="What a longer context is worth to a model trained on it",
    entries=(config_entry("softmax"), *LONGER),
    multiples=MULTIPLES,
    remarks=at_each_length,
    note=(
        "Available: the loss at 1x minus the loss at the length, of the model that was trained "
        "there or at the next longer length. `softmax_4t` has its own sliding window, of 4x."
    ),
)
