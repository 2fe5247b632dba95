"""The lengths at which runs are evaluated, and the validation tokens that are measured there."""

import functools
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from config import Config
from data.loader import Batches, copy_to, inputs_and_targets, validation_tokens
from data.shards import check_tokenizer, data_difference
from errors import UserError
from runtime import metadata
from runtime.config_files import find_data
from scripts.common.command_line import FILES, option, parse_lengths
from scripts.common.hf_models import ModelConfig, tokens_of
from scripts.common.runner import Evaluation
from scripts.common.runs import batches


@dataclass(frozen=True, kw_only=True)
class LengthEvaluation(Evaluation):
    """An evaluation at several lengths, by default multiples of the training length."""

    multiples: ClassVar[tuple[float, ...]] = (1, 2, 4, 8, 16)

    lengths: tuple[int, ...] | None = option(
        None,
        "lengths in tokens, such as 1024,2048 (default: multiples of the training length)",
        type=parse_lengths,
    )

    def lengths_of(self, *configs: Config) -> tuple[int, ...]:
        return default_lengths(configs, self.multiples) if self.lengths is None else self.lengths

    def chunks(self, config: Config) -> dict[str, Any]:
        """The lengths, for an evaluation that measures one after the other."""
        return {str(length): length for length in self.lengths_of(config)}


@dataclass(frozen=True, kw_only=True)
class TextEvaluation(Evaluation):
    """An evaluation on validation tokens."""

    data_dir: str | None = option(None, "shards to use instead of the run's")

    def apply_to(self, config: Config) -> Config:
        config = super().apply_to(config)
        return config.replace(data_dir=find_data(self.data_dir or config.data_dir))

    def align(self, configs: Sequence[Config]) -> Self:
        """The evaluation unchanged. Raises UserError if the runs would have different text."""
        tokenizers = {config.tokenizer_id: config.out_dir for config in configs}
        if len(tokenizers) > 1:
            raise UserError(
                f"the runs {' and '.join(tokenizers.values())} have different tokenizers: losses "
                "per token cannot be compared"
            )
        texts = {str(Path(self.data_dir or config.data_dir).resolve()) for config in configs}
        if len(texts) > 1:
            raise UserError(
                f"the runs were trained on {' and '.join(sorted(texts))}: --data_dir DIR measures "
                "all of them on one text"
            )
        if self.data_dir is None:
            require_same_data([Path(config.out_dir) for config in configs])
        return self


@dataclass(frozen=True, kw_only=True)
class ModelEvaluation(TextEvaluation):
    """An evaluation on validation tokens that takes models of transformers too."""

    takes_models = True

    files: list[str] | None = option(None, "text files to measure hf: models on", **FILES)

    def apply_to(self, config: Config) -> Config:
        config = super().apply_to(config)
        if isinstance(config, ModelConfig):
            return config.with_text(self.files or [], self.data_dir)
        if self.files:
            raise UserError(
                f"{config.out_dir} is measured on shards: `python -m data.text FILES` makes them, "
                "for --data_dir; text files are for models of transformers"
            )
        return config


@dataclass(frozen=True, kw_only=True)
class ControlledEvaluation(ModelEvaluation):
    """An evaluation that measures every run and its `window_control`."""

    no_control: bool = option(False, "skip the sliding-window control of each run")

    def window_control(self, config: Config, longest: int) -> Self | None:
        """Return the control of a run: the same weights, plain RoPE, and a window of T keys.

        T is the training length; layers with a smaller window keep it. `longest` is the greatest
        number of tokens that the last token could attend to. None where the control hides nothing.
        """
        visible = min(longest, self.window or longest)
        if self.no_control or visible <= config.block_size:
            return None
        return replace(
            self,
            window=config.block_size,
            rope="none",
            rope_factor=None,
            rope_theta=None,
            log_base=None,
        )


def require_same_data(runs: Sequence[Path]) -> None:
    """Raise UserError if a run was trained on data that differ from the first run's."""
    first = metadata.read_start_record(runs[0]).data
    for run in runs[1:]:
        changed = data_difference(first, metadata.read_start_record(run).data)
        if changed is not None:
            raise UserError(
                f"{run} was trained on {changed} that differ from {runs[0]}'s, in a folder of the "
                "same name: --data_dir DIR measures both on one text"
            )


def default_lengths(configs: Sequence[Config], multiples: Sequence[float]) -> tuple[int, ...]:
    """These multiples of the training lengths, up to the end of any run's learned positions."""
    longest = math.inf
    lengths = set()
    for config in configs:
        lengths |= {int(multiple * config.block_size) for multiple in multiples}
        longest = min(longest, config.longest or math.inf)
    return tuple(sorted(length for length in lengths if length <= longest))


def accuracies(measurement: dict) -> dict[int, float]:
    """The accuracy in percent at each length, in ascending order, of an evaluation of answers."""
    percent = {}
    for name, part in measurement["parts"].items():
        if name.isdecimal():  # a length
            percent[int(name)] = 100 * part["accuracy"]
    return dict(sorted(percent.items()))


def check_lengths(config: Config, lengths: Iterable[int]) -> None:
    """Raise UserError if a length is beyond the learned positions of a run with this config."""
    length = max(lengths)
    if config.longest is not None and length > config.longest:
        name = "max_position_embeddings" if isinstance(config, ModelConfig) else "block_size"
        raise UserError(
            f"{config.out_dir}: a length of {length} is beyond its learned positions, which end "
            f"at {name} = {config.longest}"
        )


@functools.lru_cache(1)  # an evaluation asks several times
def stretches(
    lengths: tuple[int, ...],
    wanted: int,
    config: Config,
    whole_documents: bool = False,
) -> NDArray[np.integer]:
    """Validation text [n, unit + 1] for predicting the same tokens at every length.

    `unit` is the least common multiple of the lengths; the last token of a stretch is a target
    only. The stretches follow one another from the first token on, `wanted` tokens at most. With
    `whole_documents` each lies inside one document, and all validation tokens are searched. Raises
    UserError if there is none, or where the run's learned positions end before a length.
    """
    check_lengths(config, lengths)
    unit = math.lcm(*lengths)
    tokens = checked_tokens(config, sys.maxsize if whole_documents else wanted)
    bounds = {0, len(tokens)}
    if whole_documents:  # a document begins with end-of-text
        begins = np.flatnonzero(tokens == config.end_of_text).tolist()
        if not begins:
            raise UserError(
                f"{config.data_dir}: no document begins in this text: it has no end-of-text token"
            )
        bounds.update(begins)
    starts: list[int] = []
    longest = 0
    for begin, end in itertools.pairwise(sorted(bounds)):
        starts.extend(range(begin, end - unit, unit))
        longest = max(longest, end - begin - 1)
    if min(wanted, longest) < unit:
        available = f"the text has {longest} validation tokens with a target"
        if whole_documents and longest < unit:
            available = f"the longest document has {longest} tokens with a target"
        elif wanted <= longest:
            available = f"{wanted} validation tokens are read (--tokens, or val_tokens of the run)"
        raise UserError(
            f"{config.data_dir}: {available}, but lengths {list(lengths)} need a multiple of {unit}"
        )
    return sliding_window_view(tokens, unit + 1)[starts[: wanted // unit]]


def windows(text: NDArray[np.integer], length: int, device: torch.device) -> Batches:
    """The windows of `stretches`: x, y, int64 [B, length], y being x shifted by one token."""
    cut = sliding_window_view(text, length + 1, axis=1)[:, ::length]
    for batch in batches(cut.reshape(-1, length + 1), length):
        yield copy_to(device, *inputs_and_targets(np.stack(batch)))


def single_windows(
    text: NDArray[np.integer], length: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """The inputs of `windows` one by one, [1, length]."""
    for x, _ in windows(text, length, device):
        yield from x.split(1)


@functools.lru_cache(1)  # an evaluation asks several times
def checked_tokens(config: Config, wanted: int = sys.maxsize) -> NDArray[np.integer]:
    """The first `wanted` validation tokens and a last target, if they are tokens of the run."""
    if isinstance(config, ModelConfig):
        return tokens_of(config, wanted)
    check_tokenizer(config.data_dir, config.tokenizer)
    return validation_tokens(config.data_dir, wanted, config.text_ids)
