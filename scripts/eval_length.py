"""Loss at lengths beyond the training length, over the same tokens at every length.

python -m scripts.eval_length RUN [RUN ...] --lengths 1024,2048,4096 --rope none,ntk:4,dynamic_ntk
python -m scripts.eval_length RUN [RUN ...] --lengths 20000 --samples 100000 --per_position \
    --rope none --rope_theta 500000

The first compares RoPE scalings, here NTK-aware with s = 4; the second is Figure 5 of SSMax.
Prints a table with a row for every run and scaling, and draws a curve for each: eval_length.png in
the run's folder, or for several runs loss_by_length_RUN_RUN.png in the folder that contains them;
with --per_position loss_by_position.png, or loss_by_position_RUN_RUN.png, instead.

What a longer context is worth: beside every run stands its control, the same weights with plain
RoPE where each row sees the last T keys only, T the training length: a window costs nothing and
keeps models near their loss at T, though not all of those without positions. Independent windows of
T tokens have the loss at T, whatever the model; --restart measures them. The gain from context is
the lower of the two losses minus the run's, at the longest length: above 0 the model uses what lies
beyond T tokens, below 0 it is hurt by it.

RUN/eval_length.json is a list of measurements, one for each combination of weights, tokens and
settings. Lengths that it has are not measured again; new ones are added:

    variant, seed, trained_length                       of the run
    checkpoint, step, sha256                            of its weights
    rope, rope_factor, rope_theta                       as given; null: the default
    window, p                                           of attention; null: none
    restart                                             true: independent windows
    data_dir, tokens, dtype                             the first validation tokens of data_dir
    samples, sample_seed                                of random sequences instead, else null
    lengths, loss                                       two lists; mean loss in nats per token
    loss_by_position                                    {"20000": [mean over the windows of 20000
                                                        tokens, for each position]}
    environment                                         of the latest update
"""

import argparse
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

if not __package__:  # run as a file: the repository's modules are in the folder above
    sys.path.insert(0, str(Path(__file__).parents[1]))

from config import Config
from data.loader import sampled_batches, validation_batches
from data.shards import read_meta
from data.tokenizer import identify
from errors import UserError, command
from runtime import checkpoint
from runtime.device import autocast
from scripts.common.arguments import AtLeast, Lengths, add_runs
from scripts.common.plots import (
    CURVE_MARKERS,
    add_legend,
    length_axis,
    one_panel,
    save_picture,
    show_equal_curves,
)
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
    text_bytes,
    validation_id,
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
    restart: bool = False

    def control(self, config: Config) -> "LossRequest | None":
        """The request for the same weights in a window of the training length, with plain RoPE.

        None where no length is longer, or where it is this request.
        """
        window = min(config.block_size, config.window or config.block_size)
        control = replace(self.plain(), window=window, restart=False)
        return None if control == self or max(self.lengths_of(config)) <= window else control

    def restarted(self) -> "LossRequest":
        """The request for the same weights in independent windows of the training length."""
        return replace(self.plain(), window=None, restart=True)

    def plain(self) -> "LossRequest":
        """This request with RoPE as in training."""
        return replace(self, rope="none", rope_factor=None, rope_theta=None)

    def lengths_of(self, config: Config) -> tuple[int, ...]:
        return self.lengths or default_lengths([config])

    def facts(self, config: Config) -> dict:
        data_dir, lengths = self.data_dir or config.data_dir, self.lengths_of(config)
        facts = {
            "data_dir": data_dir,
            "val_sha256": validation_id(data_dir),
            "samples": None,
            "sample_seed": None,
            "restart": self.restart,
        }
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
    add_runs(parser)
    parser.add_argument(
        "--lengths", action=Lengths, help="in tokens, such as 1024,2048 (default: 1x to 16x)"
    )
    parser.add_argument(
        "--tokens", action=AtLeast, at_least=1, help="tokens to predict (default: val_tokens)"
    )
    parser.add_argument(
        "--samples",
        action=AtLeast,
        at_least=1,
        help="random sequences of one length, from all validation tokens",
    )
    parser.add_argument(
        "--sample_seed", action=AtLeast, at_least=0, help="of --samples (%(default)s)"
    )
    parser.add_argument("--data_dir", help="shards to use instead of the run's own")
    parser.add_argument(
        "--per_position",
        action="store_true",
        help="also the loss at every position of windows of the greatest length",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="also the loss in independent windows of the training length",
    )
    add_options(parser, LossRequest)
    arguments = parser.parse_args()
    paths = arguments.runs
    asked = comparable(LossRequest.parse(arguments), paths)
    requests = scalings(replace(asked, restart=False))
    for request in requests:
        refuse_early(paths, request)
    tokenizers = {identify(checkpoint.read_config(path).tokenizer) for path in paths}
    unit = NATS if len(tokenizers) == 1 else BITS
    runs = [
        measure_run(name, path, requests, asked.restart, unit)
        for name, path in zip(run_names(paths), paths, strict=True)
    ]
    print_losses(runs, unit)
    if arguments.per_position:
        figure, name = plot_positions(runs, unit), "loss_by_position"
    else:
        figure = plot_lengths(runs, unit)
        name = "loss_by_length" if len(runs) > 1 else "eval_length"
    save_picture(figure, arguments.out or picture_path(paths, name))


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


def comparable(request: LossRequest, paths: list[str]) -> LossRequest:
    """The request with one number of tokens and one list of lengths for all runs of a table.

    Raises UserError where the runs would be measured on different text.
    """
    configs = [checkpoint.read_config(path) for path in paths]
    folders = {identify(config.tokenizer): config.data_dir for config in configs}
    for path, config in zip(paths, configs, strict=True):
        first = folders[identify(config.tokenizer)]
        if request.data_dir is None and Path(config.data_dir).resolve() != Path(first).resolve():
            raise UserError(
                f"{path} was trained on {config.data_dir}, another run on {first}: losses on "
                "different text cannot be compared; --data_dir DIR measures all runs on one"
            )
    if request.data_dir is None:
        refuse_other_text(set(folders.values()))
    if request.samples and request.tokens:
        raise UserError(
            f"--samples {request.samples} and --tokens {request.tokens} exclude each other"
        )
    if request.samples and len(folders) > 1:
        raise UserError("--samples takes runs of one tokenizer: random sequences differ in text")
    tokens = request.tokens or min(config.val_tokens for config in configs)
    return replace(request, lengths=request.lengths or default_lengths(configs), tokens=tokens)


def refuse_other_text(folders: set[str]) -> None:
    """Raise UserError where shards of different tokenizers are of different documents."""
    metas = {folder: read_meta(folder) for folder in sorted(folders)}
    # published shards do not say of which documents they are
    known = {folder: meta for folder, meta in metas.items() if meta and meta["documents"]}
    if len({meta["fingerprint"] for meta in known.values()}) > 1:
        raise UserError(
            f"{' and '.join(known)} were made from different documents: losses on different text "
            "cannot be compared, not even in bits per byte"
        )


def gain_from_context(alone: float, window: float, loss: float) -> float:
    """The loss that T tokens of context allow, T the training length, minus the loss.

    `alone` is the loss at T, which independent windows have, `window` that with a sliding window.
    """
    return min(alone, window) - loss


@dataclass(frozen=True)
class MeasuredRun:
    """What a table or picture shows of a run."""

    name: str
    rows: list[dict]  # a measurement for each RoPE scaling
    control: dict | None  # with plain RoPE and a sliding window of the training length
    restarted: dict | None = None  # in independent windows of the training length

    def gain(self, row: dict) -> float | None:
        """A row's gain at the longest length; over the window alone where T is not measured."""
        if self.control is None:
            return None
        losses = dict(zip(self.control["lengths"], self.control["loss"], strict=True))
        last = self.control["loss"][-1]
        return gain_from_context(losses.get(row["trained_length"], last), last, row["loss"][-1])


def measure_run(
    name: str, path: str, requests: list[LossRequest], restart: bool, unit: str
) -> MeasuredRun:
    """A run measured with every scaling, and its controls."""
    config = checkpoint.read_config(path)

    def result(request: LossRequest) -> dict:
        values = measure(open_run(path, request), request)
        return in_bits_per_byte(values, config) if unit == BITS else values

    control = requests[0].control(config)
    return MeasuredRun(
        name,
        [result(request) for request in requests],
        result(control) if control else None,
        result(requests[0].restarted()) if restart else None,
    )


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
            means = position_losses(run, counted(batches, bar), request.restart)
            add_length(results, means, str(length) in wanted_positions)
    losses, _ = losses_of(results.values)
    selected = select_parts(results.values, "loss_by_position", wanted_positions)
    assert selected is not None  # all of them have been measured
    return selected | {"lengths": list(lengths), "loss": [losses[n] for n in lengths]}


def in_bits_per_byte(result: dict, config: Config) -> dict:
    """A measurement with its losses per byte of text, which tokenizers do not change."""
    size = text_bytes(result["data_dir"], result["tokens"], config.tokenizer)
    factor = result["tokens"] / size / math.log(2)
    by_position = result["loss_by_position"].items()
    return result | {
        "loss": [factor * loss for loss in result["loss"]],
        "loss_by_position": {n: [factor * loss for loss in losses] for n, losses in by_position},
    }


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
def position_losses(
    run: LoadedRun, batches: Iterable[tuple[Tensor, Tensor]], restart: bool = False
) -> Tensor:
    """Mean loss in nats at every position of the windows x, y [B, L]: float64 [L].

    With `restart` each window is read in independent parts of the training length.
    """
    total, windows = torch.zeros((), dtype=torch.float64), 0
    for x, y in batches:
        part = run.config.block_size if restart else x.shape[1]
        with autocast(run.device, run.dtype):
            pairs = zip(x.split(part, dim=1), y.split(part, dim=1), strict=True)
            losses = torch.cat([run.model.token_losses(*pair) for pair in pairs], dim=1)
        total = total + losses.cpu().double().sum(0)
        windows += len(losses)
    return total / windows


# ---- the table and the pictures ----

NATS, BITS = "nats per token", "bits per byte"
CONTROL = "sliding window of the training length, plain RoPE"
MEANING = (
    "gain from context, at the longest length: the loss with a " + CONTROL + ",\n"
    "or the loss at the training length if that is lower, minus the loss; above 0 the model uses "
    "what lies\nbeyond it, below 0 it is hurt by it"
)


def label(result: dict) -> str:
    """A RoPE scaling, with its factor and base where given."""
    factor, theta = result["rope_factor"], result["rope_theta"]
    text = result["rope"] + ("" if factor is None else f":{factor:g}")
    return text + ("" if theta is None else f", theta {theta:g}")


def title(runs: list[MeasuredRun]) -> str:
    """The settings that all rows have in common."""
    first, *more = runs[0].rows
    parts = [] if more else [f"RoPE scaling {label(first)}"]
    for key in ("window", "p"):
        values = {row[key] for run in runs for row in run.rows}
        if len(values) == 1 and None not in values:
            parts.append(f"{key} {values.pop():g}")
    return ", ".join(parts)


def row_names(run: MeasuredRun) -> list[str]:
    """The run's name, with the scaling where there are several."""
    several = len(run.rows) > 1
    return [run.name + (f"  {label(row)}" if several else "") for row in run.rows]


def all_lengths(runs: list[MeasuredRun]) -> list[int]:
    return sorted({n for run in runs for row in run.rows for n in row["lengths"]})


def trained_lengths(runs: list[MeasuredRun]) -> set[int]:
    return {run.rows[0]["trained_length"] for run in runs}


def print_losses(runs: list[MeasuredRun], unit: str) -> None:
    lengths, trained = all_lengths(runs), trained_lengths(runs)
    controlled = any(run.control for run in runs)
    gain = ["gain"] if controlled else []
    table = [["tokens", *map(str, lengths), *gain]]
    if len(trained) == 1:
        multiples = [f"{n / length:g}x" for length in trained for n in lengths]
        table.insert(0, ["of the training length", *multiples, *([""] * controlled)])

    def add(name: str, result: dict, gain: float | None = None) -> None:
        losses = dict(zip(result["lengths"], result["loss"], strict=True))
        cells = [f"{losses[n]:.4f}" if n in losses else "" for n in lengths]
        table.append([name, *cells, *(["" if gain is None else f"{gain:+.4f}"] * controlled)])

    for run in runs:
        for name, row in zip(row_names(run), run.rows, strict=True):
            add(name, row, run.gain(row))
        if run.control:
            add(f"  sliding window of {run.control['window']}", run.control)
        if run.restarted:
            add(f"  independent windows of {run.rows[0]['trained_length']}", run.restarted)
    print(f"\nvalidation loss ({unit})" + (title(runs) and f", {title(runs)}"))
    print_table(table, width=9)
    if controlled:
        print(MEANING)
    for run in runs:
        row = run.rows[0]
        print(
            f"{run.name}: {row['checkpoint']} checkpoint, step {row['step']}, {row['sha256'][:8]}; "
            f"trained at {row['trained_length']}; {row['tokens']:,} tokens of {row['data_dir']}"
        )


def style(i: int, j: int, runs: list[MeasuredRun]) -> dict[str, Any]:
    """A colour for each run and a line for each scaling; for one run, a colour for each scaling."""
    if len(runs) == 1:
        return {"color": f"C{j}"}
    return {"color": f"C{i % 10}", "linestyle": LINES[(i // 10 + j) % len(LINES)]}


def plot_lengths(runs: list[MeasuredRun], unit: str = NATS) -> Figure:
    """Loss over length; thin lines are the controls."""
    figure, axes = loss_panel(runs, unit, "length in tokens", all_lengths(runs))
    for i, run in enumerate(runs):
        for j, (name, row) in enumerate(zip(row_names(run), run.rows, strict=True)):
            marker = CURVE_MARKERS[(j if len(run.rows) > 1 else i) % len(CURVE_MARKERS)]
            axes.plot(row["lengths"], row["loss"], marker=marker, label=name, **style(i, j, runs))
        if run.control:
            colour = "0.3" if len(runs) == 1 else f"C{i % 10}"
            axes.plot(run.control["lengths"], run.control["loss"], color=colour, linewidth=0.8)
    finish(figure, axes, runs)
    return figure


def plot_positions(runs: list[MeasuredRun], unit: str = NATS) -> Figure:
    """Loss at each position of the longest windows, smoothed."""
    figure, axes = loss_panel(runs, unit, "position in tokens")
    begin = int(FIRST_DRAWN * min(trained_lengths(runs)))
    for i, run in enumerate(runs):
        rows = [*zip(row_names(run), run.rows, strict=True)]
        for j, (name, row) in enumerate([*rows, *([("", run.control)] if run.control else [])]):
            length, losses = last_positions(row)
            curve, positions = smoothed(losses)[begin:], range(begin + 1, length + 1)
            if row is run.control:
                colour = "0.3" if len(runs) == 1 else f"C{i % 10}"
                axes.plot(positions, curve, color=colour, linewidth=0.8)
            else:
                line, windows = style(i, j, runs), row["tokens"] // length
                axes.plot(positions, curve, label=f"{name} ({windows:,} windows)", **line)
    finish(figure, axes, runs)
    return figure


def last_positions(row: dict) -> tuple[int, list[float]]:
    """The greatest length measured by position, and its losses."""
    length = max(map(int, row["loss_by_position"]))
    return length, row["loss_by_position"][str(length)]


def smoothed(losses: list[float]) -> list[float]:
    """At each position the mean over a window that grows with it and is cut off at the end."""
    curve = []
    for position in range(1, len(losses) + 1):
        half = position // SMOOTHING
        near = losses[position - half - 1 : position + half]
        curve.append(sum(near) / len(near))
    return curve


def loss_panel(
    runs: list[MeasuredRun], unit: str, what: str, lengths: list[int] | None = None
) -> tuple[Figure, Axes]:
    figure, axes = one_panel()
    length_axis(axes, what, trained_lengths(runs), lengths)
    axes.set_ylabel(f"validation loss ({unit})")
    axes.set_title(title(runs), fontsize="medium")
    return figure, axes


def finish(figure: Figure, axes: Axes, runs: list[MeasuredRun]) -> None:
    """Label the thin lines, and place the legend beside the axes."""
    if any(run.control for run in runs):
        axes.plot([], [], color="0.3", linewidth=0.8, label=f"thin: {CONTROL}")
    show_equal_curves(axes)
    add_legend(figure)


if __name__ == "__main__":
    main()
