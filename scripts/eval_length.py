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
from data.tokenizer import identify
from errors import UserError, command
from runtime import checkpoint
from runtime.device import autocast
from scripts.common import runner
from scripts.common.plots import (
    CURVE_MARKERS,
    add_legend,
    length_axis,
    one_panel,
    show_equal_curves,
)
from scripts.common.runner import BATCH_TOKENS, Evaluation, Run, Store, measured, option
from scripts.common.tables import print_table
from scripts.common.validation import (
    counted,
    default_lengths,
    sampled_sequences,
    shared_tokens,
    validation_id,
)

# The smoothed loss at position i is the mean over positions i (1 - 1/16) to i (1 + 1/16).
SMOOTHING = 16
# The plot by position starts at this fraction of the training length: losses are high before it.
FIRST_DRAWN = 1 / 32
LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))


@dataclass(frozen=True, kw_only=True)
class LossByLength(Evaluation):
    """Loss at lengths beyond the training length, over the same tokens at every length."""

    name = "eval_length"

    rope: str = option("dynamic_ntk", "RoPE scalings, such as none,ntk:8,yarn")
    lengths: tuple[int, ...] | None = option(
        None, "in tokens, such as 1024,2048 (default: 1x to 16x the training length)"
    )
    tokens: int | None = option(None, "tokens to predict (default: val_tokens)", at_least=1)
    samples: int | None = option(
        None, "random sequences of one length, from all validation tokens", at_least=1
    )
    sample_seed: int = option(1337, "of --samples", at_least=0)
    data_dir: str | None = option(None, "shards to use instead of the run's own")
    per_position: bool = option(False, "also the loss by position at the greatest length")
    restart: bool = option(False, "also the loss in independent windows of the training length")

    def control(self, config: Config) -> "LossByLength | None":
        """The same weights in a window of the training length, with plain RoPE.

        None where no length is longer, or where it is this evaluation.
        """
        window = min(config.block_size, config.window or config.block_size)
        control = replace(self.plain(), window=window, restart=False)
        return None if control == self or max(self.lengths_of(config)) <= window else control

    def restarted(self) -> "LossByLength":
        """The same weights in independent windows of the training length."""
        return replace(self.plain(), window=None, restart=True)

    def plain(self) -> "LossByLength":
        """The same with RoPE as in training."""
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
        losses, lengths = losses_of(measurement)[0], self.lengths_of(config)
        if not set(lengths) <= losses.keys():
            return None
        asked = {"lengths": list(lengths), "loss": [losses[n] for n in lengths]}
        return runner.select_parts(
            measurement | asked, "loss_by_position", self.positions_of(config)
        )

    def amount(self, config: Config) -> int:
        return len(self.lengths_of(config)) * self.facts(config)["tokens"]

    def measure(self, run: Run, store: Store) -> None:
        lengths, wanted = self.lengths_of(run.config), self.positions_of(run.config)
        losses, by_position = losses_of(store.values)
        todo = [
            n
            for n in lengths
            if n not in losses or (str(n) in wanted and str(n) not in by_position)
        ]
        tokens, data_dir, samples = (store.facts[key] for key in ("tokens", "data_dir", "samples"))
        with tqdm(total=tokens * len(todo), unit="tok", unit_scale=True, disable=not todo) as bar:
            for length in todo:
                bar.set_description(f"{run.path} {label(run.facts)} {length}")
                size = max(1, BATCH_TOKENS // length)
                if samples is None:
                    batches = validation_batches(data_dir, length, tokens, size, device=run.device)
                else:
                    seed = self.sample_seed
                    batches = sampled_batches(data_dir, length, samples, seed, size, run.device)
                means = position_losses(run, counted(batches, bar), self.restart)
                add_length(store, means, str(length) in wanted)


@command
def main() -> None:
    asked, given = runner.parse(LossByLength)
    asked = comparable(asked, given.runs)
    evaluations = scalings(replace(asked, restart=False))
    for evaluation in evaluations:
        runner.refuse_early(given.runs, evaluation)
    names = runner.run_names(given.runs)
    runs = [
        measure_run(name, path, evaluations, asked.restart)
        for name, path in zip(names, given.runs, strict=True)
    ]
    print_losses(runs)
    if asked.per_position:
        pictures = {"loss_by_position": plot_positions(runs)}
    else:
        name = "loss_by_length" if len(runs) > 1 else "eval_length"
        pictures = {name: plot_lengths(runs)}
    runner.save_pictures(pictures, given.runs, given.out)


def scalings(evaluation: LossByLength) -> list[LossByLength]:
    """An evaluation for each RoPE scaling of --rope, such as ntk:4 or dynamic_ntk."""
    found: list[LossByLength] = []
    for text in evaluation.rope.split(","):
        rope, colon, number = text.partition(":")
        try:
            factor = float(number) if colon else evaluation.rope_factor
        except ValueError:
            raise UserError(f"--rope {text!r}: {number!r} must be a number, as in ntk:4") from None
        found.append(replace(evaluation, rope=rope, rope_factor=factor))
        found[-1].check_rope()
    if len(set(found)) < len(found):
        raise UserError(f"--rope {evaluation.rope!r} must name distinct scalings")
    return found


def comparable(evaluation: LossByLength, paths: list[str]) -> LossByLength:
    """The evaluation with one number of tokens and one list of lengths for all runs of a table.

    Raises UserError where the runs would be measured on different text or in different tokens.
    """
    configs = [checkpoint.read_config(path) for path in paths]
    first = configs[0]
    for path, config in zip(paths, configs, strict=True):
        if identify(config.tokenizer) != identify(first.tokenizer):
            raise UserError(
                f"{path} has the tokens of {config.tokenizer}, and {paths[0]} those of "
                f"{first.tokenizer}: losses per token of different tokenizers cannot be compared"
            )
        same = Path(config.data_dir).resolve() == Path(first.data_dir).resolve()
        if evaluation.data_dir is None and not same:
            raise UserError(
                f"{path} was trained on {config.data_dir}, and {paths[0]} on {first.data_dir}: "
                "losses on different text cannot be compared; --data_dir DIR measures all runs on "
                "one"
            )
    if evaluation.samples and evaluation.tokens:
        raise UserError(
            f"--samples {evaluation.samples} and --tokens {evaluation.tokens} exclude each other"
        )
    tokens = evaluation.tokens or min(config.val_tokens for config in configs)
    lengths = evaluation.lengths or default_lengths(configs)
    return replace(evaluation, lengths=lengths, tokens=tokens)


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
    name: str, path: str, evaluations: list[LossByLength], restart: bool
) -> MeasuredRun:
    """A run measured with every scaling, and its controls."""
    first = evaluations[0]
    control = first.control(checkpoint.read_config(path))
    return MeasuredRun(
        name,
        [measured(evaluation, path) for evaluation in evaluations],
        measured(control, path) if control else None,
        measured(first.restarted(), path) if restart else None,
    )


def losses_of(values: dict) -> tuple[dict[int, float], dict[str, list[float]]]:
    """The loss by length, and by length the loss at each position, as far as measured."""
    losses = dict(zip(values.get("lengths", ()), values.get("loss", ()), strict=True))
    return losses, values.get("loss_by_position", {})


def add_length(store: Store, means: Tensor, per_position: bool) -> None:
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

    store.update(added)


@torch.no_grad()
def position_losses(
    run: Run, batches: Iterable[tuple[Tensor, Tensor]], restart: bool = False
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

UNIT = "nats per token"
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


def print_losses(runs: list[MeasuredRun]) -> None:
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
    print(f"\nvalidation loss ({UNIT})" + (title(runs) and f", {title(runs)}"))
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


def plot_lengths(runs: list[MeasuredRun]) -> Figure:
    """Loss over length; thin lines are the controls."""
    figure, axes = loss_panel(runs, "length in tokens", all_lengths(runs))
    for i, run in enumerate(runs):
        for j, (name, row) in enumerate(zip(row_names(run), run.rows, strict=True)):
            marker = CURVE_MARKERS[(j if len(run.rows) > 1 else i) % len(CURVE_MARKERS)]
            axes.plot(row["lengths"], row["loss"], marker=marker, label=name, **style(i, j, runs))
        if run.control:
            colour = "0.3" if len(runs) == 1 else f"C{i % 10}"
            axes.plot(run.control["lengths"], run.control["loss"], color=colour, linewidth=0.8)
    finish(figure, axes, runs)
    return figure


def plot_positions(runs: list[MeasuredRun]) -> Figure:
    """Loss at each position of the longest windows, smoothed."""
    figure, axes = loss_panel(runs, "position in tokens")
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
    runs: list[MeasuredRun], what: str, lengths: list[int] | None = None
) -> tuple[Figure, Axes]:
    figure, axes = one_panel()
    length_axis(axes, what, trained_lengths(runs), lengths)
    axes.set_ylabel(f"validation loss ({UNIT})")
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
