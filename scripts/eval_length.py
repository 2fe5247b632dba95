"""Loss at lengths beyond the training length, over the same tokens at every length.

python -m scripts.eval_length RUN [RUN ...] --lengths 1024,2048,4096 --rope none,ntk:4,dynamic_ntk
python -m scripts.eval_length RUN [RUN ...] --lengths 20000 --samples 100000 --per_position \
    --rope none --rope_theta 500000

The first compares RoPE scalings, here NTK-aware with s = 4; the second is Figure 5 of SSMax.
Prints a table with a row for every run and scaling, and draws a curve for each: eval_length.png in
the run's folder, or for several runs loss_by_length_RUN_RUN.png in the folder that contains them;
with --per_position loss_by_position.png, or loss_by_position_RUN_RUN.png, instead.

RUN/eval_length.json is a list of measurements, one for each combination of weights, tokens and
settings. Lengths that it has are not measured again; new ones are added:

    variant, seed, trained_length                       of the run
    checkpoint, step, sha256                            of its weights
    rope, rope_factor, rope_theta                       as given; null: the default
    data_dir, tokens, dtype                             the first validation tokens of data_dir
    samples, sample_seed                                of random sequences instead, else null
    lengths, loss                                       two lists; mean loss in nats per token
    loss_by_position                                    {"20000": [mean over the windows of 20000
                                                        tokens, for each position]}
    environment                                         of the latest update
"""

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from config import Config
from data.loader import sampled_batches, validation_batches
from errors import UserError, command
from runtime.device import autocast
from scripts.common.arguments import AtLeast, Lengths
from scripts.common.plots import CURVE_MARKERS, length_axis, one_panel, save_picture
from scripts.common.results import Results, select_parts
from scripts.common.runs import (
    BATCH_TOKENS,
    LoadedRun,
    Request,
    add_options,
    open_run,
    picture_path,
    refuse_early,
    run_names,
)
from scripts.common.tables import print_table
from scripts.common.validation import (
    counted,
    default_lengths,
    sampled_sequences,
    shared_tokens,
)

# The smoothed loss at position i is the mean over positions i (1 - 1/16) to i (1 + 1/16).
SMOOTHING = 16
# The plot by position starts at this fraction of the training length: losses are high before it.
FIRST_DRAWN = 1 / 32
LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))


@dataclass(frozen=True, kw_only=True)
class LossRequest(Request):
    """Mean loss over the first `tokens` validation tokens, in windows of each length.

    With `samples` it is over so many random sequences of one length, or as many as there are.
    """

    script = "eval_length"
    lengths: tuple[int, ...] | None = None
    tokens: int | None = None
    samples: int | None = None
    sample_seed: int = 1337
    data_dir: str | None = None
    per_position: bool = False

    def lengths_of(self, config: Config) -> tuple[int, ...]:
        return self.lengths or default_lengths(config)

    def facts(self, config: Config) -> dict:
        data_dir, lengths = self.data_dir or config.data_dir, self.lengths_of(config)
        facts = {"data_dir": data_dir, "samples": None, "sample_seed": None}
        if self.samples is None:
            wanted = config.val_tokens if self.tokens is None else self.tokens
            return facts | {"tokens": shared_tokens(data_dir, lengths, wanted, config)}
        if len(lengths) > 1:
            given = ",".join(map(str, lengths))
            raise UserError(f"--samples {self.samples} takes sequences of one length, not {given}")
        samples = sampled_sequences(data_dir, lengths[0], self.samples, config)
        random = {"samples": samples, "sample_seed": self.sample_seed}
        return facts | random | {"tokens": samples * lengths[0]}

    def positions_of(self, config: Config) -> list[str]:
        """The requested keys of loss_by_position."""
        return [str(max(self.lengths_of(config)))] if self.per_position else []

    def select(self, measurement: dict, config: Config) -> dict | None:
        # `lengths` and `loss` are short and stay whole
        if not set(self.lengths_of(config)) <= set(measurement["lengths"]):
            return None
        return select_parts(measurement, "loss_by_position", self.positions_of(config))

    def amount(self, config: Config) -> int:
        return len(self.lengths_of(config)) * self.facts(config)["tokens"]

    def check(self, config: Config) -> None:
        self.facts(config)


@command
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog="--rope may list several here: none,ntk:8,yarn"
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that train.py made")
    parser.add_argument(
        "--lengths", action=Lengths, help="in tokens, such as 1024,2048 (default: 1x to 16x)"
    )
    taken = parser.add_mutually_exclusive_group()
    taken.add_argument(
        "--tokens", action=AtLeast, at_least=1, help="tokens to predict (default: val_tokens)"
    )
    taken.add_argument(
        "--samples", action=AtLeast, at_least=1,
        help="random sequences of one length, from all validation tokens",
    )  # fmt: skip
    parser.add_argument(
        "--sample_seed", action=AtLeast, at_least=0, help="of --samples (%(default)s)"
    )
    parser.add_argument("--data_dir", help="shards to use instead of the run's own")
    parser.add_argument(
        "--per_position",
        action="store_true",
        help="also the loss at every position of windows of the greatest length",
    )
    add_options(parser, LossRequest)
    arguments = parser.parse_args()
    requests, paths = scalings(LossRequest.parse(arguments)), arguments.runs
    refuse_early(paths, requests[0])  # they differ in their scaling only, which is checked
    results = [[measure(open_run(path, one), one) for one in requests] for path in paths]
    names = run_names(paths)
    print_losses(names, results)
    if arguments.per_position:
        save_picture(plot_positions(names, results), picture_path(paths, "loss_by_position"))
    else:
        name = "loss_by_length" if len(results) > 1 else "eval_length"
        save_picture(plot_lengths(names, results), picture_path(paths, name))


def scalings(request: LossRequest) -> list[LossRequest]:
    """A request for each RoPE scaling of --rope, such as ntk:4 or dynamic_ntk."""
    requests: list[LossRequest] = []
    for text in request.rope.split(","):
        rope, colon, number = text.partition(":")
        try:
            factor = float(number) if colon else request.rope_factor
        except ValueError:
            raise UserError(f"--rope {text!r}: {number!r} must be a number, as in ntk:4") from None
        requests.append(replace(request, rope=rope, rope_factor=factor))
        requests[-1].check_rope()
    if len(set(requests)) < len(requests):
        raise UserError(f"--rope {request.rope!r} must name distinct scalings")
    return requests


def measure(run: LoadedRun, request: LossRequest) -> dict:
    """A run's measurement with one scaling; its `lengths` and `loss` are the requested ones."""
    lengths, wanted_positions = request.lengths_of(run.config), request.positions_of(run.config)
    facts = request.facts(run.config)
    results = Results(request.file(run.path), run.facts | facts)
    losses, by_position = losses_of(results.values)
    todo = [
        n
        for n in lengths
        if n not in losses or (str(n) in wanted_positions and str(n) not in by_position)
    ]
    tokens, data_dir, samples = facts["tokens"], facts["data_dir"], facts["samples"]
    with tqdm(total=tokens * len(todo), unit="tok", unit_scale=True, disable=not todo) as bar:
        for length in todo:
            bar.set_description(f"{run.path} {label(run.facts)} {length}")
            size = max(1, BATCH_TOKENS // length)
            if samples is None:
                batches = validation_batches(data_dir, length, tokens, size, device=run.device)
            else:
                seed = facts["sample_seed"]
                batches = sampled_batches(data_dir, length, samples, seed, size, run.device)
            means = position_losses(run, counted(batches, bar))
            add_length(results, means, str(length) in wanted_positions)
    losses, _ = losses_of(results.values)
    selected = select_parts(results.values, "loss_by_position", wanted_positions)
    assert selected is not None  # all of them have been measured
    return selected | {"lengths": list(lengths), "loss": [losses[n] for n in lengths]}


def losses_of(values: dict) -> tuple[dict[int, float], dict[str, list[float]]]:
    """The loss by length, and by length the loss at each position, as far as measured."""
    losses = dict(zip(values.get("lengths", ()), values.get("loss", ()), strict=True))
    return losses, values.get("loss_by_position", {})


def add_length(results: Results, means: Tensor, per_position: bool) -> None:
    """Add the mean losses [L] at every position of windows of one length."""

    def added(values: dict) -> dict:
        losses, by_position = losses_of(values)
        losses[len(means)] = means.mean().item()
        if per_position:
            by_position[str(len(means))] = means.tolist()
        known = sorted(losses)
        return {
            "lengths": known,
            "loss": [losses[n] for n in known],
            "loss_by_position": by_position,
        }

    results.update(added)


@torch.no_grad()
def position_losses(run: LoadedRun, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Mean loss in nats at every position of the windows x, y [B, L]: float64 [L]."""
    total, windows = torch.zeros((), dtype=torch.float64), 0
    for x, y in batches:
        with autocast(run.device, run.dtype):
            losses = run.model.token_losses(x, y)
        total = total + losses.cpu().double().sum(0)
        windows += len(losses)
    return total / windows


def label(result: dict) -> str:
    """A RoPE scaling, with its factor and base where given."""
    factor, theta = result["rope_factor"], result["rope_theta"]
    text = result["rope"] + ("" if factor is None else f":{factor:g}")
    return text + ("" if theta is None else f", theta {theta:g}")


def rows(names: list[str], results: list[list[dict]]) -> Iterator[tuple[int, int, str, dict]]:
    """Each row of the table or curve: index of the run and of the scaling, label, measurement."""
    for i, (name, run_results) in enumerate(zip(names, results, strict=True)):
        for j, result in enumerate(run_results):
            yield i, j, name + (f"  {label(result)}" if len(run_results) > 1 else ""), result


def title(results: list[list[dict]]) -> str:
    return "" if len(results[0]) > 1 else f"RoPE scaling {label(results[0][0])}"


def all_lengths(results: list[list[dict]]) -> list[int]:
    return sorted({n for run in results for result in run for n in result["lengths"]})


def print_losses(names: list[str], results: list[list[dict]]) -> None:
    lengths, trained = all_lengths(results), results[0][0]["trained_length"]
    print("\nvalidation loss (nats a token)" + (title(results) and f", {title(results)}"))
    table = [["", *(f"{n / trained:g}x" for n in lengths)], ["", *map(str, lengths)]]
    for *_, name, result in rows(names, results):
        losses = dict(zip(result["lengths"], result["loss"], strict=True))
        table.append([name, *(f"{losses[n]:.4f}" if n in losses else "" for n in lengths)])
    print_table(table, width=9, remarks=("of the training length", "tokens"))


def style(i: int, j: int, results: list[list[dict]]) -> dict[str, Any]:
    """A colour for each run and a line for each scaling; for one run, a colour for each scaling."""
    if len(results) == 1:
        return {"color": f"C{j}"}
    return {"color": f"C{i % 10}", "linestyle": LINES[j % len(LINES)]}


def plot_lengths(names: list[str], results: list[list[dict]]) -> Figure:
    figure, axes = loss_panel(results, "length in tokens", all_lengths(results))
    for i, j, name, result in rows(names, results):
        points = sorted(zip(result["lengths"], result["loss"], strict=True))
        marker = CURVE_MARKERS[(j if len(results[i]) > 1 else i) % len(CURVE_MARKERS)]
        axes.plot(*zip(*points, strict=True), marker=marker, label=name, **style(i, j, results))
    axes.legend(fontsize="small")
    return figure


def plot_positions(names: list[str], results: list[list[dict]]) -> Figure:
    """Loss at each position of the longest windows: raw means faint, smoothed on top."""
    figure, axes = loss_panel(results, "position in tokens")
    begin = int(FIRST_DRAWN * min(run_results[0]["trained_length"] for run_results in results))
    low, high = math.inf, -math.inf
    for i, j, name, result in rows(names, results):
        length = max(map(int, result["loss_by_position"]))
        losses = result["loss_by_position"][str(length)]
        curve, positions = smoothed(losses)[begin:], range(begin + 1, length + 1)
        line = style(i, j, results)
        axes.plot(positions, losses[begin:], color=line["color"], alpha=0.15, linewidth=0.5)
        windows = result["tokens"] // length
        axes.plot(positions, curve, label=f"{name} ({windows:,} windows)", **line)
        low, high = min(low, *curve), max(high, *curve)
    margin = 0.1 * max(0.5, high - low)
    axes.set_ylim(low - margin, high + margin)  # raw means may exceed the limits
    axes.legend(fontsize="small")
    return figure


def smoothed(losses: list[float]) -> list[float]:
    """At each position the mean over a window that grows with it and is cut off at the end."""
    curve = []
    for position in range(1, len(losses) + 1):
        half = position // SMOOTHING
        near = losses[position - half - 1 : position + half]
        curve.append(sum(near) / len(near))
    return curve


def loss_panel(
    results: list[list[dict]], what: str, lengths: list[int] | None = None
) -> tuple[Figure, Axes]:
    figure, axes = one_panel()
    length_axis(axes, what, {run_results[0]["trained_length"] for run_results in results}, lengths)
    axes.set_ylabel("validation loss (nats a token)")
    axes.set_title(title(results), fontsize="medium")
    return figure, axes


if __name__ == "__main__":
    main()
