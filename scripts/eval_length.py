"""Loss at lengths beyond the training length, over the same tokens at every length.

python -m scripts.eval_length RUN [RUN ...] --lengths 1024,2048,4096
python -m scripts.eval_length RUN [RUN ...] --lengths 1024,4096 --whole_documents
python -m scripts.eval_length RUN [RUN ...] --lengths 20000 --tokens 2000000000 --per_position \
    --rope none --rope_theta 500000
python -m scripts.eval_length hf:NAME_OR_FOLDER --files FILES --lengths 1024,4096 --window 1024

Prints a table and draws a curve for every run, loss_by_length.png. The third command is Figure 5 of
SSMax, on all validation tokens: with --per_position the picture is loss_by_position.png instead.

Every run is measured with a control: the same weights with plain RoPE, where a query of any layer
sees at most the last T keys (T: the training length). This keeps most models near their loss at T,
at no extra cost (models without positions may be harmed). A reader limited to T tokens therefore
has the lower of two losses: the control's, or the loss at T. The gain from context is that loss
minus the run's loss at the longest length: above 0 the model uses tokens beyond T, below 0 they
hurt it. Without T among --lengths, the gain is over the control alone. --no_control skips the
control, which takes half of the time.

With --whole_documents every window lies inside one document. Without it, a long window holds
several unrelated documents.

A run trained with --document_mask is measured twice: "apart", with the mask as in training, and
"joined", without it. --documents both does the same for other runs; --documents trained measures
every run only as it was trained.

A model of transformers (hf:) is measured on text files or --data_dir, with its own RoPE; --window
sets the T of its control. docs/elsewhere.md says which models are supported.

RUN/eval_length.json is a list of measurements, one for each combination of weights, tokens and
settings. Lengths that it has are not measured again; new ones are added:

    variant, seed, trained_length                       of the run
    step, sha256                                        of its weights
    attention, rope_factor, rope_theta, log_base        the options; null: the default
    rope                                                the scaling, also if it is the default;
                                                        null: the model's own (hf:)
    window                                              the most keys that a query sees in any
                                                        layer; null: all
    p                                                   of attention; null: none
    data_dir, tokens, dtype                             the first validation tokens of data_dir
    environment                                         of the latest update
    parts                                               by name, such as

        "1024 tokens": {"length": 1024, "loss": .., "standard_error": .., "by_stretch": [..]}

        loss            mean, in nats per token
        by_stretch      mean loss of each stretch, as long as the lengths' least common multiple
        standard_error  over the stretches; null for a single stretch

    Other names of parts: "1024 tokens apart", "1024 tokens joined", "1024 tokens by position" (it
    has "loss_by_position" too), "1024 tokens in 4096 of whole documents" (of stretches of 4096).
"""

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from config import Config, PositiveInt
from errors import UserError
from layers.selfcheck import check_kernels
from scripts.common.command_line import option
from scripts.common.hf_models import ModelConfig
from scripts.common.labels import title_of
from scripts.common.plots import Curve, draw_by_length
from scripts.common.runner import Results, as_command, with_controls
from scripts.common.runs import Run
from scripts.common.tables import print_table
from scripts.common.validation import (
    ControlledEvaluation,
    LengthEvaluation,
    stretches,
    windows,
)

# The smoothed loss at position i is the mean over positions i (1 - 1/16) to i (1 + 1/16).
SMOOTHING = 16
# The plot by position starts at this fraction of the training length: losses are high before it.
FIRST_DRAWN = 1 / 32
UNIT = "validation loss (nats per token)"
MEANING = "gain: of context beyond the training length, at the longest length; below 0 it hurts"
WINDOW_ALONE = (
    "the training length is not among --lengths: the gain is over the sliding window alone, which "
    "may have a higher loss"
)


@dataclass(frozen=True)
class Chunk:
    """The windows of one length."""

    length: int
    by_position: bool = False  # also the loss at each position
    documents: str | None = None  # apart or joined


@dataclass(frozen=True, kw_only=True)
class LossByLength(LengthEvaluation, ControlledEvaluation):
    """Loss at lengths beyond the training length, over the same tokens at every length."""

    name = "eval_length"

    tokens: PositiveInt | None = option(None, "tokens to predict (default: one per 24 weights)")
    per_position: bool = option(False, "also measure the loss by position at the greatest length")
    whole_documents: bool = option(False, "only windows that lie inside one document")
    documents: str | None = option(
        None,
        "attention as 'trained', or 'both' within documents and across them (default: both with "
        "document_mask)",
        choices=("trained", "both"),
    )

    def maskings(self, config: Config) -> tuple[str | None, ...]:
        """The maskings to measure, first as in training: "apart" (document mask), "joined" (none).

        None: the run has no mask. Raises UserError if a model cannot be measured with the mask.
        """
        if self.whole_documents:
            return (None,)
        if config.document_mask:
            return ("apart",) if self.documents == "trained" else ("apart", "joined")
        if self.documents != "both":
            return (None,)
        if isinstance(config, ModelConfig):
            raise UserError(f"{config.label}: --documents both is for runs of train.py")
        if config.end_of_text >= config.text_ids:
            raise UserError(
                f"{config.out_dir}: --documents both needs end-of-text, which vocab_size = "
                f"{config.vocab_size} leaves out"
            )
        return (None, "apart")

    def text(self, config: Config) -> NDArray:
        lengths = self.lengths_of(config)
        tokens = self.tokens or default_tokens(config, lengths)
        return stretches(lengths, tokens, config, self.whole_documents)

    def identify(self, config: Config) -> dict:
        return {"tokens": self.text(config)[:, 1:].size}

    def chunks(self, config: Config) -> dict[str, Chunk]:
        lengths = self.lengths_of(config)
        by_name = {}
        for length, documents in itertools.product(lengths, self.maskings(config)):
            name = f"{length} tokens"
            if documents is not None:
                name += f" {documents}"
            if self.whole_documents:  # stretches of other lengths are in other documents
                name += f" in {math.lcm(*lengths)} of whole documents"
            by_position = self.per_position and length == lengths[-1]
            if by_position:
                name += " by position"
            by_name[name] = Chunk(length, by_position, documents)
        return by_name

    def measure(self, run: Run, chunk: Chunk) -> dict:
        text = self.text(run.config)
        if chunk.documents is not None:
            run = replace(run, model=copy.copy(run.model))  # with the same weights
            is_apart = chunk.documents == "apart"
            run.model.document_start = run.config.end_of_text if is_apart else None
            if is_apart and not run.config.document_mask:  # not yet checked within documents
                check_kernels(run.model, run.config, run.dtype, within_documents=True)
        by_position, by_window = mean_losses(run, windows(text, chunk.length, run.device))
        by_stretch = by_window.view(len(text), -1).mean(1)
        values: dict[str, Any] = {
            "length": chunk.length,
            "loss": by_position.mean().item(),
            "standard_error": standard_error(by_stretch),
            "by_stretch": [round(loss, 6) for loss in by_stretch.tolist()],
        }
        if chunk.documents is not None:
            values["documents"] = chunk.documents
            values["document_starts"] = int((text == run.config.end_of_text).sum())
        if chunk.by_position:
            values["loss_by_position"] = by_position.tolist()
        return values

    def align(self, configs: Sequence[Config]) -> Self:
        """All runs at the same lengths, on the same tokens.

        Raises UserError if the runs would be measured on different text.
        """
        super().align(configs)
        lengths = self.lengths_of(*configs)
        tokens = self.tokens
        if tokens is None:
            tokens = min(default_tokens(config, lengths) for config in configs)
        return replace(self, lengths=lengths, tokens=tokens)

    def control(self, config: Config) -> Self | None:
        control = self.window_control(config, max(self.lengths_of(config)))
        return None if control is None else replace(control, documents="trained")

    def summarise(self, parts: dict[str, dict]) -> dict:
        """The lengths and losses; of the other masking they are under `apart` or `joined`."""
        summary: dict[str, Any] = {}
        for documents, group in by_masking(parts).items():
            losses = {
                "lengths": [part["length"] for part in group],
                "loss": [part["loss"] for part in group],
                "standard_error": [part["standard_error"] for part in group],
            }
            summary |= {documents: losses} if documents else losses
        return summary

    def show(self, results: Results) -> dict[str, Figure]:
        """Print the losses, the controls and the gains, and draw the losses."""
        title = title_of(results)
        print_losses(results, title, self.whole_documents)
        picture = "loss_by_position" if self.per_position else "loss_by_length"
        return {picture: plot(results, title, self.per_position)}


def by_masking(parts: dict[str, dict]) -> dict[str, list[dict]]:
    """The parts with attention as in training, under "", and others under `apart` or `joined`."""
    groups: dict[Any, list[dict]] = {}
    as_trained = next(iter(parts.values())).get("documents")
    for part in parts.values():
        documents = part.get("documents")
        key = "" if documents == as_trained else documents
        groups.setdefault(key, []).append(part)
    return groups


def default_tokens(config: Config, lengths: Sequence[int]) -> int:
    """The validation tokens that are measured by default.

    One token per 24 weights of the blocks, but at least 8 windows of the longest length, and at
    most val_tokens. That is 3.5M for 124M parameters.
    """
    weights = 12 * config.n_layer * config.n_embd**2
    return min(config.val_tokens, max(weights // 24, 8 * max(lengths)))


@torch.no_grad()
def mean_losses(run: Run, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Mean losses in nats of windows x, y [B, L]: float64, by position [L], and by window [n]."""
    total = torch.zeros((), dtype=torch.float64)
    by_window: list[Tensor] = []
    for x, y in batches:
        with run.autocast():
            losses = run.model.token_losses(x, y).cpu().double()
        total = total + losses.sum(0)
        by_window.extend(losses.mean(1))
    return total / len(by_window), torch.stack(by_window)


def standard_error(means: Tensor) -> float | None:
    """The standard error of the mean of means [n]; None for a single one."""
    if len(means) == 1:
        return None
    return (means.std() / math.sqrt(len(means))).item()


def difference_error(part: dict, other: dict) -> float | None:
    """The standard error over the text of one loss minus another.

    None where they were measured over stretches of another length, or over a single stretch.
    """
    losses = torch.tensor(part["by_stretch"], dtype=torch.float64)
    other_losses = torch.tensor(other["by_stretch"], dtype=torch.float64)
    if len(losses) != len(other_losses):
        return None
    return standard_error(losses - other_losses)


def gain_parts(result: dict) -> tuple[dict, dict] | None:
    """The two losses whose difference is the gain at the longest length; None without a control.

    The first is what T tokens allow, T being the training length: the lower of the losses with a
    sliding window of T and, if it is measured, at T. The second is with all tokens.
    """
    if "control" not in result:
        return None
    control = {part["length"]: part for part in result["control"]["parts"].values()}
    limited = [control[max(control)]]
    if result["trained_length"] in control:
        limited.append(control[result["trained_length"]])
    with_T = min(limited, key=lambda part: part["loss"])
    with_all = by_masking(result["parts"])[""][-1]
    return with_T, with_all


def gain(result: dict) -> float | None:
    """A measurement's gain from context at the longest length; None without a control."""
    parts = gain_parts(result)
    return None if parts is None else parts[0]["loss"] - parts[1]["loss"]


def is_over_window_alone(result: dict) -> bool:
    """Tell whether the gain lacks the loss at T, which may be lower than with the window."""
    return "control" in result and result["trained_length"] not in result["lengths"]


def gain_error(result: dict) -> float | None:
    """The standard error of `gain` over the text; None if unknown, or if the gain is 0 by itself.

    The control of a model whose windows are all shorter than T is the model itself.
    """
    parts = gain_parts(result)
    if parts is None or parts[0] == parts[1]:
        return None
    return difference_error(*parts)


def error_range(errors: Iterable[float | None]) -> str:
    """The least and the largest of the errors that are known, "" where none is.

    A loss that is not finite has no error.
    """
    known = [error for error in errors if error is not None and math.isfinite(error)]
    if not known:
        return ""
    low = f"{min(known):.4f}"
    high = f"{max(known):.4f}"
    return low if low == high else f"{low} to {high}"


# ---- the table and the pictures ----


def print_losses(results: Results, title: str, whole_documents: bool) -> None:
    first = next(iter(results.values()))
    headings = [UNIT]
    if title:
        headings.append(title)
    if whole_documents:
        count = first["tokens"] // math.lcm(*first["lengths"])
        headings.append(f"{count} stretches of whole documents")
    print("\n" + ", ".join(headings))
    gains = {name: gain(result) for name, result in results.items()}
    has_gains = any(value is not None for value in gains.values())
    table = [["length", *map(str, first["lengths"])]]
    if has_gains:
        table[0].append("gain")
    errors = []
    for label, losses in table_rows(results):
        row = [label]
        row += [f"{loss:.4f}" for loss in losses["loss"]]
        if has_gains:
            value = gains.get(label)
            row.append("" if value is None else f"{value:+.4f}")
        table.append(row)
        errors += losses["standard_error"]
    print_table(table, width=9)
    if loss_errors := error_range(errors):
        print(f"{first['tokens']:,} tokens; standard error of a loss over this text: {loss_errors}")
    if has_gains:
        print(MEANING)
    if any(is_over_window_alone(result) for result in results.values()):
        print(WINDOW_ALONE)
    if gain_errors_text := error_range(map(gain_error, results.values())):
        print(f"standard error of a gain over this text: {gain_errors_text}")
    for sentence in on_documents(results):
        print(sentence)


def table_rows(results: Results) -> Iterator[tuple[str, dict]]:
    """The rows of the table: each run, then what was measured beside it."""
    for name, result in results.items():
        yield name, result
        for documents in ("apart", "joined"):
            if documents in result:
                yield f"  {documents}", result[documents]
        if "control" in result:
            yield f"  sliding window of {result['control']['window']}", result["control"]


def on_documents(results: Results) -> list[str]:
    """Sentences on which losses were measured with the document mask."""
    masked = [name for name, result in results.items() if is_masked(result)]
    others = [name for name in results if name not in masked]
    sentences = []
    if any(has_no_documents(result) for result in results.values()):
        sentences.append(
            "no document begins in this text, so the document mask changes nothing: apart is joined"
        )
    if any("apart" in result for result in results.values()):
        sentences.append("apart: the same weights, with the document mask")
    if masked:
        sentences.append(f"apart, with the document mask as in training: {', '.join(masked)}")
    if any("joined" in result for result in results.values()):
        sentences.append("joined: the same weights without the document mask")
    if masked and others:
        sentences.append(
            f"{', '.join(others)}: trained and measured without the mask; do not compare this with "
            "a loss apart"
        )
    return sentences


def has_no_documents(result: dict) -> bool:
    """Tell whether a loss with the document mask is of a text in which no document begins."""
    return any(part.get("document_starts") == 0 for part in result["parts"].values())


def is_masked(result: dict) -> bool:
    return next(iter(result["parts"].values())).get("documents") == "apart"


def plot(results: Results, title: str, by_position: bool = False) -> Figure:
    """Loss over length, or over the position in the longest windows; thin lines are controls."""
    shortest = min(result["trained_length"] for result in results.values())
    first_drawn = int(FIRST_DRAWN * shortest)
    curves = []
    for name, result, is_control in with_controls(results):
        for documents, parts in by_masking(result["parts"]).items():
            label = f"{name}, {documents}" if documents else name
            x: Sequence[int] = [part["length"] for part in parts]
            y = [part["loss"] for part in parts]
            if by_position:
                losses = smoothed(parts[-1]["loss_by_position"])
                x = range(first_drawn + 1, len(losses) + 1)
                y = losses[first_drawn:]
            curves.append(Curve(label, x, y, style="thin" if is_control else "line"))
    xlabel = "position" if by_position else "length"
    return draw_by_length(results.values(), title, curves, xlabel, UNIT)


def smoothed(losses: list[float]) -> list[float]:
    """At each position the mean over a window that grows with it and is cut off at the end."""
    curve = []
    for position in range(1, len(losses) + 1):
        half = position // SMOOTHING
        near = losses[position - half - 1 : position + half]
        curve.append(sum(near) / len(near))
    return curve


main = as_command(LossByLength)

if __name__ == "__main__":
    main()
