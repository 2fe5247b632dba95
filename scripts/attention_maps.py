"""What heads attend to: attention maps (Figure A1 of LSSAR), the attention sink, sparsity.

python -m scripts.attention_maps RUN [RUN ...] --layer -1
python -m scripts.attention_maps RUN [RUN ...] --text "Some other text." --lengths 1024,16384
python -m scripts.attention_maps RUN [RUN ...] --distances
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

LSSAR's Sect. 2.2.1 says of ReLU attention that positive scores are concentrated around the
diagonal, and that a score below 0 gets no gradient, which isolates its token. --distances measures
all layers and heads on the validation tokens, in windows of the training length:

    positive            share of the weights above 0, by distance i - j of query i from key j: 0, 1,
                        then up to 3, 7, 15, ...; of the keys that a query sees: null at distances
                        that a head's attention window (--window, local_window) hides
    dead_rows           share of the queries whose weights are all 0: their output is 0
    dead_keys           share of the keys in a window's first half with weight 0 for every later
                        query

A negative weight is neither positive nor 0. The table has means over layers, heads and pairs of
query and key: near, at distances below 1/16 of the length; far, from half of it; and all. The
picture is weights_by_distance.png.

RUN/attention_maps.json is a list of measurements:

    variant, seed, step, sha256, trained_length, dtype
    attention, rope, rope_factor, rope_theta, log_base
    layer               from 0
    head_windows        by layer, the most keys that each head sees in a row; null: all; of runs
    data_dir, tokens    of the validation tokens; null and 0 for a text alone
    parts               {"1024 tokens": {...}, "text: Some other text.": {...}}, each with
        length          of a window
        keys            groups of rows with up to 2, 4, 8, ... keys up to their position, including
                        keys that a window hides
        groups          {"dead": [heads][groups] share of rows, "first_token": [heads][groups], ...}
        heads           {"dead": [heads], "first_token": [heads], ...}, over all rows
                        and "by distance": {...} with
        length          of a window
        distances       the greatest distance of each group
        positive        [layers][heads][groups]
        dead_rows, dead_keys    [layers][heads]
    environment
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
from runtime.checkpoint import Checkpoint
from scripts.common.command_line import option
from scripts.common.hf_loading import CausalLM
from scripts.common.hf_models import (
    AnyRun,
    ModelConfig,
    encode,
    open_tokenizer,
    require_tokenizer,
)
from scripts.common.papers import LSSAR
from scripts.common.plots import Curve, draw_curves, panels
from scripts.common.runner import NO_TEXT, Evaluation, Results, as_command
from scripts.common.runs import Run, load_run, outline
from scripts.common.tables import print_table
from scripts.common.validation import (
    FilesOptions,
    LengthOptions,
    on_same_text,
    stretches,
    windows,
)

TEXT = LSSAR["figure_a1"]["text"]
CLAMP = 0.5
# The longest text that is drawn, and the longest whose ticks are its tokens, in tokens.
MAP_TOKENS, WORDS = 2048, 48
# The name of the chunk of --distances.
BY_DISTANCE = "by distance"
# A distance is near below this share of the length, and far from half of it.
NEAR = 1 / 16
STATISTICS = ("first_token", "entropy", "entropy_share", "zeros", "sum")
COLUMNS = ("first_token", "entropy", "entropy_share", "zeros", "dead", "sum")


@dataclass(frozen=True, kw_only=True)
class MapOptions(LengthOptions, FilesOptions):
    """What heads attend to: maps of a text, the attention sink, and the weights by distance."""

    multiples = (1, 8)

    layer: int = option(-1, "layer to map: 0 is the first, -1 the last")
    text: str = option(TEXT, "text to map; empty: none (default: that of LSSAR's Figure A1)")
    tokens: NonNegativeInt = option(32768, "validation tokens at each length; 0: only the text")
    distances: bool = option(False, "also measure positive weights by distance in all layers")

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
        if self.distances:
            lengths += (config.block_size,)
        return stretches(lengths, self.tokens, config)


def align(options: MapOptions, configs: Sequence[Config]) -> MapOptions:
    """The options unchanged.

    Raises UserError if the runs have different numbers of chunks, or would be measured on
    different text.
    """
    if options.tokens > 0:
        on_same_text(options, configs)
    counts = {len(chunks(options, config)) for config in configs}
    if len(counts) > 1:
        raise UserError("learned positions end before a default length: give --lengths")
    return options


def identify(options: MapOptions, config: Config) -> dict:
    if not -config.n_layer <= options.layer < config.n_layer:
        raise UserError(f"--layer {options.layer}: this model has layers 0 to {config.n_layer - 1}")
    if config.document_mask:
        raise UserError(
            "attention_maps counts all earlier tokens as keys: it cannot measure a run with "
            "document_mask"
        )
    text_tokens = len(options.ids(config))
    if config.longest is not None and text_tokens > config.longest:
        raise UserError(
            f"{config.out_dir}: the text has {text_tokens} tokens, but the model's learned "
            f"positions end at {config.longest}: give a shorter --text, or --text '' for none"
        )
    facts: dict[str, Any] = {"layer": options.layer_of(config)}
    if not isinstance(config, ModelConfig):
        facts["head_windows"] = head_windows(outline(config, options.window))
    elif options.distances:
        raise UserError(f"--distances is for runs of this repository, not for {config.label}")
    if not (options.tokens or options.distances):
        return facts | NO_TEXT | {"tokens": 0}
    if min(options.lengths_of(config), default=2) < 2:
        raise UserError("--lengths must be at least 2: a single key leaves no choice")
    targets = options.validation(config)[:, 1:]
    return facts | {"tokens": targets.size}


def chunks(options: MapOptions, config: Config) -> dict[str, Any]:
    """None for the text, the lengths of windows, and BY_DISTANCE for the shares by distance."""
    by_name: dict[str, Any] = {}
    if options.text:
        by_name[f"text: {options.text}"] = None
    for length in options.lengths_of(config):
        by_name[f"{length} tokens"] = length
    if options.distances:
        by_name[BY_DISTANCE] = BY_DISTANCE
    return by_name


def measure(options: MapOptions, run: Run, chunk: Any) -> dict:
    if chunk == BY_DISTANCE:
        return measure_distances(options, run)
    layer = options.layer_of(run.config)
    if chunk is None:
        text = torch.tensor([options.ids(run.config)])
        return measure_rows(run, layer, [text])
    return measure_rows(run, layer, single_windows(options, run, chunk))


def single_windows(options: MapOptions, run: Run, length: int) -> Iterator[Tensor]:
    """The windows [1, length] of the validation text."""
    validation = options.validation(run.config)
    for x, _ in windows(validation, length, run.device):
        yield from x.split(1)


# ---- groups of positions or distances ----


def distances(length: int) -> list[int]:
    """The greatest distance of each group: 0, 1, 3, 7, ..., length - 1."""
    groups = (length - 1).bit_length() + 1
    return [min(length, 2**i) - 1 for i in range(groups)]


def sum_groups(values: Tensor) -> Tensor:
    """Sum values at each distance, [..., L], over each group of `distances`: [..., groups]."""
    last = distances(values.shape[-1])
    sizes = np.diff(last, prepend=-1).tolist()
    sums = [group.sum(-1) for group in values.split(sizes, -1)]
    return torch.stack(sums, dim=-1)


def without_nan(values: Tensor) -> list:
    """Nested lists with None instead of NaN, which JSON lacks."""
    array = values.numpy()
    return np.where(np.isnan(array), np.array(None), array).tolist()


def with_nan(values: list) -> Tensor:
    """Nested lists as a tensor, with NaN instead of None."""
    return torch.from_numpy(np.array(values, dtype=np.float64))


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


def count_keys(heads: list[int | None], length: int) -> Tensor:
    """The number of keys that each row of each head sees, [H, length], from the heads' windows."""
    causal = torch.arange(1, length + 1)
    limits = torch.tensor([window or length for window in heads])
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


# ---- weights, by distance ----


def measure_distances(options: MapOptions, run: Run) -> dict:
    """The shares of --distances, means over windows of the training length."""
    length = run.config.block_size
    pairs = visible_pairs(length, head_windows(run.model))  # [layers, H, groups]
    measured = defaultdict(list)  # by layer within each window
    for idx in single_windows(options, run, length):
        with run.autocast():
            signs = layer_attention_weights(
                run.model,
                idx,
                rows=slice(None),
                reduce=lambda A: A.sign().char(),  # a byte each
            )
        for layer_signs, layer_pairs in zip(signs, pairs, strict=True):
            for name, share in shares(layer_signs[0], layer_pairs).items():
                measured[name].append(share)
    result: dict[str, Any] = {"length": length, "distances": distances(length)}
    for name, by_layer in measured.items():
        by_window = torch.stack(by_layer).unflatten(0, (-1, len(pairs)))
        result[name] = without_nan(by_window.mean(0))
    return result


def visible_pairs(length: int, layers: list[list[int | None]]) -> Tensor:
    """The number of pairs of query and key that heads see, [layers, H, groups of distances]."""
    distance = torch.arange(length)
    limits = torch.tensor([[window or length for window in heads] for heads in layers])
    visible = distance < limits[..., None]
    pairs = (length - distance) * visible  # [layers, H, L]
    return sum_groups(pairs).double()


def shares(sign: Tensor, pairs: Tensor) -> dict[str, Tensor]:
    """The shares of a layer in one window, from the signs of its weights [H, L, L].

    These are positive weights by distance [H, groups], NaN where `visible_pairs` are 0, and dead
    rows and dead keys [H].
    """
    length = sign.shape[-1]
    positive = []
    for distance in range(length):
        diagonal = sign.diagonal(-distance, -2, -1)
        positive.append((diagonal > 0).sum(-1))
    counts = sum_groups(torch.stack(positive, dim=-1)).cpu()
    used = sign != 0
    used_rows = used.any(-1)
    used_keys = used.tril(-1).any(-2)  # by a later query
    used_keys = used_keys[:, : length // 2]
    dead_rows = (~used_rows).double().mean(-1)
    dead_keys = (~used_keys).double().mean(-1)
    return {
        "positive": counts / pairs,
        "dead_rows": dead_rows.cpu(),
        "dead_keys": dead_keys.cpu(),
    }


def mean_shares(result: dict) -> dict[str, float]:
    """Means over layers and heads, and for distances over all visible pairs of query and key.

    NaN where there is no such pair.
    """
    part = result["parts"][BY_DISTANCE]
    length = part["length"]
    pairs = visible_pairs(length, result["head_windows"])  # [layers, H, groups]
    positive = with_nan(part["positive"]).nan_to_num() * pairs  # pairs with a positive weight
    last = torch.tensor(part["distances"])  # of each group
    first = torch.cat((torch.tensor([0]), last[:-1] + 1))
    groups = {
        "near": last < max(1, NEAR * length),
        "far": first >= length / 2,
        "all": last >= 0,
    }
    mean_of = {}
    for name, group in groups.items():
        share = positive[..., group].sum() / pairs[..., group].sum()
        mean_of[name] = share.item()
    mean_of["dead rows"] = torch.tensor(part["dead_rows"]).mean().item()
    mean_of["dead keys"] = torch.tensor(part["dead_keys"]).mean().item()
    return mean_of


def positive_curve(result: dict) -> tuple[list[float], list[float]]:
    """The distances + 1, and the mean share of positive weights over the heads that see so far."""
    part = result["parts"][BY_DISTANCE]
    by_head = with_nan(part["positive"]).flatten(0, 1)  # [layers * H, groups]
    return [last + 1 for last in part["distances"]], by_head.nanmean(0).tolist()


# ---- the tables and the pictures ----


def show(options: MapOptions, results: Results) -> dict[str, Figure]:
    """Print a table of every chunk, with a line for every run; draw the distances."""
    # the default lengths of runs with other training lengths differ
    parts = [result["parts"] for result in results.values()]
    for names in zip(*parts, strict=True):
        if names[0] == BY_DISTANCE:
            return {"weights_by_distance": show_distances(results)}
        print(f"\nlayer {options.layer}, {ascii(names[0][:46])}; means over heads and rows")
        table = [["", "length", *COLUMNS]]
        for (run, result), name in zip(results.items(), names, strict=True):
            part = result["parts"][name]
            cells = [f"{mean_over_heads(part, column):.4f}" for column in COLUMNS]
            table.append([run, str(part["length"]), *cells])
        print_table(table)
    return {}


def show_distances(results: Results) -> Figure:
    """Print a line and draw a curve for every run."""
    curves = []
    table: list[list[str]] = []
    for name, result in results.items():
        curves.append(Curve(name, *positive_curve(result)))
        mean_of = mean_shares(result)
        if not table:
            table.append(["", *mean_of])
        table.append([name, *(f"{share:.4f}" for share in mean_of.values())])
    length = next(iter(results.values()))["parts"][BY_DISTANCE]["length"]
    print(f"\nshare of positive weights, validation tokens in windows of {length}")
    print_table(table, width=11)
    return draw_curves(
        {"": curves}, "distance from the diagonal + 1, up to", "share of weights above 0", log="x"
    )


def draw_run(
    options: MapOptions, path: AnyRun, checkpoint: Checkpoint | None, measurement: dict
) -> Figure | None:
    if not options.text:
        return None
    run = load_run(path, options, checkpoint)
    layer = measurement["layer"]
    ids = options.ids(run.config)
    A, keys = weights(run, layer, torch.tensor([ids]))
    return plot_maps(run, layer, ids, A, keys)


def plot_maps(run: Run, layer: int, ids: list[int], A: Tensor, keys: Tensor) -> Figure:
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
            words = [printable(run.config, token) for token in ids]
            axes.set_xticks(range(length), words, rotation=90, fontsize=5)
            axes.set_yticks(range(length), words, fontsize=5)
    clamped = f"weights clamped to [{low:g}, {CLAMP:g}]; rows are queries"
    figure.suptitle(f"{run.config.label}, layer {layer}: {clamped}", fontsize="medium")
    figure.colorbar(image, ax=all_axes, shrink=0.5)
    return figure


def printable(config: Config, token: int) -> str:
    """The text of a token in ASCII; matplotlib would read $ as the start of a formula."""
    if isinstance(config, ModelConfig):
        text = open_tokenizer(config.source).decode([token])
    else:
        text = get_tokenizer(config.tokenizer).decode([token])
    return ascii(text)[1:-1].replace("$", r"\$")


ATTENTION_MAPS = Evaluation(
    name="attention_maps",
    options=MapOptions,
    identify=identify,
    chunks=chunks,
    measure=measure,
    show=show,
    align=align,
    draw_run=draw_run,
    takes_models=True,
)
main = as_command(ATTENTION_MAPS)

if __name__ == "__main__":
    main()
