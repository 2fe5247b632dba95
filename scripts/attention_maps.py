"""What heads attend to: attention maps (Figure A1 of LSSAR), the attention sink, sparsity.

python -m scripts.attention_maps RUN [RUN ...] --layer -1
python -m scripts.attention_maps RUN [RUN ...] --text "Some other text." --lengths 1024,16384
python -m scripts.attention_maps hf:NAME_OR_FOLDER --files FILES --lengths 1024,16384

Draws RUN/attention_maps.png, the weights of all heads of a layer on a text. Prints a table for the
text, and for each length a table for the same validation tokens, with a line for every run. The
text is read without end-of-text before it; a model of transformers (hf:) reads it after the special
tokens of its tokenizer, such as BOS, and takes its validation tokens from --files or --data_dir.

A row is the weights of one query over the n keys that it sees: all keys up to its own position, or
the last of them in a head with a window. The first query sees a single key and is left out. The
columns are means over rows:

    first_token         share of the first token in sum |A|: the sink; 1/n if all weights are equal,
                        or 0 where a window hides it
    entropy             of the shares |A| / sum |A|, in nats
    entropy_share       entropy / log n: 1 if all weights are equal, also for n = 1; 0 if a single
                        key of several gets all
    zeros               share of the n weights that are exactly 0 in float32, underflow included
    dead                share of the rows that are all 0; they are left out of the other means
    sum                 sum |A|: 1 for a distribution

RUN/attention_maps.json is a list of measurements:

    variant, seed, step, sha256, trained_length, dtype, p, window
    attention, rope, rope_factor, rope_theta, log_base  as in eval_length.json
    layer               from 0
    data_dir, tokens    of the validation tokens; null for a text alone
    parts               {"1024 tokens": {...}, "text: Some other text.": {...}}, each with
        length          of a window
        keys            groups of rows with up to 2, 4, 8, ... keys up to their position, including
                        keys that a window hides
        groups          {"dead": [heads][groups] share of rows, "first_token": [heads][groups], ...}
        heads           {"dead": [heads], "first_token": [heads], ...}, over all rows
    environment
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from attention import DEAD
from config import Config, NonNegativeInt
from data.tokenizer import get_tokenizer
from errors import UserError
from evaluation import head_windows, layer_attention_weights
from scripts.common.command_line import option
from scripts.common.groups import distances, sum_groups, with_nan, without_nan
from scripts.common.hf_loading import CausalLM
from scripts.common.hf_models import (
    AnyRun,
    ModelConfig,
    encode,
    open_tokenizer,
    require_tokenizer,
)
from scripts.common.labels import title_of
from scripts.common.papers import LSSAR
from scripts.common.plots import panels
from scripts.common.runner import NO_TEXT, Results, as_command
from scripts.common.runs import Run, load_run
from scripts.common.tables import print_table
from scripts.common.validation import (
    LengthEvaluation,
    ModelEvaluation,
    single_windows,
    stretches,
)

TEXT = LSSAR["figure_a1"]["text"]
CLAMP = 0.5
# The longest text that is drawn, and the longest whose ticks are its tokens, in tokens.
MAP_TOKENS = 2048
WORDS = 48
STATISTICS = ("first_token", "entropy", "entropy_share", "zeros", "sum")
COLUMNS = ("first_token", "entropy", "entropy_share", "zeros", "dead", "sum")


@dataclass(frozen=True, kw_only=True)
class AttentionMaps(LengthEvaluation, ModelEvaluation):
    """What heads attend to: maps of a text, the attention sink, and entropy."""

    name = "attention_maps"
    multiples = (1, 8)

    layer: int = option(-1, "layer to map: 0 is the first, -1 the last")
    text: str = option(TEXT, "text to map; empty: none; by default the text of LSSAR's Figure A1")
    tokens: NonNegativeInt = option(
        32768, "validation tokens at each length, at least one window; 0: only the text"
    )

    def ids(self, config: Config) -> list[int]:
        """The tokens of the text."""
        if not self.text:
            return []
        if isinstance(config, ModelConfig):
            tokenizer = require_tokenizer(config, "--text '' leaves out the text")
            ids = encode(tokenizer, self.text, add_special_tokens=True)
        else:
            ids = get_tokenizer(config.tokenizer).encode(self.text)
        if not 2 <= len(ids) <= MAP_TOKENS:
            raise UserError(f"--text has {len(ids)} tokens; a map takes 2 to {MAP_TOKENS}")
        return ids

    def lengths_of(self, *configs: Config) -> tuple[int, ...]:
        """The lengths of the validation windows; none without --tokens."""
        if self.tokens == 0:
            return ()
        return super().lengths_of(*configs)

    def layer_of(self, config: Config) -> int:
        """The number of the layer, from 0."""
        return self.layer % config.n_layer

    def validation(self, config: Config) -> NDArray[np.integer]:
        """The validation text that is cut into windows of all lengths."""
        lengths = self.lengths_of(config)
        return stretches(lengths, max(self.tokens, math.lcm(*lengths)), config)

    def align(self, configs: Sequence[Config]) -> Self:
        """All runs at the same lengths.

        Raises UserError if the runs would be measured on different text.
        """
        if self.tokens > 0:
            super().align(configs)
        return replace(self, lengths=self.lengths_of(*configs))

    def identify(self, config: Config) -> dict:
        if not -config.n_layer <= self.layer < config.n_layer:
            raise UserError(
                f"--layer {self.layer}: {config.out_dir} has layers 0 to {config.n_layer - 1}"
            )
        if config.document_mask:
            raise UserError(
                f"{config.out_dir} has document_mask: attention_maps cannot measure it, "
                "because it counts all earlier tokens as keys"
            )
        text_tokens = len(self.ids(config))
        if config.longest is not None and text_tokens > config.longest:
            raise UserError(
                f"{config.out_dir}: the text has {text_tokens} tokens, but the model's learned "
                f"positions end at {config.longest}: give a shorter --text, or --text '' for none"
            )
        if not self.text and self.tokens == 0:
            raise UserError("--text '' and --tokens 0 leave nothing to measure: drop one of them")
        layer = self.layer_of(config)
        if self.tokens == 0:
            return NO_TEXT | {"layer": layer, "tokens": None}
        if min(self.lengths_of(config)) < 2:
            raise UserError("--lengths must be at least 2: a single key leaves no choice")
        return {"layer": layer, "tokens": self.validation(config)[:, 1:].size}

    def chunks(self, config: Config) -> dict[str, Any]:
        """None for the text, and the lengths of windows."""
        by_name: dict[str, Any] = {}
        if self.text:
            by_name[f"text: {self.text}"] = None
        for length in self.lengths_of(config):
            by_name[f"{length} tokens"] = length
        return by_name

    def measure(self, run: Run, chunk: Any) -> dict:
        layer = self.layer_of(run.config)
        if chunk is None:
            text = torch.tensor([self.ids(run.config)])
            return measure_rows(run, layer, [text])
        inputs = single_windows(self.validation(run.config), chunk, run.device)
        return measure_rows(run, layer, inputs)

    def show(self, results: Results) -> dict[str, Figure]:
        """Print a table of every chunk, with a line for every run."""
        names = next(iter(results.values()))["parts"]
        for name in names:
            facts = [f"layer {self.layer}", ascii(name[:46]), title_of(results)]
            print(f"\n{', '.join(filter(None, facts))}; means over heads and rows")
            table = [["", "length", *COLUMNS]]
            for run, result in results.items():
                part = result["parts"][name]
                cells = [f"{mean_over_heads(part, column):.4f}" for column in COLUMNS]
                table.append([run, str(part["length"]), *cells])
            print_table(table)
        return {}

    def draw_run(self, run: AnyRun, result: dict) -> Figure | None:
        if not self.text:
            return None
        opened = load_run(run, self)
        layer = result["layer"]
        ids = self.ids(opened.config)
        A, keys = weights(opened, layer, torch.tensor([ids]))
        facts = [opened.config.label, f"layer {layer}", title_of({"": result})]
        return plot_maps(opened.config, ", ".join(filter(None, facts)), ids, A, keys)


# ---- rows, by the number of keys ----


def measure_rows(run: Run, layer: int, inputs: Iterable[Tensor]) -> dict:
    """Means over the rows of a layer's weights, of inputs [1, L] of one length."""
    sums: dict[str, Tensor] = {}
    for idx in inputs:
        length = idx.shape[1]
        statistics, keys = weights(run, layer, idx, row_statistics)
        for name, values in group_sums(statistics.double(), keys).items():
            sums[name] = sums.get(name, 0) + values
    return summary(sums, length)


def weights(
    run: Run, layer: int, idx: Tensor, reduce: Callable[[Tensor], Tensor] = lambda A: A
) -> tuple[Tensor, Tensor]:
    """`reduce` of the layer's weights [H, L, L] for idx [1, L], and its rows' keys [H, L]."""
    idx = idx.to(run.device)
    with run.autocast():
        if isinstance(run.model, CausalLM):
            A, keys = run.model.attention_weights(idx, layer, reduce)
            return A[0].cpu(), keys.cpu().expand(A.shape[1], -1)
        (A,) = layer_attention_weights(
            run.model, idx, rows=slice(None), reduce=reduce, layers=slice(layer, layer + 1)
        )
    return A[0].cpu(), count_keys(head_windows(run.model)[layer], idx.shape[1])


def count_keys(windows: list[int | None], length: int) -> Tensor:
    """The number of keys that each query of each head sees, [H, length], from the heads' windows.

    None: no window.
    """
    causal = torch.arange(1, length + 1)
    limits = torch.tensor([window or length for window in windows])
    return causal.minimum(limits[:, None])


def row_statistics(A: Tensor) -> Tensor:
    """For rows of A [..., rows, keys]: first token's share, entropy, nonzero weights, sum |A|."""
    size = A.abs()
    total = size.sum(-1)
    share = size / total.clamp_min(DEAD)[..., None]
    entropy = torch.special.entr(share).sum(-1)
    nonzero = (A != 0).sum(-1).to(A.dtype)
    return torch.stack((share[..., 0], entropy, nonzero, total), dim=-1)


def group_sums(statistics: Tensor, keys: Tensor) -> dict[str, Tensor]:
    """Sums [H, groups] over the rows of each group: their number, the dead ones, and STATISTICS.

    `statistics` [H, L, 4] are `row_statistics` of rows that see `keys` [H, L]. STATISTICS are
    summed over the rows that are not dead.
    """
    first_token, entropy, nonzero, total = statistics.unbind(-1)
    n = keys.to(statistics.dtype)
    alive = (total > DEAD).to(statistics.dtype)
    values = {
        "rows": torch.ones_like(alive),
        "dead": 1 - alive,
        "first_token": first_token * alive,
        "entropy": entropy * alive,
        "entropy_share": torch.where(n > 1, entropy / n.log(), 1) * alive,
        "zeros": (1 - nonzero / n) * alive,
        "sum": total * alive,
    }
    # without the first query
    return {name: sum_groups(value)[..., 1:] for name, value in values.items()}


def summary(sums: dict[str, Tensor], length: int) -> dict:
    """The measurement of a length, from the sums [H, groups] over its windows."""
    return {
        "length": length,
        "keys": [distance + 1 for distance in distances(length)[1:]],
        "groups": means(sums),
        "heads": means({name: groups.sum(-1) for name, groups in sums.items()}),
    }


def means(sums: dict[str, Tensor]) -> dict[str, list]:
    """The share of dead rows, and each of STATISTICS as a mean over the others."""
    alive = sums["rows"] - sums["dead"]
    result = {"dead": without_nan(sums["dead"] / sums["rows"])}
    for name in STATISTICS:
        result[name] = without_nan(sums[name] / alive)
    return result


def mean_over_heads(part: dict, name: str) -> float:
    """The mean of a column over the heads that have a value."""
    return with_nan(part["heads"][name]).nanmean().item()


# ---- the tables and the pictures ----


def plot_maps(config: Config, title: str, ids: list[int], A: Tensor, keys: Tensor) -> Figure:
    """All heads' weights A [H, L, L] on token ids [L], one panel each, clamped as in Figure A1.

    `keys` [H, L] is the number that each row sees.
    """
    heads, length, _ = A.shape
    low = 0.0
    colours = "viridis"
    if A.min() < 0:
        low = -CLAMP
        colours = "RdBu_r"
    position = torch.arange(length)
    distance = position[:, None] - position
    masked = (distance < 0) | (distance >= keys[..., None])
    maps = A.masked_fill(masked, math.nan).numpy()
    figure, all_axes = panels(heads)
    for head, axes in enumerate(all_axes):
        image = axes.imshow(maps[head], vmin=low, vmax=CLAMP, cmap=colours)
        axes.set_title(f"head {head}", fontsize="small")
        if length <= WORDS:
            words = [printable(config, token) for token in ids]
            axes.set_xticks(range(length), words, rotation=90, fontsize=5)
            axes.set_yticks(range(length), words, fontsize=5)
    clamped = f"weights clamped to [{low:g}, {CLAMP:g}]; rows are queries"
    figure.suptitle(f"{title}\n{clamped}", fontsize="medium")
    figure.colorbar(image, ax=all_axes, shrink=0.5)
    return figure


def printable(config: Config, token: int) -> str:
    """The text of a token in ASCII; matplotlib would read $ as the start of a formula."""
    if isinstance(config, ModelConfig):
        text = open_tokenizer(config.source).decode([token])
    else:
        text = get_tokenizer(config.tokenizer).decode([token])
    return ascii(text)[1:-1].replace("$", r"\$")


main = as_command(AttentionMaps)

if __name__ == "__main__":
    main()
