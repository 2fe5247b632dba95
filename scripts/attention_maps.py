"""What heads attend to: attention maps (Figure A1 of LSSAR), the attention sink, sparsity.

python -m scripts.attention_maps RUN [RUN ...] --layer -1
python -m scripts.attention_maps RUN [RUN ...] --text "Some other text." --lengths 1024,16384
python -m scripts.attention_maps RUN [RUN ...] --distances

Draws RUN/attention_maps.png, the weights of all heads of the layer on a text. Prints a table for
the text and for the same validation tokens at each length, with a line for every run. The model
reads the text without end-of-text before it.

A row is one query's weights over the n keys that it sees: all up to its own or, in a head with a
window, the last of them. The first query has no choice and is left out. Reported are means over
rows of

    first_token         share of the first token in sum |A|: the sink; 1/n if all weights are equal,
                        or 0 where a window hides it
    entropy             of the shares |A| / sum |A|, in nats
    entropy_share       entropy / log n: 1 if all weights are equal, also for n = 1; 0 if one of
                        several keys gets all
    zeros               share of the n weights that are exactly 0 in float32, underflow included
    sum                 sum |A|: 1 for a distribution

So a row that is not a distribution is normalised as |A| / sum |A|. A row of zeros is dead: it is
counted, and excluded from the means.

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
picture is weights_by_distance.png in the run's folder, or for several runs
weights_by_distance_RUN_RUN.png in the folder that contains them (or --out).

RUN/attention_maps.json is a list of measurements. What it has is not measured again.

    variant, seed, checkpoint, step, sha256, trained_length, rope, rope_factor, rope_theta, dtype
    layer               from 0
    head_windows        by layer, the most keys that each head sees in a row; null: all
    data_dir, tokens    of the validation tokens; null and 0 for a text alone
    parts               {"1024 tokens": {...}, "text: Some other text.": {...}}, each with
        length          of a window
        keys            groups of rows with up to 2, 4, 8, ... keys up to their own, including keys
                        that a window hides
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
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

# for a script that is run as a file: the repository's modules are not beside it
sys.path.insert(0, str(Path(__file__).parents[1]))

from attention import DEAD
from config import Config
from data.tokenizer import get_tokenizer
from errors import UserError
from evaluation import attention_weights, head_windows
from scripts.common.options import option
from scripts.common.papers import LSSAR
from scripts.common.plots import Curve, draw_curves, panels
from scripts.common.runner import NO_TEXT, Evaluation, Results, Run, as_command, load_run
from scripts.common.tables import print_table
from scripts.common.validation import LengthOptions, TextOptions, stretches, windows

TEXT = LSSAR["figure_a1"]["text"]
CLAMP = 0.5
# The longest text that is drawn, and the longest whose ticks are its tokens, in tokens.
MAP_TOKENS, WORDS = 2048, 48
# The name of the part of --distances.
BY_DISTANCE = "by distance"
# A distance is near below this share of the length, and far from half of it.
NEAR = 1 / 16
NUMBERS = ("first_token", "entropy", "entropy_share", "zeros", "sum")
COLUMNS = ("first_token", "entropy", "entropy_share", "zeros", "dead", "sum")


@dataclass(frozen=True, kw_only=True)
class MapOptions(LengthOptions, TextOptions):
    """What heads attend to: maps of a text, the attention sink, and the weights by distance."""

    multiples = (1, 8)

    layer: int = option(-1, "0 is the first, -1 the last")
    text: str = option(TEXT, "to map; empty: none (default: the text of LSSAR's Figure A1)")
    tokens: int = option(32768, "validation tokens at each length; 0: only the text", at_least=0)
    distances: bool = option(False, "also positive weights by distance, dead rows, in all layers")

    def ids(self, config: Config) -> list[int]:
        """The tokens of the text."""
        ids = get_tokenizer(config.tokenizer).encode(self.text)
        if self.text and not 2 <= len(ids) <= MAP_TOKENS:
            raise UserError(f"--text has {len(ids)} tokens; a map takes 2 to {MAP_TOKENS}")
        return ids

    def lengths_of(self, *configs: Config) -> tuple[int, ...]:
        return super().lengths_of(*configs) if self.tokens else ()

    def validation(self, config: Config) -> NDArray:
        lengths = (*self.lengths_of(config), *([config.block_size] if self.distances else []))
        return stretches(lengths, self.tokens, config)


@dataclass(frozen=True)
class Chunk:
    """What is measured at once: the text, or the windows of a length by keys or by distance."""

    length: int | None  # of a window; None: the text
    by_distance: bool = False


def align(options: MapOptions, configs: Sequence[Config]) -> MapOptions:
    if len({len(chunks(options, config)) for config in configs}) > 1:
        raise UserError("learned positions end before a default length: give --lengths")
    return options


def identify(options: MapOptions, config: Config) -> dict:
    last = config.n_layer - 1
    if not -config.n_layer <= options.layer <= last:
        raise UserError(f"--layer {options.layer}: this model has layers 0 to {last}")
    options.ids(config)
    facts = {"layer": options.layer % config.n_layer, "head_windows": head_windows(config)}
    if not (options.tokens or options.distances):
        return facts | NO_TEXT | {"tokens": 0}
    if min(options.lengths_of(config), default=2) < 2:
        raise UserError("--lengths must be at least 2: a single key leaves no choice")
    return facts | {"tokens": options.validation(config)[:, 1:].size}


def chunks(options: MapOptions, config: Config) -> dict[str, Chunk]:
    found = {f"text: {options.text}": Chunk(None)} if options.text else {}
    found |= {f"{length} tokens": Chunk(length) for length in options.lengths_of(config)}
    if options.distances:
        found[BY_DISTANCE] = Chunk(config.block_size, by_distance=True)
    return found


def measure(options: MapOptions, run: Run, chunk: Chunk) -> dict:
    layer = options.layer % run.config.n_layer
    if chunk.length is None:
        return row_statistics(run, layer, [torch.tensor([options.ids(run.config)])])
    validation = windows(options.validation(run.config), chunk.length, run.device)
    one_by_one = (idx for x, _ in validation for idx in x.split(1))
    if chunk.by_distance:
        return distance_statistics(run, chunk.length, one_by_one)
    return row_statistics(run, layer, one_by_one)


# ---- groups of positions or distances ----


def distances(length: int) -> list[int]:
    """The greatest distance of each group: 0, 1, 3, 7, ..., length - 1."""
    return [min(length, 2**i) - 1 for i in range((length - 1).bit_length() + 1)]


def grouped(values: Tensor) -> Tensor:
    """Sums over each group of `distances`, [..., groups], of values at each distance, [..., L]."""
    sizes = np.diff(distances(values.shape[-1]), prepend=-1).tolist()
    return torch.stack([group.sum(-1) for group in values.split(sizes, -1)], dim=-1)


def without_nan(values: Tensor) -> list:
    """Nested lists with None in place of NaN, which JSON lacks."""
    array = values.numpy()
    return np.where(np.isnan(array), np.array(None), array).tolist()


def with_nan(values: list) -> Tensor:
    """Nested lists as a tensor, with NaN in place of None."""
    return torch.from_numpy(np.array(values, dtype=np.float64))


# ---- rows, by the number of keys ----


def row_statistics(run: Run, layer: int, windows: Iterable[Tensor]) -> dict:
    """The values of a part, over windows [1, L] of one length."""
    sums = torch.zeros(())
    for idx in windows:
        numbers = weights(run, layer, idx, row_numbers).double()
        sums = sums + group_sums(numbers, keys_seen(run.config, layer, idx.shape[1]))
    return summary(sums, idx.shape[1])


def weights(
    run: Run, layer: int, idx: Tensor, reduce: Callable[[Tensor], Tensor] = lambda A: A
) -> Tensor:
    """`reduce` of the layer's weights [H, L, L] for idx [1, L]."""
    one = slice(layer, layer + 1)
    with run.autocast():
        (A,) = attention_weights(run.model, idx.to(run.device), slice(None), reduce, one)
    return A[0].cpu()


def keys_seen(config: Config, layer: int, length: int) -> Tensor:
    """How many keys the rows of each head see, [H, length]."""
    most = [length if window is None else window for window in head_windows(config)[layer]]
    return torch.arange(1, length + 1).minimum(torch.tensor(most)[:, None])


def row_numbers(A: Tensor) -> Tensor:
    """For rows of A [..., rows, keys]: first token's share, entropy, nonzero weights, sum |A|."""
    size = A.abs()
    total = size.sum(-1)
    share = size / total.clamp_min(DEAD)[..., None]
    entropy = torch.special.entr(share).sum(-1)
    return torch.stack((share[..., 0], entropy, (A != 0).sum(-1).to(A.dtype), total), dim=-1)


def group_sums(numbers: Tensor, seen: Tensor) -> Tensor:
    """`row_numbers` [H, L, 4] of rows that see `seen` keys [H, L], summed: [H, 2 + 5, groups].

    These are the number of rows, of dead rows, and NUMBERS summed over the others.
    """
    n = seen.to(numbers.dtype)
    first, entropy, nonzero, total = numbers.unbind(-1)
    alive = (total > DEAD).to(numbers.dtype)
    share = torch.where(n > 1, entropy / n.log(), 1)
    means = torch.stack((first, entropy, share, 1 - nonzero / n, total), dim=1) * alive[:, None]
    counts = torch.stack((torch.ones_like(alive), 1 - alive), dim=1)
    return grouped(torch.cat((counts, means), dim=1))[..., 1:]  # without the first query


def summary(sums: Tensor, length: int) -> dict:
    """The values of a part, from the sums [H, 2 + 5, groups] over its windows.

    They are the share of dead rows, and each of NUMBERS as a mean over the others.
    """

    def means(sums: Tensor) -> dict[str, list]:
        rows, dead, *others = sums.unbind(1)
        alive = (total / (rows - dead) for total in others)
        columns = zip(("dead", *NUMBERS), (dead / rows, *alive), strict=True)
        return {name: without_nan(values) for name, values in columns}

    keys = [distance + 1 for distance in distances(length)[1:]]
    return {"length": length, "keys": keys, "groups": means(sums), "heads": means(sums.sum(-1))}


def mean_over_heads(part: dict, name: str) -> float:
    """Mean over the heads that have a value."""
    return with_nan(part["heads"][name]).nanmean().item()


# ---- weights, by distance ----


def distance_statistics(run: Run, length: int, windows: Iterable[Tensor]) -> dict:
    """The values of the part of --distances, over windows [1, length]."""
    pairs, found = visible_pairs(length, head_windows(run.config)), []  # [layers, H, groups]
    for idx in windows:
        with run.autocast():
            # the signs of weights, in a byte each
            signs = attention_weights(run.model, idx, slice(None), lambda A: A.sign().char())
        layers = zip(signs, pairs, strict=True)
        found.append(torch.stack([shares(A[0], seen) for A, seen in layers]))
    positive, dead_rows, dead_keys = torch.stack(found).mean(0).split((pairs.shape[-1], 1, 1), -1)
    return {
        "length": length, "distances": distances(length), "positive": without_nan(positive),
        "dead_rows": dead_rows[..., 0].tolist(), "dead_keys": dead_keys[..., 0].tolist(),
    }  # fmt: skip


def visible_pairs(length: int, windows: list[list[int | None]]) -> Tensor:
    """How many pairs of query and key heads see in groups of distances, [layers, H, groups]."""
    distance = torch.arange(length)
    most = torch.tensor([[window or length for window in heads] for heads in windows])
    return grouped((length - distance) * (distance < most[..., None])).double()


def shares(sign: Tensor, pairs: Tensor) -> Tensor:
    """The shares of one window, [H, groups + 2], from the signs of its weights [H, L, L].

    `pairs` are its `visible_pairs`; where there are none, the share is NaN.
    """
    length, used = sign.shape[-1], sign != 0
    positive = [(sign.diagonal(-d, -2, -1) > 0).sum(-1) for d in range(length)]
    dead = (~used.any(-1), ~used.tril(-1).any(-2)[:, : length // 2])
    dead_shares = torch.stack([x.double().mean(-1).cpu() for x in dead], dim=-1)
    return torch.cat((grouped(torch.stack(positive, dim=-1)).cpu() / pairs, dead_shares), dim=-1)


def mean_shares(result: dict) -> dict[str, float]:
    """Means over layers and heads, and for distances over all visible pairs of query and key.

    NaN where there is no such pair.
    """
    part = result["parts"][BY_DISTANCE]
    length, last = part["length"], torch.tensor(part["distances"])  # of each group
    pairs = visible_pairs(length, result["head_windows"])
    positive = with_nan(part["positive"]).nan_to_num() * pairs
    first = last.roll(1).add(1).index_fill(0, torch.tensor(0), 0)
    of = {"near": last < max(1, NEAR * length), "far": first >= length / 2, "all": last >= 0}
    means = {k: (positive[..., at].sum() / pairs[..., at].sum()).item() for k, at in of.items()}
    dead = {k: torch.tensor(part[k.replace(" ", "_")]) for k in ("dead rows", "dead keys")}
    return means | {k: shares.mean().item() for k, shares in dead.items()}


def positive_curve(result: dict) -> tuple[list[float], list[float]]:
    """The distances + 1, and the share of positive weights: over the heads that see, and layers."""
    part = result["parts"][BY_DISTANCE]
    shares = with_nan(part["positive"]).flatten(0, 1).nanmean(0).tolist()
    return [distance + 1 for distance in part["distances"]], shares


# ---- the tables and the pictures ----


def show(options: MapOptions, results: Results) -> dict[str, Figure]:
    """Print a table of every part, with a line for every run; draw the distances."""
    # the lengths of runs with other training lengths differ
    for names in zip(*(result["parts"] for result in results.values()), strict=True):
        if names[0] == BY_DISTANCE:
            return {"weights_by_distance": show_distances(results)}
        print(f"\nlayer {options.layer}, {ascii(names[0][:46])}; means over heads and rows")
        table = [["", "length", *COLUMNS]]
        for (run, result), name in zip(results.items(), names, strict=True):
            part = result["parts"][name]
            means = [f"{mean_over_heads(part, column):.4f}" for column in COLUMNS]
            table.append([run, str(part["length"]), *means])
        print_table(table)
    return {}


def show_distances(results: Results) -> Figure:
    """A line and a curve for every run."""
    length = next(iter(results.values()))["parts"][BY_DISTANCE]["length"]
    print(f"\nshare of positive weights, validation tokens in windows of {length}")
    means = {name: mean_shares(result) for name, result in results.items()}
    table = [["", *next(iter(means.values()))]]
    table += [[name, *(f"{share:.4f}" for share in of.values())] for name, of in means.items()]
    print_table(table, width=11)
    curves = [Curve(name, *positive_curve(result)) for name, result in results.items()]
    x, y = "distance from the diagonal + 1, up to", "share of weights above 0"
    return draw_curves({"": curves}, x, y, "x")


def draw_run(options: MapOptions, path: str | Path, measurement: dict) -> Figure | None:
    if not options.text:
        return None
    run, layer = load_run(path, options), measurement["layer"]
    ids = options.ids(run.config)
    return plot_maps(run, layer, ids, weights(run, layer, torch.tensor([ids])))


def plot_maps(run: Run, layer: int, ids: list[int], A: Tensor) -> Figure:
    """All heads' weights A [H, L, L] on token ids [L], one panel each, clamped as in Figure A1."""
    H, L, _ = A.shape
    tokenizer = get_tokenizer(run.config.tokenizer)
    words = [ascii(tokenizer.decode([i]))[1:-1].replace("$", r"\$") for i in ids]
    low, colours = (-CLAMP, "RdBu_r") if A.min() < 0 else (0.0, "viridis")
    distance = torch.arange(L)[:, None] - torch.arange(L)
    unseen = (distance < 0) | (distance >= keys_seen(run.config, layer, L)[..., None])
    figure, all_axes = panels(H)
    for axes, head in zip(all_axes, A.masked_fill(unseen, math.nan).numpy(), strict=True):
        image = axes.imshow(head, vmin=low, vmax=CLAMP, cmap=colours)
        axes.set_title(f"head {all_axes.index(axes)}", fontsize="small")
        if L <= WORDS:
            axes.set_xticks(range(L), words, rotation=90, fontsize=5)
            axes.set_yticks(range(L), words, fontsize=5)
    clamped = f"weights clamped to [{low:g}, {CLAMP:g}]; rows are queries"
    figure.suptitle(f"{run.config.variant_name}, layer {layer}: {clamped}", fontsize="medium")
    figure.colorbar(image, ax=all_axes, shrink=0.5)
    return figure


ATTENTION_MAPS = Evaluation(
    name="attention_maps",
    options=MapOptions,
    identify=identify,
    chunks=chunks,
    measure=measure,
    show=show,
    align=align,
    draw_run=draw_run,
)
main = as_command(ATTENTION_MAPS)

if __name__ == "__main__":
    main()
