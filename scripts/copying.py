"""What a passage is worth to a model that meets it again: the loss on a copy, by distance.

python -m scripts.copying RUN [RUN ...]
python -m scripts.copying RUN [RUN ...] --lags 2048,8192,32768 --rope yarn
python -m scripts.copying hf:NAME_OR_FOLDER --files FILES --window 1024

A window is a passage of T / 4 held-out tokens (T: the training length), the text that follows it,
and the passage again. The lag is the number of tokens from the first copy to the second. A second
window has another passage instead of the first copy, and is the same from there on. Its loss on the
second copy minus the loss where the first copy is there is what the first copy is worth, in nats
per token: 0 for a model that does not use it. The first token of the second copy does not count,
because nothing announces it.

The lags T / 4, T / 2 and 3 T / 4 are within the training length. The mean worth over them, the
worth within T, is what the model has to lose. The share kept at a longer lag is the worth there
over the worth within T. Two words stand instead of a share:

undecided   the worth within T is less than twice its standard error over passages: such a model
            hardly copies, and has nothing to keep
hurt        the loss on the second copy, with the first in view, is above the loss within T without
            it: a long context costs more than the copy gives, and any text that resembles the
            passage may sway the model as much. Such a worth is not drawn.

For a model of transformers (hf:), T is --window or else max_position_embeddings, and the held-out
tokens come from text files or --data_dir: see docs/elsewhere.md.

Every run is measured with a control: the same weights with plain RoPE, where each query sees at
most the last T keys. From a lag of T and a passage on, the control sees no token of the first copy
directly, so what it keeps there went through several layers. Passages are the same for all
lags and all runs, and are evenly spaced in the validation text, which wraps around at its end.

Writes copying.json and copying.png. In the JSON `parts` are by lag, "1024":

    lag     in tokens
    loss    on the second copy, mean in nats per token
    worth   of the first copy, in nats per token, for each passage
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from config import Config
from errors import UserError
from scripts.common.command_line import option, parse_lengths
from scripts.common.labels import title_of
from scripts.common.plots import Curve, Style, draw_by_length
from scripts.common.runner import Results, as_command, with_controls
from scripts.common.runs import Run, batches
from scripts.common.tables import print_table
from scripts.common.validation import (
    ControlledEvaluation,
    check_lengths,
    checked_tokens,
    default_lengths,
)

# In training lengths.
PASSAGE = 1 / 4
WITHIN = (0.25, 0.5, 0.75)
BEYOND = (2, 4, 8, 16)
UNIT = "worth of the first copy (nats per token)"


@dataclass(frozen=True, kw_only=True)
class Copying(ControlledEvaluation):
    """What a passage is worth to a model that meets it again, by the distance in tokens."""

    name = "copying"

    lags: tuple[int, ...] | None = option(
        None,
        "lags in tokens, besides T/4, T/2 and 3T/4 (default: 2T, 4T, 8T, 16T)",
        type=parse_lengths,
    )
    passages: Annotated[int, ("at least", 2)] = option(64, "passages to copy")

    def lags_of(self, config: Config) -> list[int]:
        """The lags in ascending order, in tokens."""
        lags = self.lags
        if lags is None:
            longest = math.inf if config.longest is None else config.longest - passage_of(config)
            lags = tuple(lag for lag in default_lengths([config], BEYOND) if lag <= longest)
        return sorted({*default_lengths([config], WITHIN), *lags})

    def longest_window(self, config: Config) -> int:
        """The tokens of the window with the longest lag."""
        return self.lags_of(config)[-1] + passage_of(config)

    def identify(self, config: Config) -> dict:
        size = passage_of(config)
        if size < 2:  # the first token of a copy does not count
            raise UserError(
                f"a passage is a quarter of T = {config.block_size}: T must be at least 8"
            )
        lags = self.lags_of(config)
        check_lengths(config, [self.longest_window(config)])
        if lags[0] < size:
            raise UserError(f"lag {lags[0]} is shorter than a passage, which has {size} tokens")
        available = len(checked_tokens(config))
        needed = max(lags[-1], self.passages * size)
        if available < needed:
            raise UserError(
                f"{config.data_dir}: {available} validation tokens, but {self.passages} passages "
                f"of {size} tokens and a lag of {lags[-1]} take {needed}"
            )
        return {"passages": self.passages, "passage_tokens": size}

    def chunks(self, config: Config) -> dict[str, int]:
        """The lags."""
        return {str(lag): lag for lag in self.lags_of(config)}

    def measure(self, run: Run, lag: int) -> dict:
        tokens = checked_tokens(run.config)
        run.model.document_start = None  # both copies are in one document
        copied, other = copies(tokens, self.passages, lag, passage_of(run.config))
        loss = copy_losses(run, copied, lag)
        loss_without = copy_losses(run, other, lag)
        return {"lag": lag, "loss": loss.mean().item(), "worth": (loss_without - loss).tolist()}

    def control(self, config: Config) -> Self | None:
        return self.window_control(config, self.longest_window(config))

    def show(self, results: Results) -> dict[str, Figure]:
        """Print loss, worth of the first copy and share kept by lag, and draw the worth."""
        title = title_of(results)
        print(f"\n{UNIT}, {title}" if title else f"\n{UNIT}")
        curves = []
        for name, result, is_control in with_controls(results):
            label = name
            if is_control:
                label += f", sliding window of {result['window']}"
            print(f"\n{label}, {result['passages']} passages of {result['passage_tokens']} tokens")
            print_lags(result)
            curves.append(worth_curve(name, result, is_control))
        return {"copying": draw_by_length(results.values(), title, curves, "lag", UNIT)}


def passage_of(config: Config) -> int:
    """The tokens of a passage."""
    return int(PASSAGE * config.block_size)


def copies(
    tokens: NDArray[np.integer], count: int, lag: int, size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return windows [count, lag + size] that end with a copy of their first `size` tokens.

    The second array has the same windows with another passage in place of the first copy.
    """
    starts = np.arange(count) * (len(tokens) // count)
    offsets = np.arange(lag + size) % lag
    copied = tokens.take(starts[:, None] + offsets, mode="wrap").astype(np.int64)
    other = copied.copy()
    other[:, :size] = np.roll(copied[:, :size], count // 2, axis=0)
    return copied, other


@torch.no_grad()
def copy_losses(run: Run, windows: NDArray[np.int64], lag: int) -> NDArray[np.float64]:
    """The mean loss in nats on the second copy but its first token, for each window [n, L]."""
    means = []
    for batch in batches(windows, windows.shape[1]):
        tokens = torch.from_numpy(np.stack(batch)).to(run.device)
        with run.autocast():
            losses = run.model.token_losses(tokens[:, :-1], tokens[:, 1:])
        means.append(losses[:, lag:].cpu().double().mean(1))  # MPS has no float64
    return torch.cat(means).numpy()


# ---- the table and the picture ----


def lags_in(result: dict) -> list[int]:
    """The lags of a measurement, in ascending order."""
    return sorted(map(int, result["parts"]))


def worth_at(result: dict, lags: Sequence[int]) -> tuple[float, float]:
    """The mean worth at these lags, and its standard error over passages."""
    by_passage = np.mean([result["parts"][str(lag)]["worth"] for lag in lags], axis=0)
    return by_passage.mean(), by_passage.std(ddof=1) / math.sqrt(len(by_passage))


def shares_kept(result: dict) -> dict[int, float | str]:
    """The worth over the worth within T, at each lag from T on; or "undecided" or "hurt"."""
    trained = result["trained_length"]
    within = [int(multiple * trained) for multiple in WITHIN]
    worth, error = worth_at(result, within)
    # the loss within T where the first copy is missing
    loss_without = np.mean([result["parts"][str(lag)]["loss"] for lag in within]) + worth
    shares: dict[int, float | str] = {}
    for lag in lags_in(result):
        if lag < trained:
            continue
        if worth <= 0 or worth < 2 * error:
            shares[lag] = "undecided"
        elif result["parts"][str(lag)]["loss"] > loss_without:
            shares[lag] = "hurt"
        else:
            shares[lag] = worth_at(result, [lag])[0] / worth
    return shares


def print_lags(result: dict) -> None:
    """Print a column for each lag."""
    shares = shares_kept(result)
    columns = [("lag", "loss", "worth", "standard error", "share kept")]
    for lag in lags_in(result):
        loss = result["parts"][str(lag)]["loss"]
        worth, error = worth_at(result, [lag])
        share = shares.get(lag, "")
        if not isinstance(share, str):
            share = f"{share:z.2f}"
        columns.append((str(lag), f"{loss:.4f}", f"{worth:z.4f}", f"{error:.4f}", share))
    print_table(list(zip(*columns, strict=True)))


def worth_curve(name: str, result: dict, is_control: bool) -> Curve:
    """The worth by lag, with its standard error; a gap where the long context hurts."""
    shares = shares_kept(result)
    lags = lags_in(result)
    worths = []
    errors = []
    for lag in lags:
        worth, error = worth_at(result, [lag])
        if shares.get(lag) == "hurt":
            worth = math.nan
        worths.append(worth)
        errors.append(error)
    style: Style = "thin" if is_control else "line"
    return Curve(name, lags, worths, errors, band="standard error", style=style)


main = as_command(Copying)

if __name__ == "__main__":
    main()
